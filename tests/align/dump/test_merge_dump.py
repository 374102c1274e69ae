"""Dumps of several ranks merged into that of one device; what contradicts itself is named and left out."""

import json
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.cli.align import merge as verb
from telechat_moe.cli.verb import VerbParser
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.tools.align.dump import msprobe, msprobe_write
from telechat_moe.tools.align.dump.layout_dict import to_dict
from telechat_moe.tools.align.dump.logical import CopyBound
from telechat_moe.tools.align.dump.merge import LayerNumbers, LayoutDescription, into, merge_ranks
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    TensorLayout,
    TensorRecord,
)


def in_memory(key, place, whole):
    """Return a merged tensor as a record that holds it; sums of terms in float64."""
    values = whole.values
    return TensorRecord(whole.dtype, whole.shape, read=lambda: values)


def tensor(x, layout: TensorLayout | None = None) -> TensorRecord:
    x = np.asarray(x, np.float32)
    return TensorRecord("float32", x.shape, layout=layout, read=lambda: x)


def call(
    key, inputs=(), outputs=(), parameters=None, phase=Phase.FORWARD, index=0, parent=None
) -> Call:
    name = key.removesuffix(f".{phase.value}.{index}").removesuffix(f".{index}.{phase.value}")
    return Call(
        key, "module", name, index, phase, list(inputs), {}, list(outputs), parameters or {}, parent
    )


def rank(number: int, *calls: Call) -> RankDump:
    return RankDump(0, number, "mindspore", "tensor", "L0", {c.key: c for c in calls})


def layout(*axes: tuple[str, int], dims, ranks=None, **more) -> TensorLayout:
    count = int(np.prod([n for _, n in axes]))
    return TensorLayout(
        tuple(n for _, n in axes),
        tuple(a for a, _ in axes),
        tuple(ranks or range(count)),
        dims,
        **more,
    )


X = np.arange(32, dtype=np.float32).reshape(8, 4)


def test_tensors_merge_by_the_layouts_of_their_records() -> None:
    rows = layout(("dp", 2), ("tp", 2), dims=(("dp",), ("tp",)))
    terms = layout(("dp", 2), ("tp", 2), dims=(("dp",), ()), partial={"tp": "sum"})

    def one(r):
        d, t = divmod(r, 2)
        mine = X[4 * d : 4 * d + 4]
        out = [tensor(mine * (t + 1), terms), [tensor([7.0]), Scalar("int", 3)], None]
        return rank(
            r, call("Cell.a.Linear.forward.0", [tensor(mine[:, 2 * t : 2 * t + 2], rows)], out)
        )

    merged, outcomes = merge_ranks([one(r) for r in range(4)], LayoutDescription(), in_memory)
    found = merged.calls["Cell.a.Linear.forward.0"]
    assert (found.inputs[0].load() == X).all()
    assert (found.outputs[0].load() == 3 * X.astype(np.float64)).all()
    assert found.outputs[1][0].load().tolist() == [7.0]
    assert found.outputs[1][1:] == [Scalar("int", 3)]
    assert found.outputs[2] is None
    assert [(o.place, o.how, o.copies, o.problem) for o in outcomes] == [
        ("input.0", "dump", "none", None),
        ("output.0", "dump", "none", None),
        ("output.1.0", "copies", "bitwise", None),
    ]


def test_contradictions_are_left_out_and_named() -> None:
    def pair(first, second):
        ranks = [rank(r, call("Cell.a.Norm.forward.0", [x])) for r, x in enumerate((first, second))]
        merged, (outcome,) = merge_ranks(ranks, LayoutDescription(), in_memory)
        assert merged.calls["Cell.a.Norm.forward.0"].inputs == [None]
        return outcome.problem

    cut = layout(("dp", 2), dims=((), ("dp",)))
    assert "rank 1 differs from rank 0" in pair(tensor(X), tensor(X + 1))
    assert "no layout" in pair(tensor(X), tensor(X, cut))
    assert "no layout" in pair(tensor(X, cut), tensor(X, layout(("dp", 2), dims=(("dp",), ()))))
    assert "holds a shard of shape" in pair(tensor(X, cut), tensor(X[:, :1], cut))
    assert "no shard of rank 2" in pair(*[tensor(X, layout(("dp", 3), dims=(("dp",), ())))] * 2)
    assert "only statistics" in pair(*[TensorRecord("float32", (2, 2), layout=cut)] * 2)


def test_differing_copies_are_kept_or_bounded_on_demand() -> None:
    whole = layout(("dp", 2), dims=((), ()))
    ranks = [
        rank(r, call("Cell.a.Norm.forward.0", [tensor(X + r * 1e-6, whole)])) for r in range(2)
    ]
    _, (outcome,) = merge_ranks(ranks, LayoutDescription(), in_memory, keep=True)
    assert outcome.copies == "differ"
    assert "rank 1 differs from rank 0" in outcome.problem
    _, (outcome,) = merge_ranks(
        ranks, LayoutDescription(), in_memory, CopyBound(rtol=1e-4, atol=1e-4)
    )
    assert (outcome.copies, outcome.problem) == ("within bound", None)


def test_micro_batches_of_unequal_runs_merge_to_one_batch() -> None:
    """dp2 with 2 micro-batches of 2 rows, and dp1 with 4: the same 8 rows; a weight is the same in all calls."""
    w = np.ones((4, 4))

    def run(dp, micro):
        rows = 8 // dp // micro
        how = layout(("dp", dp), dims=(("dp",), ()))
        ranks = []
        for r in range(dp):
            calls = []
            for m in range(micro):
                begin = r * 8 // dp + m * rows
                for j in range(2):  # the module runs twice in a micro-batch
                    x = tensor(X[begin : begin + rows] + 100 * j, how)
                    calls.append(
                        call(
                            f"Cell.a.Linear.forward.{2 * m + j}",
                            [x],
                            index=2 * m + j,
                            parameters={"weight": tensor(w)},
                        )
                    )
            ranks.append(rank(r, *calls))
        return merge_ranks(ranks, LayoutDescription(calls=micro), in_memory)

    for dp, micro in ((2, 2), (1, 4), (4, 1), (2, 4)):
        merged, outcomes = run(dp, micro)
        assert list(merged.calls) == ["Cell.a.Linear.forward.0", "Cell.a.Linear.forward.1"]
        for j, found in enumerate(merged.calls.values()):
            assert (found.inputs[0].load() == X + 100 * j).all()
            assert (found.parameters["weight"].load() == w).all()
        assert all(o.problem is None for o in outcomes)


def test_micro_batches_cut_the_dimension_that_data_parallel_cuts() -> None:
    how = layout(("dp", 2), dims=((), ("dp",)))
    ranks = [
        rank(
            r,
            *(
                call(
                    f"Cell.a.Linear.forward.{m}",
                    [tensor(X[:, 2 * r + m : 2 * r + m + 1], how)],
                    index=m,
                )
                for m in range(2)
            ),
        )
        for r in range(2)
    ]
    merged, (outcome,) = merge_ranks(ranks, LayoutDescription(calls=2), in_memory)
    assert outcome.problem is None
    assert (merged.calls["Cell.a.Linear.forward.0"].inputs[0].load() == X).all()


def test_layers_of_virtual_stages_stand_in_the_order_of_the_model() -> None:
    stages = LayerNumbers({(0, 0): (0,), (1, 0): (1,), (0, 1): (2,), (1, 1): (3,)})

    def one(r):
        calls = [
            call(
                f"Cell.{c}.layers.0.Block.{way}.0",
                [tensor([10 * stages.layers[r, c][0]])],
                phase=phase,
            )
            for way, phase in (("forward", Phase.FORWARD), ("backward", Phase.BACKWARD))
            for c in ((0, 1) if way == "forward" else (1, 0))
        ]
        return rank(r, *calls)

    said = LayoutDescription(stages={0: 0, 1: 1}, layers=stages)
    merged, outcomes = merge_ranks([one(0), one(1)], said, in_memory)
    assert {k: c.inputs[0].load().tolist() for k, c in merged.calls.items()} == {
        f"Cell.layers.{n}.Block.{way}.0": [10.0 * n]
        for n in range(4)
        for way in ("forward", "backward")
    }
    keys = list(merged.calls)
    assert all("forward" in k for k in keys[:4])
    assert keys[4] == "Cell.layers.3.Block.backward.0"
    assert {o.how for o in outcomes} == {"one rank"}
    clash = [one(0), one(0)]
    clash[1] = RankDump(0, 1, "mindspore", "tensor", "L0", clash[1].calls)
    _, outcomes = merge_ranks(
        clash, LayoutDescription(stages={0: 0, 1: 0}, layers=stages), in_memory
    )
    assert {o.how for o in outcomes} == {"copies"}


def test_layouts_may_be_said_in_a_file(tmp_path: Path) -> None:
    how = layout(("tp", 2), dims=(("tp",), ()), padded={0: 10})
    said = tmp_path / "said.json"
    said.write_text(
        json.dumps({"tensors": {"Cell.a.*.forward.* input.0": {**to_dict(how), "Shape": [9, 4]}}})
    )
    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    ranks = [
        rank(r, call("Cell.a.Linear.forward.0", [tensor(x[5 * r : 5 * r + 5])])) for r in range(2)
    ]
    merged, (outcome,) = merge_ranks(ranks, LayoutDescription.read(said), into(tmp_path / "parts"))
    assert outcome.how == "said"
    assert (merged.calls["Cell.a.Linear.forward.0"].inputs[0].load() == x[:9]).all()
    for text in ("[]", "{", '{"layout": 1}', '{"tensors": {"a": 3}}', '{"layers": {"a": [1]}}'):
        said.write_text(text)
        with pytest.raises(BadInputError):
            LayoutDescription.read(said)


# -------------------------------------------------------------------------------- on real trees


def run(*argv: str) -> int:
    args = VerbParser(verb.VERB).parse_args(argv)
    return args.run(args)


def tree(folder: Path, change=None) -> Path:
    """Write a dump of two steps on dp2 x tp2 as msprobe does: a cut input, a bfloat16 sum, a copied weight."""
    cut = layout(("dp", 2), ("tp", 2), dims=(("dp",), ("tp",)))
    terms = layout(("dp", 2), ("tp", 2), dims=(("dp",), ()), partial={"tp": "sum"})
    whole = layout(("dp", 2), ("tp", 2), dims=((), ()))
    ranks = []
    for step in range(2):
        for r in range(4):
            d, t = divmod(r, 2)
            x, w = X[4 * d : 4 * d + 4] + step, np.eye(4, dtype=np.float32)
            if change is not None:
                w = change(step, r, w)
            out = (x * 2.0**-t).astype(np.float32)
            found = call(
                "Cell.a.Linear.forward.0",
                [tensor(x[:, 2 * t : 2 * t + 2], cut), Scalar("float", 0.5)],
                [TensorRecord("bfloat16", out.shape, layout=terms, read=lambda out=out: out)],
                {"weight": tensor(w, whole)},
            )
            ranks.append(RankDump(step, r, "mindspore", "tensor", "L0", {found.key: found}))
    msprobe_write.write(Dump(folder, {(r.step, r.rank): r for r in ranks}), folder)
    return folder


def test_a_tree_of_four_ranks_becomes_one_of_one_rank(tmp_path: Path, capsys) -> None:
    assert run(str(tree(tmp_path / "dump")), str(tmp_path / "out"), "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["tensors"], found["merged"]) == ("pass", 6, 6)
    assert found["copies"] == {"bitwise": 2}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    merged = msprobe.read(tmp_path / "out")
    assert list(merged.ranks) == [(0, 0), (1, 0)]
    for (step, _), ranks in merged.ranks.items():
        made = ranks.calls["Cell.a.Linear.forward.0"]
        assert (made.inputs[0].load() == X + step).all()
        assert made.inputs[0].layout is None
        assert made.inputs[1] == Scalar("float", 0.5)
        assert made.outputs[0].dtype == "bfloat16"
        assert (made.outputs[0].load() == 1.5 * (X + step)).all()
        assert (made.parameters["weight"].load() == np.eye(4)).all()


def test_differing_copies_and_lost_ranks_have_their_exit_codes(tmp_path: Path, capsys) -> None:
    def stale(step, r, w):
        return w * 2 if (step, r) == (1, 2) else w

    dump = tree(tmp_path / "dump", stale)
    assert run(str(dump), str(tmp_path / "a")) == 1
    out = capsys.readouterr().out
    assert "rank 2 differs from rank 0 in 4 elements, first [0, 0]: 2.0, there 1.0" in out
    assert "5 of 6 tensors merged" in out
    assert run(str(dump), str(tmp_path / "b"), "--step", "0") == 0
    assert run(str(dump), str(tmp_path / "c"), "--keep") == 1
    assert "6 of 6 tensors merged" in capsys.readouterr().out
    assert run(str(dump), str(tmp_path / "d"), "--rtol", "1") == 0
    for path in sorted((dump / "step0" / "rank3").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (dump / "step0" / "rank3").rmdir()
    assert run(str(dump), str(tmp_path / "e"), "--step", "0") == 4
    assert "no shard of rank 3, which the layout lists" in capsys.readouterr().out
    with pytest.raises(UsageError, match="exists"):
        run(str(dump), str(tmp_path / "e"))
    with pytest.raises(UsageError, match=r"--step 7: .* has steps"):
        run(str(dump), str(tmp_path / "f"), "--step", "7")


def test_layouts_are_inferred_from_a_run_on_one_device(tmp_path: Path, capsys) -> None:
    """No layout in the dump: rows cut over dp with copies over tp, and a tensor that could lie in two ways."""
    random = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)

    def one(r):
        d, t = divmod(r, 2)
        inputs = [
            tensor(X[4 * d : 4 * d + 4]),
            tensor(random[2 * d : 2 * d + 2, 2 * t : 2 * t + 2]),
        ]
        return RankDump(
            0,
            r,
            "mindspore",
            "tensor",
            "L0",
            {"Cell.a.Linear.forward.0": call("Cell.a.Linear.forward.0", inputs)},
        )

    whole = RankDump(
        0,
        0,
        "mindspore",
        "tensor",
        "L0",
        {"Cell.a.Linear.forward.0": call("Cell.a.Linear.forward.0", [tensor(X), tensor(random)])},
    )
    msprobe_write.write(Dump(tmp_path, {(0, r): one(r) for r in range(4)}), tmp_path / "dump")
    msprobe_write.write(Dump(tmp_path, {(0, 0): whole}), tmp_path / "one")
    said = tmp_path / "said.json"
    said.write_text(json.dumps({"mesh": {"dp": 2, "tp": 2}}))
    args = (
        str(tmp_path / "dump"),
        str(tmp_path / "out"),
        "--said",
        str(said),
        "--reference",
        str(tmp_path / "one"),
        "--json",
        "-",
    )
    assert run(*args) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["how"] == {"inferred": 2}
    (problem,) = found["problems"]
    assert problem["place"] == "input.1"
    assert "2 layouts fit and give different tensors" in problem["problem"]
    made = msprobe.read(tmp_path / "out").ranks[0, 0].calls["Cell.a.Linear.forward.0"]
    assert (made.inputs[0].load() == X).all()
    assert made.inputs[1] is None


def test_types_that_numpy_lacks_are_written_as_they_were_read(tmp_path: Path) -> None:
    x = np.float32([1.5, 2.5])
    for dtype in ("float8_e4m3", "bfloat16", "hifloat8"):
        record = TensorRecord(dtype, (2,), read=lambda: x)
        merged, _ = merge_ranks(
            [rank(0, call("Cell.a.Norm.forward.0", [record]))],
            LayoutDescription(),
            into(tmp_path / dtype),
        )
        found = merged.calls["Cell.a.Norm.forward.0"].inputs[0]
        assert (found.dtype, found.load().tolist()) == (dtype, [1.5, 2.5])


def test_means_of_integers_become_floats(tmp_path: Path) -> None:
    how = layout(("dp", 2), dims=((),), partial={"dp": "mean"})
    ranks = [
        rank(
            r,
            call(
                "Cell.a.Count.forward.0",
                [TensorRecord("int32", (2,), layout=how, read=lambda r=r: np.int32([r, 4]))],
            ),
        )
        for r in range(2)
    ]
    merged, _ = merge_ranks(ranks, LayoutDescription(), into(tmp_path / "x"))
    found = merged.calls["Cell.a.Count.forward.0"].inputs[0]
    assert (found.dtype, found.load().tolist()) == ("float64", [0.5, 4.0])
