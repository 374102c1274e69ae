"""One order of sums: every layout gives the same bytes, and one flipped bit is named."""

import numpy as np
import ordered_moe
import pytest

from telechat_moe.tools.align.bitwise import (
    first_difference,
    nodes,
    ordered_product,
    ordered_sum,
    total,
)


def recursive(x):
    """The tree by its definition: neighbours, level after level."""
    while len(x) > 1:
        pairs = [x[i] + x[i + 1] if i + 1 < len(x) else x[i] for i in range(0, len(x), 2)]
        x = pairs
    return x[0]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 64, 100, 255])
def test_the_sum_does_not_depend_on_who_holds_what(count):
    rng = np.random.default_rng(count)
    terms = (rng.standard_normal((count, 5)) * 10 ** rng.uniform(-6, 6, (count, 1))).astype(
        np.float32
    )
    expected = np.array(recursive(list(terms)))
    for _ in range(20):
        ranks = int(rng.integers(1, 9))
        owner = (
            rng.integers(0, ranks, count)
            if rng.random() < 0.5
            else np.sort(rng.integers(0, ranks, count))
        )
        pieces = [
            (terms[held], held)
            for r in range(ranks)
            if len(held := rng.permutation(np.flatnonzero(owner == r)))
        ]
        assert ordered_sum(pieces, count).tobytes() == expected.tobytes()
    assert count < 8 or ordered_sum([(terms, np.arange(count))], count).dtype == np.float32


def test_a_rank_sends_few_nodes():
    """A contiguous quarter of 4096 terms is one node, not 1024."""
    part = nodes(np.ones((1024, 3), np.float32), np.arange(1024, 2048), 4096)
    assert [len(index) for index, _ in part] == [0] * 10 + [1] + [0] * 2


def test_products():
    rng = np.random.default_rng(0)
    a, b = (
        rng.standard_normal((7, 24)).astype(np.float32),
        rng.standard_normal((24, 5)).astype(np.float32),
    )
    whole = ordered_product([(a, b, np.arange(24))], 24)
    np.testing.assert_allclose(whole, a.astype(float) @ b, rtol=1e-5, atol=1e-5)
    cut = [np.arange(16, 24), np.arange(10), np.arange(10, 16)]
    assert ordered_product([(a[:, c], b[c], c) for c in cut], 24).tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([([1.0, 2.0], [0, 0])], "twice"),
        ([([1.0, 2.0], [0, 4])], "numbered 0 to 4"),
        ([([1.0], [0, 1])], "1 terms have 2"),
        ([([1.0, 2.0], [0, 1])], "missing"),
        ([([1.0, 2.0], [0, 1]), ([1.0, 2.0], [1, 2])], "missing|twice"),
    ],
)
def test_terms_missing_or_twice_are_refused(pieces, said):
    with pytest.raises(ValueError, match=said):
        total([nodes(np.array(t, np.float32), n, 4) for t, n in pieces], 4)


def test_gradients_are_right():
    """Along its gradient the loss rises by the gradient's squared norm."""
    steps = list(ordered_moe.train(ordered_moe.Layout(), 2))
    weights = ordered_moe.initial()
    ids = np.random.default_rng(1).integers(0, ordered_moe.CLASSES, ordered_moe.TOKENS + 1)

    model = ordered_moe.Model(weights, ordered_moe.Layout())
    model.step(ids[:-1], ids[1:])

    def loss(w):  # a token that takes another expert makes the loss jump
        return float(
            ordered_moe.Model(w, ordered_moe.Layout(), model.chosen).step(ids[:-1], ids[1:])
        )

    for name in ("0.q", "0.k", "1.v", "0.o", "1.norm1", "0.norm2", "table", "head", "1.router"):
        g = steps[0][f"gradient {name}"]
        h = 0.02 / np.linalg.norm(g)
        up, down = ({**weights, name: weights[name] + np.float32(s * h) * g} for s in (1, -1))
        slope = (loss(up) - loss(down)) / (2 * h)
        assert slope == pytest.approx(float((g.astype(float) ** 2).sum()), rel=0.03), name


def check(steps, layouts):
    reference = list(ordered_moe.train(layouts[0], steps))
    assert len(reference[0]) > 80
    for layout in layouts[1:]:
        assert first_difference(reference, ordered_moe.train(layout, steps)) is None, layout
    return reference


def test_layouts_are_equal_to_the_last_bit():
    check(1, ordered_moe.LAYOUTS[:1] + ordered_moe.LAYOUTS[6::6])


def test_the_layouts_are_many():
    assert len(set(ordered_moe.LAYOUTS)) >= 24
    assert max(x.ranks for x in ordered_moe.LAYOUTS) == 16


@pytest.fixture(scope="module")
def hundred_steps():
    return list(ordered_moe.train(ordered_moe.LAYOUTS[0], 100))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ordered_moe.LAYOUTS[1:], ids=ordered_moe.name)
def test_all_layouts_are_equal_to_the_last_bit_for_100_steps(layout, hundred_steps):
    assert np.isfinite(hundred_steps[-1]["loss"])
    assert first_difference(hundred_steps, ordered_moe.train(layout, 100)) is None


def test_one_ulp_is_found():
    """The last bit of one element of one gradient, in the second step of another layout."""

    def flip(step, gradients):
        if step == 1:
            gradients["1.router"].view(np.uint32)[3, 2] ^= 1

    layout = ordered_moe.Layout(dp=2, tp=2, ep=2)
    found = first_difference(
        ordered_moe.train(ordered_moe.Layout(), 2), ordered_moe.train(layout, 2, disturb=flip)
    )
    assert (found.step, found.tensor, found.element, found.count) == (
        1,
        "gradient 1.router",
        (3, 2),
        1,
    )
    assert "step 1, gradient 1.router: 1 elements differ, the first at [3, 2]" in str(found)


def test_an_unordered_sum_is_found():
    """Each rank adds up what it has, and the ranks' sums are added: what frameworks do."""
    rng = np.random.default_rng(0)
    terms = rng.standard_normal((100, 50)).astype(np.float32)
    ordered = ordered_sum([(terms, np.arange(100))], 100)
    naive = sum(terms[i::3].sum(0) for i in range(3))
    found = first_difference([{"g": ordered}], [{"g": naive}])
    assert found is not None
    assert found.tensor == "g"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ([{"a": np.zeros(2)}], "no such tensor"),
        ([], "ended after 0"),
        ([{"b": np.zeros(3)}], "expected"),
        ([{"b": np.zeros(2)}, {}], "reference ended"),
        ([{"b": np.array([0.0, -0.0])}], "1 elements"),
    ],
)
def test_what_is_missing_is_a_difference(target, said):
    assert said in str(first_difference([{"b": np.zeros(2)}], target))
