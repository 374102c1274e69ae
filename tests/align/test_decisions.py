"""Flips of discrete choices: legal where scores nearly tie, illegal else; a brute-force search says which."""

import re

import numpy as np
import pytest

from telechat_moe.tools.align.compare.compare import compare
from telechat_moe.tools.align.compare.profiles import Options, profile
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, Scalar, TensorRecord
from telechat_moe.tools.align.judge.decisions import decide

TOKENS, HIDDEN, EXPERTS, TOP = 64, 48, 8, 2
MIXED = profile("mixed", Options(kind="bfloat16"))


def tensor(x, dtype=None):
    x = np.asarray(x)
    return TensorRecord(dtype or x.dtype.name, x.shape, read=lambda: x)


def call(name, inputs, outputs, **kwargs):
    key = f"{name}.0.forward"
    named = {k: Scalar(type(v).__name__, v) for k, v in kwargs.items()}
    return Call(key, "api", name, 0, Phase.FORWARD, inputs, named, outputs)


def as_bfloat16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


class Router:
    """linear, sigmoid, top-k of a run; anything may be changed before it is dumped."""

    def __init__(self, x, w, bias=None):
        self.x, self.w = as_bfloat16(x), w.astype(np.float32)
        self.logits = (self.x @ self.w.T).astype(np.float32)
        self.scores = (1 / (1 + np.exp(-self.logits))).astype(np.float32)
        self.ranked = self.scores if bias is None else self.scores + bias.astype(np.float32)
        self.bias = bias
        self.choose()

    def choose(self):
        order = np.argsort(-self.ranked, 1, kind="stable")[:, :TOP]
        self.index, self.values = order, np.take_along_axis(self.ranked, order, 1)

    def dump(self, further=()):
        calls = [
            call("Functional.linear", [tensor(self.x), tensor(self.w)], [tensor(self.logits)]),
            call("Torch.sigmoid", [tensor(self.logits)], [tensor(self.scores)]),
        ]
        if self.bias is not None:
            inputs = [tensor(self.scores), tensor(self.bias.astype(np.float32))]
            calls.append(call("Torch.add", inputs, [tensor(self.ranked)]))
        outputs = [tensor(self.values), tensor(self.index.astype(np.int64))]
        calls.append(call("Torch.topk", [tensor(self.ranked), Scalar("int", TOP)], outputs, dim=-1))
        calls += further
        return RankDump(0, 0, "pytorch", "tensor", "L1", {c.key: c for c in calls})


def routers(seed, noise, bias=False):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((TOKENS, HIDDEN)), rng.standard_normal((EXPERTS, HIDDEN)) * 0.05
    b = rng.standard_normal(EXPERTS) * 0.02 if bias else None
    golden = Router(x, w, b)
    return golden, Router(golden.x * (1 + noise * rng.standard_normal(x.shape)), w, b)


def flips_of(golden, target, p=MIXED, follows=False):
    a, b = golden.dump(), target.dump()
    found = decide(a, b, "Torch.topk.0.forward", (golden.index, target.index), p, follows)
    assert found is not None
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_near_ties_that_rounding_flips_are_legal(bias):
    seen = 0
    for seed in range(90):
        golden, target = routers(seed, 2.0**-9, bias)
        found = flips_of(golden, target)
        expected = {
            row: (
                set(golden.index[row]) - set(target.index[row]),
                set(target.index[row]) - set(golden.index[row]),
            )
            for row in range(TOKENS)
            if (golden.index[row] != target.index[row]).any()
        }
        assert {f.row for f in found.flips} == found.tokens == set(expected)
        for f in found.flips:
            gone, came = expected[f.row]
            if gone:
                assert (set(f.gone), set(f.came)) == (gone, came)
                worst = max(
                    abs(golden.ranked[f.row, e] - golden.ranked[f.row, g])
                    for e in gone
                    for g in came
                )
                assert f.margin == pytest.approx(worst, rel=1e-6)
            assert f.legal, f
            assert f.why == "bound propagated from the router's input"
            # the bound is what the inputs make of the scores: close to what the scores really moved
            moved = np.abs(target.ranked[f.row] - golden.ranked[f.row])
            assert f.margin <= f.bound <= 2.1 * moved.max() + 1e-5
        seen += len(found.flips)
    assert seen > 20


def test_a_choice_that_its_own_scores_do_not_give_is_illegal():
    golden, target = routers(0, 0.0)
    target.index = target.index.copy()
    rest = [e for e in range(EXPERTS) if e not in target.index[5]]
    target.index[5, 1] = rest[0]
    (flip,) = flips_of(golden, target).flips
    assert (flip.row, flip.legal) == (5, False)
    assert "own scores" in flip.why


def test_scores_that_the_router_did_not_compute_make_a_flip_illegal():
    """The margin is covered by how far the scores are apart, but the input does not explain that they are."""
    golden, target = routers(0, 0.0)
    row, (first, second) = 7, np.argsort(-golden.ranked[7])[1:3]
    target.scores = target.ranked = target.scores.copy()
    gap = target.scores[row, first] - target.scores[row, second]
    target.scores[row, second] += 1.5 * gap
    target.choose()
    (flip,) = flips_of(golden, target).flips
    assert (flip.row, flip.legal) == (7, False)
    assert flip.why == "the target's scores are not what its router's input gives"


def test_a_wrong_input_makes_a_flip_illegal_unless_it_follows_from_earlier_flips():
    golden, target = routers(0, 0.0)
    x = golden.x.copy()
    x[9] = golden.x[10]
    target = Router(x, golden.w)
    found = flips_of(golden, target)
    assert [f.row for f in found.flips] == [9]
    assert found.legal is False
    assert "times what mixed allows" in found.flips[0].why
    assert flips_of(golden, target, follows=True).legal is True


def test_without_the_router_the_profile_bounds_the_scores():
    golden, target = routers(3, 0.0)
    target.ranked = target.ranked.copy()
    order = np.argsort(-golden.ranked, 1)
    gaps = (
        golden.ranked[np.arange(TOKENS), order[:, 1]]
        - golden.ranked[np.arange(TOKENS), order[:, 2]]
    )
    near, far = int(np.argmin(gaps)), int(np.argmax(gaps))
    for row in (near, far):
        e, f = order[row, 1], order[row, 2]
        target.ranked[row, [e, f]] = golden.ranked[row, [f, e]]
    target.choose()
    p = profile("close", Options(rtol=1e-2, atol=0.0))
    dumps = []
    for run in (golden, target):
        full = run.dump()
        dumps.append(
            RankDump(
                0,
                0,
                "pytorch",
                "tensor",
                "L1",
                {"Torch.topk.0.forward": full.calls["Torch.topk.0.forward"]},
            )
        )
    found = decide(*dumps, "Torch.topk.0.forward", (golden.index, target.index), p)
    by_row = {f.row: f for f in found.flips}
    assert set(by_row) == {near, far}
    assert (by_row[near].legal, by_row[far].legal) == (True, False)
    scores = golden.ranked[far, order[far, 1:3]]
    assert by_row[far].bound == pytest.approx(1e-2 * scores.sum(), rel=1e-5)
    assert by_row[far].margin == pytest.approx(gaps[far], rel=1e-5)


@pytest.mark.parametrize("kind", ["argmax", "argmin", "sort", "expert takes tokens", "fused"])
def test_other_choices(kind):
    rng = np.random.default_rng(1)
    golden = rng.standard_normal((16, 6)).astype(np.float32)
    golden[3, :2] = golden[3].max() + np.float32([1.0, 0.9999])
    golden[4, :2] = golden[4].min() - np.float32([0.9999, 1.0])
    target = golden.copy()
    target[3, [0, 1]] = golden[3, [1, 0]]
    target[4, [0, 1]] = golden[4, [1, 0]]
    pick = {
        "argmax": lambda x: x.argmax(1),
        "argmin": lambda x: x.argmin(1),
        "sort": lambda x: np.argsort(x, 1, kind="stable"),
        "expert takes tokens": lambda x: np.argsort(-x, 0, kind="stable")[:4],
        "fused": lambda x: np.argsort(-x, 1, kind="stable")[:, :2],
    }[kind]
    name = {"fused": "Primitive.router.MoeGatingTopK"}.get(kind, "Torch.choose")
    dumps = [
        RankDump(
            0,
            0,
            "",
            "tensor",
            "L1",
            {f"{name}.0.forward": call(name, [tensor(x)], [tensor(pick(x))])},
        )
        for x in (golden, target)
    ]
    if kind == "expert takes tokens":
        golden[7:9, 2] = golden[:, 2].max() + np.float32([1.0, 0.9999])
        target[7:9, 2] = golden[[8, 7], 2]
    chosen = (pick(golden), pick(target))
    assert (chosen[0] != chosen[1]).any()
    loose, tight = (profile("close", Options(rtol=r, atol=0.0)) for r in (1e-3, 1e-6))
    found = decide(*dumps, f"{name}.0.forward", chosen, loose)
    assert found.legal is True
    assert found.flips
    assert decide(*dumps, f"{name}.0.forward", chosen, tight).legal is False


def test_indices_that_no_scores_explain_are_no_choice():
    golden, target = routers(0, 0.0)
    shuffled = golden.index[::-1].copy()
    a, b = golden.dump(), target.dump()
    assert decide(a, b, "Torch.topk.0.forward", (shuffled, golden.index), MIXED) is None
    ids = call("Torch.index_select", [tensor(np.arange(9))], [tensor(np.arange(9))])
    one = RankDump(0, 0, "", "tensor", "L1", {ids.key: ids})
    assert decide(one, one, ids.key, (np.arange(9), np.arange(9)[::-1]), MIXED) is None


# ----------------------------------------------------------------------------- how the comparison goes on


def after(golden, target, change=None):
    """Return dumps with an expert's rows, a token-wise product and a sum over tokens behind the router."""
    dumps = []
    for run in (golden, target):
        weights = 1.0 + run.index.astype(np.float32).sum(
            1, keepdims=True
        )  # what experts made of a token
        y = (run.x * weights).astype(np.float32)
        z = (y + y).astype(np.float32)
        if change is not None and run is target:
            z = change(z)
        attention = (z.mean(0, keepdims=True) + z).astype(np.float32)
        made = (attention + attention).astype(np.float32)
        further = [
            call("Torch.mul", [tensor(run.x), tensor(weights)], [tensor(y)]),
            call("Torch.add", [tensor(y), tensor(y)], [tensor(z)]),
            call("Functional.my_attention", [tensor(z)], [tensor(attention)]),
            call("Tensor.add", [tensor(attention), tensor(attention)], [tensor(made)]),
        ]
        dumps.append(Dump(None, {(0, 0): run.dump(further)}))
    return dumps


def flipped(seed=0):
    """Return two runs in which exactly one token goes elsewhere, legally, and that token."""
    for seed in range(200):
        golden, target = routers(seed, 2.0**-9)
        rows = np.flatnonzero((np.sort(golden.index, 1) != np.sort(target.index, 1)).any(1))
        if len(rows) == 1 and (golden.index != target.index).any(1).sum() == 1:
            return golden, target, int(rows[0])
    raise AssertionError


def test_comparison_goes_on_with_the_routing_pinned():
    golden, target, row = flipped()
    out = compare(*after(golden, target), MIXED)
    assert out.verdict == "inconclusive", out.sorted()[:5]  # one of few calls is not judged
    (said,) = out.flips["legal"]
    assert re.fullmatch(
        rf"legal flip: token {row} of \S+: [\d,]+->[\d,]+, margin [\d.e-]+, bound [\d.e-]+", said
    )
    rows = {(r.key, r.place): r for r in out.rows}
    topk = rows["Torch.topk.0.forward", "output.1"]
    assert (topk.status, topk.basis) == ("pass", "decision")
    mul = rows["Torch.mul.0.forward", "output.0"]
    assert (mul.status, mul.basis, mul.elements) == ("pass", "tokens", (TOKENS - 1) * HIDDEN)
    assert mul.note == f"{TOKENS - 1} of {TOKENS} tokens"
    last = rows["Tensor.add.0.forward", "output.0"]
    assert (last.status, last.basis, last.note) == ("pass", "replay", "replayed in isolation")
    # nobody knows this function: not judged, and counted
    assert rows["Functional.my_attention.0.forward", "output.0"].status == "not judged"
    assert out.unknown["follows from tokens that were routed differently"] >= 1


def test_faults_behind_a_legal_flip_are_found():
    golden, target, row = flipped()
    other = (row + 1) % TOKENS

    def wrong_token(z):
        z = z.copy()
        z[other] *= 1.1
        return z

    out = compare(*after(golden, target, wrong_token), MIXED)
    assert out.verdict == "diverged"
    wrong = {(r.key, r.place): r for r in out.rows if r.status == "diverged"}
    assert ("Torch.add.0.forward", "output.0") in wrong
    assert wrong["Torch.add.0.forward", "output.0"].element[0] == other


def test_gradients_have_no_rows_to_leave_out():
    """A weight with as many rows as there are tokens: the row of the flipped token's number counts like any other."""
    golden, target, row = flipped()
    x = np.ones((TOKENS, 4), np.float32)
    y = x.copy()
    y[row] = 9
    dumps = []
    for run, values in ((golden, x), (target, y)):
        key = "Functional.unknown.0.backward"
        back = Call(key, "api", "Functional.unknown", 0, Phase.BACKWARD, [], {}, [tensor(values)])
        dumps.append(Dump(None, {(0, 0): run.dump([back])}))
    out = compare(*dumps, MIXED)
    assert out.flips["legal"]
    assert out.rows[-1].key == "Functional.unknown.0.backward"
    assert out.rows[-1].status == "not judged"


def test_without_flips_nothing_is_excused():
    golden, target = routers(0, 0.0)
    out = compare(*after(golden, target, lambda z: z * np.float32(1.1)), MIXED)
    assert out.verdict == "diverged"
    assert not any(out.flips.values())
    assert {r.basis for r in out.rows} == {"values"}


def test_an_illegal_flip_diverges_and_excuses_nothing():
    golden, target, _ = flipped()
    target.index = np.roll(target.index, 1, 0)
    out = compare(*after(golden, target), MIXED)
    assert out.verdict == "diverged"
    row = next(r for r in out.rows if r.basis == "decision")
    assert row.status == "diverged"
    assert "illegal flip" in row.reason
    assert not [r for r in out.rows if r.basis in ("tokens", "replay")]


# ----------------------------------------------------------------------------- a real model in torch


@pytest.mark.torch
def test_right_runs_in_bfloat16_flip_legally_and_wrong_ones_do_not():
    torch = pytest.importorskip("torch")
    from planted import result, run

    # rtol and atol wide enough for what bfloat16 makes of the whole model
    p = profile("close", Options(rtol=0.05, atol=0.2))
    legal = 0
    for seed in (1, 2, 3):
        golden, target = run(seed=seed), run(seed=seed, dtype=torch.bfloat16)
        out = compare(golden, target, p)
        assert out.counts["diverged"] == 0, [
            (r.key, r.place, r.reason, r.worst) for r in out.sorted()[:3]
        ]
        assert out.verdict == ("pass" if out.coverage.enough else "inconclusive")
        assert not out.flips["illegal"]
        legal += len(out.flips["legal"])
    assert legal >= 3

    def second_best(found):
        values, index = found
        index = index.clone()
        index[4, 1] = (index[4].max() + 1) % 8 if (index[4].max() + 1) % 8 not in index[4] else 7
        return values, index

    out = compare(run(seed=3), run(("topk", 0, result(second_best)), seed=3), p)
    assert out.verdict == "diverged"
    assert any(r.basis == "decision" and r.status == "diverged" for r in out.rows)
    assert "own scores" in next(r.reason for r in out.rows if r.basis == "decision")


def test_scores_behind_views_and_masks_are_followed_to_the_router():
    """As transformers' DeepseekV3 has them: a view into groups, a mask over some experts."""
    seen = 0
    for seed in range(60):
        golden, target = routers(seed, 2.0**-9)
        dumps, chosen = [], []
        for run in (golden, target):
            mask = np.zeros((TOKENS, EXPERTS), np.bool_)
            mask[:, 5:] = True
            masked = np.where(mask, np.float32(-np.inf), run.scores)
            groups = masked.reshape(TOKENS, 1, EXPERTS)
            order = np.argsort(-groups, 2, kind="stable")[..., :TOP]
            more = [
                call(
                    "Tensor.masked_fill",
                    [tensor(run.scores), tensor(mask), Scalar("float", -np.inf)],
                    [tensor(masked)],
                ),
                call(
                    "Tensor.view",
                    [tensor(masked), Scalar("int", -1), Scalar("int", 1), Scalar("int", EXPERTS)],
                    [tensor(groups)],
                ),
                call("Torch.topk", [tensor(groups), Scalar("int", TOP)], [tensor(order)]),
            ]
            calls = [c for c in run.dump().calls.values() if "topk" not in c.key] + more
            dumps.append(RankDump(0, 0, "", "tensor", "L1", {c.key: c for c in calls}))
            chosen.append(order)
        if (chosen[0] == chosen[1]).all():
            continue
        found = decide(*dumps, "Torch.topk.0.forward", tuple(chosen), MIXED)
        assert found.legal is True
        assert {f.why for f in found.flips} == {"bound propagated from the router's input"}
        assert all(e < 5 for f in found.flips for e in (*f.gone, *f.came))
        seen += len(found.flips)
    assert seen > 5
