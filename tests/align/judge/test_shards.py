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


def experts(chosen, batches, ranks=1, loss=1.0, term=None):
    """Return a run whose ranks share four experts; of each micro-batch of a rank every expert takes the tokens of all ranks.

    Args:
        chosen: By rank its experts.
        batches: By rank its micro-batches.
        loss: What a micro-batch counts by.
        term: Times the flipped input, an additional gradient.
    """
    dumps = {}
    for rank in range(ranks):
        calls, w = [], np.random.default_rng(9).standard_normal((8, 8)).astype(np.float32)
        for i, n in enumerate(batches[rank]):
            x = np.random.default_rng(n).standard_normal((6, 8)).astype(np.float32)
            calls += [call("Tensor.abs", 20 * i + j, [record(x)], np.abs(x)) for j in range(20)]
            calls.append(call("Functional.linear", 9 * i, [record(x), record(w)], x @ w.T))
            tokens = np.concatenate([  # those of all ranks, the last first
                np.random.default_rng(run[i]).standard_normal((6, 8)) for run in batches[::-1]
            ]).astype(np.float32)  # fmt: skip
            for j, e in enumerate(chosen[rank]):
                weight = np.random.default_rng(100 + e).standard_normal((16, 8)).astype(np.float32)
                chosen_rows = tokens[tokens[:, e] > 0]
                out = chosen_rows @ weight.T
                calls.append(call("Functional.linear", 9 * i + j + 1, [record(chosen_rows), record(weight)], out))  # fmt: skip
                calls.append(call("Tensor.sigmoid", 9 * i + j, [record(out)], 1 / (1 + np.exp(-out))))  # fmt: skip
            gradient = np.float32(loss) * x
            if term:
                addend = term * np.flip(x)
                calls.append(call("Tensor.add", i, [record(gradient), record(addend)], gradient + addend))  # fmt: skip
                gradient = gradient + addend
            backward = call("Functional.linear", 9 * i, [record(gradient)], gradient @ w, Phase.BACKWARD)  # fmt: skip
            calls.append(replace(backward, outputs=[*backward.outputs, record(gradient.T @ x)]))
        dumps[0, rank] = RankDump(0, rank, "pytorch", "tensor", "L1", {c.key: c for c in calls})
    return Dump(Path("run"), dumps)


ALL = [0, 1, 2, 3]


@pytest.mark.parametrize("batches", [[[1], [1]], [[1], [2]]])
def test_calls_of_experts_are_paired_with_those_of_the_same_weight(batches):
    reference = experts([ALL], [sorted({n for run in batches for n in run})])
    target = experts([ALL[:2], ALL[2:]], batches, ranks=2)
    calls = target.ranks[0, 1].calls
    cut = in_shards(reference, target).ranks[0, 1].calls
    for key in ("Functional.linear.1.forward", "Functional.linear.2.forward", "Tensor.sigmoid.1.forward"):  # fmt: skip
        assert not is_own(cut[key], calls[key])
        assert all(
            np.allclose(a.load(), b.load(), 1e-5) for (_, a), (_, b) in zip(cut[key].tensors(), calls[key].tensors(), strict=True)
        )  # fmt: skip
    wrong = calls["Functional.linear.2.forward"].outputs[0].load()
    wrong[2] += 1.0  # a token's result is not what the reference makes of any token
    row = in_shards(reference, target).ranks[0, 1].calls["Functional.linear.2.forward"].outputs[0].load()[2]  # fmt: skip
    assert not np.allclose(row, wrong[2])


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ({}, "pass"),
        ({"loss": 0.5}, "pass"),  # of two micro-batches each counts half
        ({"loss": 0.5, "term": np.float32(0.3)}, "diverged"),
    ],
)
def test_a_gradient_with_another_term_is_not_the_reference_s(runs, verdict):
    reference = experts([ALL[:2], ALL[2:]], [[1], [2]], ranks=2)
    target = experts([ALL], [[1, 2]], **runs)
    outcome = across(reference, target)
    assert outcome.verdict == verdict, outcome
    assert [f.verdict.key for f in outcome.findings][:1] == ["Functional.linear.0.backward"] * (
        verdict == "diverged"
    )


def tokens(ids, start=0):
    """A run on two ranks that embeds tokens, of which one rank may have the words from ``start`` on."""
    table = np.random.default_rng(1).standard_normal((16, 8)).astype(np.float32)
    index = np.where(ids >= start, ids - start, 0)
    rows = table[start:][index]
    calls = [call("Functional.embedding", 0, [record(index), record(table[start:])], rows)]
    calls += [call("Tensor.abs", i, [record(rows)], np.abs(rows)) for i in range(40)]
    calls += [call("Tensor.ge", 0, [record(ids), Scalar("int", start)], ids >= start)] * (start > 0)
    calls.append(call("Tensor.abs", 0, [record(rows)], rows, Phase.BACKWARD))
    ranks = {
        r: RankDump(0, r, "pytorch", "tensor", "L1", {c.key: c for c in calls}) for r in (0, 1)
    }
    return Dump(Path("run"), {(0, r): dump for r, dump in ranks.items()})


def test_tokens_are_the_reference_s_but_for_where_a_shard_begins():
    ids = np.arange(12) + 1
    wrong = np.where(ids == 9, 12, ids)
    for data, start, expected in ((ids, 4, ids - 4), (wrong, 4, None)):
        cut = in_shards(tokens(ids), tokens(data, start)).ranks[0, 0].calls
        indices = cut["Functional.embedding.0.forward"].inputs[0].load()
        if expected is not None:
            assert np.array_equal(indices, np.maximum(expected, 0))
        else:
            assert np.array_equal(indices, ids)
