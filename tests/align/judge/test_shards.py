"""Calls of runs with other layouts: which belong together, what they count by, and what a pass then needs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.tools.align.across_layouts import across
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, Scalar, TensorRecord
from telechat_moe.tools.align.judge.pairing import differ_in_layout
from telechat_moe.tools.align.judge.shards import in_shards, is_own


def record(values):
    return TensorRecord(str(values.dtype), values.shape, read=lambda: values)


def call(name, number, inputs, output, phase=Phase.FORWARD):
    key = f"{name}.{number}.{phase.value}"
    return Call(key, "api", name, number, phase, inputs, {}, [record(output)])


def run(factor=1.5, ranks=1, extra=0, unrelated=0, rows=8):
    """Return 40 products with weights, an index before them that starts at ``extra``, and calls that only this run makes."""
    dumps = {}
    for rank in range(ranks):
        x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
        calls = [call("Tensor.__lt__", i, [record(x)], x < 0) for i in range(extra)]
        index = np.arange(8) - extra
        calls.append(call("Torch.clamp", 0, [record(index), Scalar("int", -9)], index))
        for i in range(40):
            weight = np.random.default_rng(i + 1).standard_normal((8, 8)).astype(np.float32)
            calls.append(call("Functional.linear", i, [record(x), record(weight[:rows])], x @ weight[:rows].T))  # fmt: skip
        scaled = x * np.float32(factor)
        calls.append(call("Torch.mul", 0, [record(x), Scalar("float", factor)], scaled))
        calls += [call("Tensor.abs", i, [record(x)], np.abs(x)) for i in range(unrelated)]
        calls.append(call("Torch.mul", 0, [record(x)], scaled, Phase.BACKWARD))
        dumps[0, rank] = RankDump(0, rank, "pytorch", "tensor", "L1", {c.key: c for c in calls})
    return Dump(Path("run"), dumps)


@pytest.mark.parametrize("extra", [0, 3])
def test_calls_that_one_run_makes_more_do_not_part_the_rest(extra):
    reference, target = run(), run(ranks=2, extra=extra)
    cut = in_shards(reference, target).ranks[0, 1].calls
    calls = target.ranks[0, 1].calls
    assert not is_own(cut["Functional.linear.7.forward"], calls["Functional.linear.7.forward"])
    # An index that starts elsewhere is the target's own; where no calls are more, it is judged.
    index = cut["Torch.clamp.0.forward"].inputs[0].load()
    assert np.array_equal(index, calls["Torch.clamp.0.forward"].inputs[0].load())


def test_an_index_of_equal_programs_is_the_reference_s():
    target = run(ranks=2)
    moved = {
        k: replace(c, inputs=[record(c.inputs[0].load() - 3), *c.inputs[1:]])
        if k.startswith("Torch.clamp")
        else c
        for k, c in target.ranks[0, 1].calls.items()
    }
    target.ranks[0, 1] = replace(target.ranks[0, 1], calls=moved)
    cut = in_shards(run(), target).ranks[0, 1].calls["Torch.clamp.0.forward"]
    assert np.array_equal(cut.inputs[0].load(), np.arange(8))


def test_a_number_must_be_the_reference_s():
    cut = in_shards(run(factor=1.5), run(factor=2.5, ranks=2)).ranks[0, 0].calls
    assert cut["Torch.mul.0.forward"].inputs[1] == Scalar("float", 1.5)


def test_runs_whose_calls_do_not_belong_together_do_not_pass():
    outcome = across(run(), run(ranks=2, unrelated=60))
    assert outcome.verdict == "inconclusive"
    assert "shared tensors" in outcome.reason


@pytest.mark.parametrize(("rows", "ranks", "differ"), [(8, 2, False), (4, 2, True), (4, 1, False)])
def test_other_shards_on_the_same_ranks_are_another_layout(rows, ranks, differ):
    assert differ_in_layout(run(ranks=ranks), run(ranks=ranks, rows=rows)) == differ
