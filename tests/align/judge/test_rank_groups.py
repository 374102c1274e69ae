"""`--layout tp=2,ep=2`: the ranks of groups that a dump knows by name only."""

from pathlib import Path

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.errors import UsageError
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump import msprobe_write
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, Scalar, TensorRecord
from telechat_moe.tools.align.judge.rank_groups import group_in, parsed, with_degrees

EIGHT = [*range(8)]


def groups(dimension, degrees, ranks=tuple(range(16))):
    return {tuple(group_in(dimension, [*ranks], r, degrees)) for r in ranks}


def test_groups_are_those_of_megatrons_example():
    """The 16 ranks of `initialize_model_parallel`'s docstring, with two tensor and four pipeline ranks."""
    degrees = {"tp": 2, "pp": 4}
    assert groups("tp", degrees) == {(i, i + 1) for i in range(0, 16, 2)}
    assert groups("pp", degrees) == {(i, i + 4, i + 8, i + 12) for i in range(4)}
    assert groups("dp", degrees) == {(i + j, i + j + 2) for i in range(0, 16, 4) for j in (0, 1)}


@pytest.mark.torch
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_groups_are_megatrons(tp, cp, pp, ep, etp):
    state = pytest.importorskip("megatron.core.parallel_state")
    order = "tp-cp-ep-dp-pp"
    dense = state.RankGenerator(tp, 1, 16 // (tp * cp * pp), pp, cp, order)
    expert = state.RankGenerator(etp, ep, 16 // (etp * ep * pp), pp, 1, order)
    degrees = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
    tokens = {n: (dense, n) for n in ("tp", "cp", "dp", "pp")}
    tokens |= {"etp": (expert, "tp"), "ep": (expert, "ep"), "edp": (expert, "dp")}
    for name, (ranks, token) in tokens.items():
        assert groups(name, degrees) == {tuple(g) for g in ranks.get_ranks(token)}, name


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=2,tp=2", "zero=1", "tp=two"])
def test_a_layout_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="expected NAME=DEGREE"):
        parsed(text)


def test_degrees_that_do_not_make_the_ranks_are_refused():
    with pytest.raises(UsageError, match="make 9 ranks, the dump has 8"):
        group_in("tp", EIGHT, 0, {"tp": 3, "dp": 3})


def record(x):
    return TensorRecord("float32", x.shape, read=lambda: x)


def reduced(name, pairs):
    """A sum on four ranks in groups that are known by one name."""
    sent = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    ranks = {}
    for rank in range(4):
        out = sum(sent[r] for pair in pairs if rank in pair for r in pair)
        call = Call(
            "Distributed.all_reduce.0.forward", "api", "Distributed.all_reduce", 0, Phase.FORWARD,
            [record(sent[rank]), Scalar("str", "sum"), Scalar("str", name)], {}, [record(out)],
        )  # fmt: skip
        ranks[0, rank] = RankDump(0, rank, "pytorch", "tensor", "L1", {call.key: call})
    return Dump(Path("run"), ranks)


@pytest.mark.parametrize(
    ("name", "pairs"), [("tp_group", [(0, 1), (2, 3)]), ("data-parallel", [(0, 2), (1, 3)])]
)
def test_a_group_known_by_name_is_that_of_the_layout(name, pairs):
    run, count = with_degrees(reduced(name, pairs), {"tp": 2})
    assert count == 4
    assert bisect(run, run, itself=True).findings == []
    wrong, _ = with_degrees(reduced(name, [(0, 3), (1, 2)]), {"tp": 2})
    assert bisect(wrong, wrong, itself=True).verdict == "diverged"


def test_the_command_takes_a_layout(tmp_path, capsys):
    msprobe_write.write(reduced("tp_group", [(0, 1), (2, 3)]), tmp_path / "run")
    msprobe_write.write(reduced("", [(0, 1, 2, 3)]), tmp_path / "whole")
    assert main(["align", str(tmp_path / "run"), "--layout", "tp=2"]) == 0, capsys.readouterr()
    assert main(["align", str(tmp_path / "run")]) == 1
    assert main(["align", str(tmp_path / "whole"), "--layout", "tp=2"]) == 2
    assert "without effect" in capsys.readouterr().err
    assert main(["align", str(tmp_path / "run"), "--layout", "tp=2/tp=4"]) == 2
    assert "2 layouts for 1 dumps" in capsys.readouterr().err
