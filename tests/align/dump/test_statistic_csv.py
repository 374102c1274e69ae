"""MindSpore's native dumps, after its documented format: columns by title, values by name, broken files refused."""

import random
from pathlib import Path

import dumps
import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump import statistic_csv, summary
from telechat_moe.tools.align.dump.records import Phase, Stats

TITLES = (
    "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,"
    "Max Value,Min Value,Avg Value,L2Norm Value"
)
ROWS = [
    'MatMul,Default/network/dense/MatMul-op1,4,0,170,input,0,24,float32,"(2,3)",5,0,2.5,7.4161983',
    'MatMul,Default/network/dense/MatMul-op1,4,0,170,input,1,48,bfloat16,"(3,4)",1,-1,0.25,2',
    'MatMul,Default/network/dense/MatMul-op1,4,0,170,output,0,32,float32,"(2,4)",nan,-inf,nan,nan',
    'ReduceSum,Gradients/Default/network/grad/Sum-op9,5,0,180,input,0,4,int32,"()",3,3,3,null',
    'ReduceSum,Gradients/Default/network/grad/Sum-op9,5,0,180,output,0,4,int32,"()",3,3,3,3',
    'AdamWeightDecay,Default/optimizer-AdamW/Adam-op3,6,0,190,input,1,4,float32,"(1,)",1,1,1,1',
]


def native(tmp_path: Path, titles: str = TITLES, rows=ROWS) -> Path:
    folder = tmp_path / "native" / "rank_3" / "Net" / "0" / "7"
    folder.mkdir(parents=True)
    (folder / "statistic.csv").write_text("\n".join([titles, *rows]) + "\n")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(folder / "MatMul.MatMul-op1.4.0.170.input.0.DefaultFormat.float32.npy", x)
    np.save(folder / "123456.npy", np.ones((3, 4), np.float32))
    name = "MatMul.Default_network_dense_MatMul-op1.4.0.170.input.1.DefaultFormat.bfloat16"
    (folder / "mapping.csv").write_text(f"123456.npy,{name}.npy\n")
    return tmp_path / "native"


def test_calls_slots_phases_and_values(tmp_path):
    dump = statistic_csv.read(native(tmp_path))
    rank = dump.ranks[7, 3]
    matmul, grad, adam = rank.calls.values()
    assert [c.phase for c in (matmul, grad, adam)] == [
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
    ]
    assert [place for place, _ in matmul.tensors()] == ["input.0", "input.1", "output.0"]
    x, w, y = (t for _, t in matmul.tensors())
    assert (x.shape, x.dtype, x.stats) == ((2, 3), "float32", Stats(5.0, 0.0, 2.5, 7.4161983))
    assert np.array_equal(x.load(), np.arange(6).reshape(2, 3))
    assert (w.dtype, w.load().sum()) == ("bfloat16", 12)
    assert y.stats is not None
    assert np.isnan(y.stats.max)
    assert y.stats.min == -np.inf
    assert y.read is None
    (scalar, _) = (t for _, t in grad.tensors())
    assert (scalar.shape, scalar.stats) == ((), Stats(3.0, 3.0, 3.0, None))
    assert adam.inputs[0] is None
    report = summary.inspect(tmp_path / "native", summary.read(tmp_path / "native"), verify=True)
    assert report["source"] == "statistic.csv"
    assert report["ranks"][0]["values"] == 2


def test_columns_are_found_by_title(tmp_path):
    order = [13, 9, 8, 5, 6, 0, 1, 2, 3, 4, 10]
    split = [
        [
            *r.split('"')[0].split(",")[:-1],
            f'"{r.split(chr(34))[1]}"',
            *r.split('"')[2].split(",")[1:],
        ]
        for r in ROWS
    ]
    titles = TITLES.split(",")
    rows = [",".join(r[i] for i in order) for r in split]
    dump = statistic_csv.read(native(tmp_path, ",".join(titles[i] for i in order), rows))
    x = next(iter(dump.ranks[7, 3].calls.values())).inputs[0]
    assert x.stats == Stats(5.0, None, None, 7.4161983)


@pytest.mark.parametrize(
    ("titles", "rows", "said"),
    [
        (TITLES.replace("Slot", "Place"), ROWS, "columns Slot missing"),
        (TITLES, [ROWS[0], ROWS[0]], ":3: IO 'input', slot 0"),
        (TITLES, [ROWS[0].replace("input", "inout")], ":2: IO 'inout'"),
        (TITLES, [ROWS[0].replace('"(2,3)"', '"(2,x)"')], ":2: shape '(2,x)'"),
        (TITLES, [ROWS[0].replace(",5,", ",big,")], ":2: Max Value 'big'"),
        (TITLES, [ROWS[0].replace("input,0", "input,-1")], ":2: slot '-1'"),
        (TITLES, [ROWS[0] + ",1"], ":2: 15 cells, 14 expected"),
        (TITLES, [ROWS[0].replace("(2,3)", "(2,4)")], "the dump says [2, 4]"),
    ],
)
def test_what_is_broken_is_named(titles, rows, said, tmp_path, capsys):
    assert main(["align", "inspect", str(native(tmp_path, titles, rows)), "--verify"]) == 3
    message = capsys.readouterr().err
    assert said in message
    assert "rank_3" in message


def test_nothing_there(tmp_path):
    with pytest.raises(BadInputError, match=r"no statistic\.csv"):
        statistic_csv.read(tmp_path)


def test_200_mutated_dumps_never_crash(tmp_path, capsys):
    rng, root, refused = random.Random(3), native(tmp_path), 0
    for _ in range(200):
        path, content = dumps.break_one(root, rng)
        code = main(["align", "inspect", str(root), "--verify", "--calls"])
        assert code in (0, 3)
        refused += code == 3
        capsys.readouterr()
        dumps.restore(path, content)
    assert refused > 80
