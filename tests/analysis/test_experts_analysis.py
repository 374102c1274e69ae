"""Statistics of routers against brute force, and the permutation test: no finding in noise, planted ones found."""

import itertools
import math

import numpy as np
import pytest

from telechat_moe.analysis import statistics
from telechat_moe.analysis.page import experts_page
from telechat_moe.analysis.report import ExpertReport, LoadHistory
from telechat_moe.errors import BadInputError
from telechat_moe.moe import loads
from telechat_moe.moe.loads import LoadRecorder, loads_per_step, scalars

E, K, T = 7, 3, 60


def choices(generator: np.random.Generator, tokens: int = T, top: int = K, p=None) -> np.ndarray:
    return np.stack([generator.choice(E, top, replace=False, p=p) for _ in range(tokens)])


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(3)


def test_loads() -> None:
    load_E = np.array([0.0, 0.9, 1.1, 250, 149, 99, 200])  # mean 100
    assert statistics.overload(load_E) == pytest.approx(2.5)
    assert loads.dead_experts(load_E) == [0, 1]
    assert loads.hot_experts(load_E) == [3]
    assert math.isnan(statistics.overload(np.zeros(4)))
    assert loads.dead_experts(np.ones(4)) == loads.hot_experts(np.ones(4)) == []


def test_entropy() -> None:
    weight = np.array([[1, 1, 1, 1], [5, 0, 0, 0], [3, 1, 0, 0], [0, 0, 0, 0]], np.float32)
    third = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    np.testing.assert_allclose(loads.entropy(weight), [1, 0, third, np.nan], atol=1e-12)


def test_margins(generator: np.random.Generator) -> None:
    score_TE = generator.random((T, E))
    score_TE[:20, :2] = -np.inf  # excluded by a group limit
    index_TK = np.argsort(-score_TE, 1)[:, :K]
    for score_E, index_K, margin in zip(
        score_TE, index_TK, statistics.margins(score_TE, index_TK), strict=True
    ):
        rest = [s for e, s in enumerate(score_E) if e not in index_K]
        assert margin == pytest.approx(min(score_E[index_K]) - max(rest))
    assert np.isnan(statistics.margins(score_TE, np.argsort(-score_TE, 1))).all()
    score_TE[:, : E - K] = -np.inf
    index_TK = np.argsort(-score_TE, 1)[:, :K]
    assert np.isnan(statistics.margins(score_TE, index_TK)).all()


def test_flips(generator: np.random.Generator) -> None:
    one_TK, two_TK = choices(generator), choices(generator)
    two_TK[:30] = generator.permuted(one_TK[:30], axis=1)  # the same set in another order
    sets = [(set(a), set(b)) for a, b in zip(one_TK.tolist(), two_TK.tolist(), strict=True)]
    flipped, replaced = statistics.flips(one_TK, two_TK)
    assert flipped == pytest.approx(np.mean([a != b for a, b in sets]))
    assert replaced == pytest.approx(np.mean([len(a - b) / K for a, b in sets]))
    assert 0 < replaced < flipped <= 0.5


def test_pairs_are_counted(generator: np.random.Generator) -> None:
    one_TK, two_TK = choices(generator), choices(generator)
    together = statistics.coactivation(one_TK, E)
    after = statistics.succession(one_TK, two_TK, E)
    load = [np.mean([e in row for row in one_TK]) for e in range(E)]
    following = [np.mean([e in row for row in two_TK]) for e in range(E)]
    for i, j in itertools.product(range(E), range(E)):
        both = np.mean([i in row and j in row and i != j for row in one_TK])
        assert together.share_EE[i, j] == pytest.approx(both)
        both = np.mean([i in a and j in b for a, b in zip(one_TK, two_TK, strict=True)])
        assert after.share_EE[i, j] == pytest.approx(both)
        assert after.chance_EE[i, j] == pytest.approx(load[i] * following[j])
    ratio = together.chance_EE / np.outer(load, load)
    off = ~np.eye(E, dtype=bool)
    assert ratio[off] == pytest.approx(ratio[0, 1])
    apart = np.abs(after.share_EE - after.chance_EE).sum() / 2 / (K * K)
    assert after.strength == pytest.approx(apart)
    listed = [pair[:2] for pair in together.strongest(E * E, symmetric=True)]
    assert all(i < j for i, j in listed)
    assert together.chance_EE.sum() == pytest.approx(K * (K - 1)) == together.share_EE.sum()
    assert after.chance_EE.sum() == pytest.approx(K * K)


def test_pairs_find_what_was_planted(generator: np.random.Generator) -> None:
    one_TK = choices(generator, 4000, 2)
    noise = statistics.coactivation(one_TK, E)
    assert noise.strength < 0.05
    one_TK[:1000] = [2, 5]
    found = statistics.coactivation(one_TK, E)
    i, j, share, over = found.strongest(1, symmetric=True)[0]
    assert (i, j) == (2, 5)
    assert share == pytest.approx(found.share_EE[2, 5])
    assert over > 2
    assert found.strength > 3 * noise.strength
    next_TK = choices(generator, 4000, 2)
    assert statistics.succession(one_TK, next_TK, E).strength < 0.05
    next_TK[:1000] = [4, 0]
    ahead = statistics.succession(one_TK, next_TK, E).strongest(4, symmetric=False)
    assert {pair[:2] for pair in ahead} == {(2, 4), (2, 0), (5, 4), (5, 0)}


def test_counts_of_sequences(generator: np.random.Generator) -> None:
    index_TK = choices(generator)
    counts_UE = statistics.chosen_counts(index_TK, 4, E)
    for u, part in enumerate(index_TK.reshape(4, -1)):
        assert counts_UE[u].tolist() == [part.tolist().count(e) for e in range(E)]


def test_mutual_information_by_its_definition(generator: np.random.Generator) -> None:
    counts_DLE = generator.integers(0, 9, (3, 2, E))
    for layer, found in enumerate(statistics.mutual_information(counts_DLE)):
        total, bits = counts_DLE[:, layer].sum(), 0.0
        for d, e in itertools.product(range(3), range(E)):
            p = counts_DLE[d, layer, e] / total
            p_d, p_e = counts_DLE[d, layer].sum() / total, counts_DLE[:, layer, e].sum() / total
            bits += p * math.log2(p / (p_d * p_e)) if p else 0.0
        assert found == pytest.approx(bits)
    split = np.array([[[8, 0]], [[0, 8]]])  # the domain says everything: one bit
    assert statistics.mutual_information(split) == pytest.approx([1.0])


def test_arrangements() -> None:
    assert statistics.arrangements(np.array([0, 0, 0, 1, 1, 2])) == pytest.approx(60)
    assert statistics.arrangements(np.repeat([0, 1], 5)) == pytest.approx(math.comb(10, 5))


def sequences(generator: np.random.Generator, U: int, L: int) -> np.ndarray:
    """Return counts of sequences whose 64 tokens choose alike, each in its own way."""
    p_ULE = generator.dirichlet(np.full(E, 2.0), (U, L))
    return np.stack([[generator.multinomial(64, p_E) for p_E in p_LE] for p_LE in p_ULE])


def test_permutations_against_all_arrangements(generator: np.random.Generator) -> None:
    counts_ULE = sequences(generator, 8, 2)
    found = statistics.specialisation(counts_ULE, np.repeat([0, 1], 4), 4000)
    by_all = []
    for chosen in itertools.combinations(range(8), 4):
        first = np.isin(np.arange(8), chosen)
        by_domain = np.stack([counts_ULE[first].sum(0), counts_ULE[~first].sum(0)])
        by_all.append(statistics.mutual_information(by_domain))
    np.testing.assert_allclose(found.by_chance_L, np.mean(by_all, 0), rtol=0.02)
    exact = np.mean(np.array(by_all) >= by_all[0] - 1e-9, 0)
    assert np.abs(found.p_L - exact).max() < 3 * math.sqrt(0.25 / 4000)


def test_noise_is_seldom_significant(generator: np.random.Generator) -> None:
    """In each layer, and for all layers together, in at most 5 % of the runs (plus three deviations of 300)."""
    domain_U = np.repeat([0, 1, 2], 8)
    runs = [
        statistics.specialisation(sequences(generator, 24, 6), domain_U, 99, seed)
        for seed in range(300)
    ]
    limit = 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
    assert (np.array([run.p_L for run in runs]) < statistics.ALPHA).mean(0).max() < limit
    any_layer = np.mean([(run.adjusted_p_L < statistics.ALPHA).any() for run in runs])
    assert 0.005 < any_layer < limit
    at_all = np.mean([(run.p_L < statistics.ALPHA).any() for run in runs])
    assert at_all > 2 * limit  # without the adjustment some of six layers often stands out
    bias = np.mean([run.information_L - run.by_chance_L for run in runs])
    assert abs(bias) < 0.1 * np.mean([run.by_chance_L for run in runs])


def test_planted_specialisation_is_found_in_its_layer(generator: np.random.Generator) -> None:
    domain_U = np.repeat([0, 1, 2], 8)
    counts_ULE = sequences(generator, 24, 6)
    counts_ULE[domain_U == 2, 4, 3] += 100  # domain 2 likes expert 3 of layer 4
    found = statistics.specialisation(counts_ULE, domain_U, 499)
    assert (found.adjusted_p_L < statistics.ALPHA).tolist() == [False] * 4 + [True, False]
    share = counts_ULE[domain_U == 2, 4, 3].sum() / counts_ULE[domain_U == 2, 4].sum()
    overall = counts_ULE[:, 4, 3].sum() / counts_ULE[:, 4].sum()
    assert found.strongest(4) == (2, 3, pytest.approx(share / overall))
    np.testing.assert_allclose(found.terms_LDE.sum((1, 2)), found.information_L)
    assert found.p_L.min() >= 1 / 500


def test_favourite_tokens(generator: np.random.Generator) -> None:
    index_TK, token_T = choices(generator, 600), generator.integers(0, 5, 600)
    index_TK[token_T == 3] = [1, 4, 6]
    found = statistics.favourites(token_T, index_TK, E, count=1)
    takes = [i for i in range(E) if found[i] and found[i][0][0] == 3]
    assert takes == [1, 4, 6]
    _, times, ratio = found[4][0]
    assert times == (token_T == 3).sum()
    assert ratio == pytest.approx(1 / np.mean([4 in row for row in index_TK]))
    assert statistics.favourites(token_T, index_TK, E, minimum=601) == [[]] * E


# ------------------------------------------------------------------------------------------- loads


def test_records_sum_loads() -> None:
    recorder = LoadRecorder(3, 8)
    loads = np.arange(8 * 2 * 4, dtype=np.float32).reshape(8, 2, 4)
    found = [recorder.add(step, load_LE) for step, load_LE in enumerate(loads, 1)]
    assert [r and r["steps"] for r in found] == [None, None, 3, None, None, 3, None, 2]
    for record, part in zip(
        (found[2], found[5], found[7]), (loads[:3], loads[3:6], loads[6:]), strict=True
    ):
        assert record["loads"] == part.sum(0).tolist()


def test_records_forget_what_was_undone() -> None:
    recorder = LoadRecorder(4, 100)
    for step in (1, 2):
        recorder.add(step, np.full((1, 2), 9.0))
    recorder.clear()  # back to step 2
    assert recorder.add(3, np.ones((1, 2))) is None
    record = recorder.add(4, np.ones((1, 2)))
    assert record is not None
    assert (record["steps"], record["loads"]) == (2, [[2, 2]])
    assert LoadRecorder(0, 100).add(100, np.ones((1, 2))) is None


def test_scalars() -> None:
    found = scalars({"loads": [[0, 300, 0, 300], [10, 10, 10, 10]]})
    assert found["experts/dead"] == 2
    assert found["expert_load_entropy/moe_layer_0"] == pytest.approx(0.5)
    assert found["expert_load_entropy/moe_layer_1"] == pytest.approx(1.0)


PER_STEP = {7: 2, 8: 1, 9: 3}
"""Tokens of each step, of which each takes two experts."""


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"steps": 2, "loads": [[3, 5], [3, 4]]}, "add up to 7, tokens x top-k are 8"),
        ({"steps": 1, "loads": [[3, 5], [4, 4]]}, "add up to 8, tokens x top-k are 6"),
        ({"steps": 2, "loads": [[3, 5], [9, -1]]}, "-1.0 is negative"),
        (
            {"steps": 2, "loads": [[3, 5]]},
            r"shape \[1, 2\] over 2 steps, the recipe has 2 MoE layers",
        ),
        ({"steps": 0, "loads": [[3, 5], [4, 4]]}, "over 0 steps"),
        ({"steps": 4, "loads": [[3, 9], [6, 6]]}, "step 6 is not in the file"),
        ({"steps": 2}, "no record of expert loads"),
        ({"steps": 2, "loads": [[3, 5], [4]]}, "no record of expert loads"),
    ],
)
def test_bad_records_are_refused(record, said) -> None:
    with pytest.raises(BadInputError, match=f"^here, step 9: .*{said}"):
        loads_per_step({"step": 9, **record}, PER_STEP, (2, 2), 2, "here")


def test_good_record() -> None:
    record = {"step": 9, "steps": 2, "loads": [[3, 5], [4, 4]]}
    found = loads_per_step(record, PER_STEP, (2, 2), 2, "here")
    assert found.tolist() == [[1.5, 2.5], [2, 2]]


def test_verdicts() -> None:
    def report(last: list[float]) -> ExpertReport:
        load = LoadHistory(
            step_N=[1, 2], load_NLE=np.array([[[0, 9, 9, 9]], [last]], float), recording_share=0
        )
        found = ExpertReport(run="run", layers=["layer 1"], experts=4, top_k=2, load=load)
        found.judge_load()
        return found

    assert report([1, 1, 1, 1]).verdict == "pass"  # dead only at first
    dead = report([9, 0, 9, 9])
    assert (dead.verdict, dead.problems) == (
        "fail",
        ["layer 1: 1 of 4 experts are dead at step 2 (1)"],
    )
    assert dead.to_json()["load"]["last"][0]["dead"] == [1]
    assert ExpertReport(run="run", layers=["a"], experts=4, top_k=2).verdict == "not judged"


def test_page_escapes_names() -> None:
    load = LoadHistory(step_N=[1], load_NLE=np.ones((1, 1, 4)), recording_share=0)
    names = {"run": "<i>r", "layers": ["<i>l"], "text": "<i>t", "not_judged": {"flips": "<i>why"}}
    text = experts_page(ExpertReport(**names, experts=4, top_k=2, load=load))
    assert "<i>" not in text
    assert text.count("&lt;i&gt;") >= 4
