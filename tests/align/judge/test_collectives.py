"""Collectives of several ranks, computed here by plain loops, against the replay; wrong groups are named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.numerics import round_to
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, Scalar, TensorRecord
from telechat_moe.tools.align.judge.pairing import differ_in_layout

RANKS = 4
GROUPS = ([0, 1], [2, 3])


def tensor(values, dtype):
    return TensorRecord(dtype, values.shape, read=lambda: values)


def given(dtype, seed=0):
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal((8, 3)) for _ in range(RANKS)]
    return [round_to(p, dtype).astype(np.float32) for p in parts]


def ring(parts, dtype):
    """Add up as a ring does, rounding each partial sum to the type."""
    total = parts[0].astype(np.float64)
    for part in parts[1:]:
        total = round_to(total + part, dtype)
    return total.astype(np.float32)


def exchange(kind, parts, dtype):
    n = len(parts)
    rows = len(parts[0]) // n
    if kind == "all_reduce":
        return [ring(parts, dtype)] * n
    if kind == "all_gather_into_tensor":
        return [np.concatenate(parts)] * n
    if kind == "reduce_scatter_tensor":
        return [ring(parts, dtype)[i * rows : (i + 1) * rows] for i in range(n)]
    if kind == "all_to_all_single":
        return [np.concatenate([p[i * rows : (i + 1) * rows] for p in parts]) for i in range(n)]
    return [parts[0]] * n


def run(kind, groups=GROUPS, dtype="float32", change=None, said=GROUPS):
    """Return the dump of a collective over ``groups``; it says that it was over ``said``."""
    parts, ranks = given(dtype), {}
    for group in groups:
        results = exchange(kind, [parts[r] for r in group], dtype)
        for rank, values in zip(group, results, strict=True):
            named = next(g for g in said if rank in g)
            out = change(rank, values, parts) if change else values
            key = f"Distributed.{kind}.0.forward"
            first = (
                [tensor(np.zeros_like(out), dtype)]
                if kind not in ("all_reduce", "broadcast")
                else []
            )
            more = [Scalar("int", named[0])] if kind == "broadcast" else []
            call = Call(
                key, "api", f"Distributed.{kind}", 0, Phase.FORWARD,
                [*first, tensor(parts[rank], dtype), *more],
                {"group": Scalar("ProcessGroup", {"group_ranks": named})},
                [tensor(out, dtype)],
            )  # fmt: skip
            ranks[0, rank] = RankDump(0, rank, "pytorch", "tensor", "L1", {key: call})
    return Dump(Path("run"), ranks)


KINDS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_right_collectives_pass(kind, dtype):
    outcome = bisect(run(kind, dtype=dtype), run(kind, dtype=dtype))
    assert (outcome.verdict, dict(outcome.judged)) == ("pass", {"pass": RANKS})


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_groups_are_found(kind):
    """The program puts other ranks together, and its own dump says so, too."""
    wrong = run(kind, ([0, 2], [1, 3]), said=([0, 2], [1, 3]))
    outcome = bisect(run(kind), wrong)
    assert outcome.verdict == "diverged"
    assert outcome.findings[0].verdict.key == f"Distributed.{kind}.0.forward"
    if kind == "all_reduce":
        assert outcome.ranks == [0, 1, 2, 3]
        assert outcome.findings[0].family == "wrong group"
        assert "ranks [0, 2], not [0, 1]" in outcome.findings[0].evidence


@pytest.mark.parametrize(
    ("change", "family"),
    [
        (lambda rank, y, parts: parts[rank] if rank == 2 else y, "missing reduction"),
        (lambda rank, y, parts: 2 * y if rank == 2 else y, "doubled reduction"),
        (lambda rank, y, parts: y / 2 if rank == 2 else y, "scale"),
        (lambda rank, y, parts: y + 1 if rank == 2 else y, "offset"),
    ],
)
def test_wrong_reductions_are_named(change, family):
    outcome = bisect(run("all_reduce"), run("all_reduce", change=change))
    assert (outcome.ranks, outcome.findings[0].family) == ([2], family)


def by_name(dump):
    """Return a dump whose collectives have the names of their groups only, as those of MindSpore."""

    def call(c):
        ranks = c.kwargs["group"].value["group_ranks"]
        return replace(c, kwargs={"group": Scalar("str", f"group-{ranks[0]}-{ranks[1]}")})

    ranks = dump.ranks.items()
    return Dump(
        dump.root,
        {k: replace(r, calls={key: call(c) for key, c in r.calls.items()}) for k, r in ranks},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_known_by_their_names(kind):
    right, wrong = by_name(run(kind)), by_name(run(kind, ([0, 2], [1, 3]), said=([0, 2], [1, 3])))
    outcome = bisect(right, right)
    assert (outcome.verdict, dict(outcome.judged)) == ("pass", {"pass": RANKS})
    assert bisect(wrong, wrong).verdict == "pass"
    assert bisect(right, wrong).verdict == "diverged"
    assert bisect(right, by_name(run(kind, change=lambda r, y, _: y + (r == 2)))).ranks == [2]


def as_msprobe(dump):
    """Return a dump as msprobe writes it of torch: null where the result is written, arguments behind the result."""

    def call(c):
        *first, sent = c.inputs
        return replace(c, inputs=[*(None for _ in first), sent], outputs=[*c.outputs, sent])

    ranks = {
        place: replace(r, calls={key: call(c) for key, c in r.calls.items()})
        for place, r in dump.ranks.items()
    }
    return Dump(dump.root, ranks)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_what_msprobe_writes_of_torch_is_judged(kind):
    outcome = bisect(as_msprobe(run(kind)), as_msprobe(run(kind)))
    assert (outcome.verdict, dict(outcome.judged)) == ("pass", {"pass": RANKS})
    wrong = as_msprobe(run(kind, change=lambda r, y, _: y + (r == 2)))
    assert bisect(as_msprobe(run(kind)), wrong).ranks == [2]


@pytest.mark.parametrize("calls", [1, 2])
def test_runs_with_other_ranks_and_numbers_of_collectives_are_split_differently(calls):
    target = run("all_reduce")
    (key, call), *_ = target.ranks[0, 0].calls.items()
    later = key.replace(".0.", ".1.")
    one = replace(
        target.ranks[0, 0],
        calls={key: call} if calls == 1 else {key: call, later: replace(call, key=later)},
    )
    assert differ_in_layout(Dump(target.root, {(0, 0): one}), target) == (calls == 2)


def test_a_rank_that_is_missing_is_said():
    target = run("all_reduce")
    less = Dump(target.root, {k: v for k, v in target.ranks.items() if k[1] != 1})
    outcome = bisect(run("all_reduce"), less)
    assert (dict(outcome.judged), outcome.coverage.by_other_run) == ({"pass": 3}, 1)
    assert dict(outcome.unknown) == {"step 0, rank 1 is only in the reference": 1}
