"""Every layout computes what one process computes: losses, gradients, weights, loads, biases.

The graphs are those that MindSpore's front end makes for Ascend, their collectives rewritten for processes on this
machine. What is done wrong on purpose shows that the comparison sees it.
"""

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
# One worker runs them all: cases share what was compiled.
pytestmark = [pytest.mark.mindspore, pytest.mark.xdist_group("layouts")]

import sharded_compare as compare
import sharded_run as run
from sharded_adamw import weight_bounds
from slow_groups import TURNS

BOUND = 1e-5
# After ten steps. Adam divides by the root of the second moment, which magnifies the last bits of small gradients, and so
# of all gradients after its first step. What the first three steps may do to weights is derived in sharded_adamw.py.
WEIGHTS = {"momentum": 1e-6, "adamw": 1e-4}
LATER_GRADIENTS = {"momentum": BOUND, "adamw": 1e-4}
TOP_K = 2

# By number of processes. The gradient's scale shows with momentum alone, the states' layout with both.
FAST = {2: ("tp2-sp-ep2:momentum",)}
FAST_FAULTS = {2: ("tp2-sp-ep2:momentum:slice-of-another-rank",)}
COUNTING_FAULTS = {
    2: (
        "dp2-tokens:momentum:mean-of-means",
        "dp2-tokens:momentum:mtp-by-next-token",
        "cp2-tokens:momentum:tokens-of-one-split",
        "pp2-tokens:momentum:mean-of-means",
        "dp2-many:momentum:loads-in-bf16",
        "tp2-sp-ep2-recompute:momentum:loads-twice",
        "tp2-sp-ep2-recompute:momentum:balance-by-shards",
        "dp2-balance-by-step-recompute:momentum:balance-of-one-device",
        "dp2-balance-by-step-recompute:momentum:balance-counted-again",
    ),
    4: (
        "cp4-tokens:momentum:tokens-of-one-split",
        "cp2-tp2-sp-recompute:momentum:balance-by-shards",
        "cp2-tp2-sp-recompute:momentum:loads-twice",
        "dp4-ep2-balance-by-experts:momentum:balance-of-one-device",
        "cp2-tp2-sp-balance-by-all-recompute:momentum:balance-by-shards",
    ),
}
SLOW_FAULTS = {
    2: (
        "dp2-ep2:momentum:parts-in-another-order",
        "tp2:momentum:cut-softmax",
        "dp2-ep2:momentum:no-sum-of-balance",
        "tp2:momentum:no-sum-of-vocabulary",
        "pp2-parts2:momentum:no-earlier-keys",
        "pp2-parts2:momentum:no-gradients-of-earlier-keys",
    ),
    4: (
        "dp2-tp2-ep2-width:momentum:no-sum-of-widths",
        "pp2-dp2-ep2:momentum:another-pair",
        "dp4-ep4-gather:momentum:nodes-of-other-devices",
        "dp4-ep4-once:momentum:no-token-to-other-nodes",
    ),
}


BY_DEVICES = sorted(run.LAYOUTS, key=lambda name: run.LAYOUTS[name].devices)


def turn_of(name):
    """Return in which turn of CI a case runs: every turn has layouts of each number of processes."""
    return BY_DEVICES.index(name.split(":")[0]) % TURNS


def is_split(layout):
    """Return whether a layout differs from others in how it splits, rather than in the exchange or the balance loss."""
    return not layout.hop and layout.balance in ("seq_aux_loss", "none")


def optimizers(layout):
    """Return the optimizers to try; how tokens reach experts and what is balanced do not touch them."""
    return ("momentum", "adamw") if is_split(layout) else ("momentum",)


def slow_cases(split):
    """Return the slow cases by number of processes."""
    fast = [name for names in FAST.values() for name in names]
    return {
        devices: tuple(
            f"{name}:{optimizer}"
            for name, layout in run.LAYOUTS.items()
            for optimizer in optimizers(layout)
            if layout.devices == devices and is_split(layout) == split
            if f"{name}:{optimizer}" not in fast
        )
        for devices in (2, 4, 8)
    }


SPLITS, EXCHANGES = slow_cases(split=True), slow_cases(split=False)
SLOW = (SPLITS, EXCHANGES, SLOW_FAULTS, COUNTING_FAULTS)
AT_ONCE = 24  # cases times processes: the first test of a group runs all, and must end before pytest ends it


def groups():
    """Return the cases that run together: those of a turn; of a layout, which share its graphs; with one reference."""
    for devices, names in FAST.items():
        yield (*names, *FAST_FAULTS.get(devices, ()))
    for devices in (2, 4, 8):
        for turn in range(TURNS):
            every = [n for kind in SLOW for n in kind.get(devices, ()) if turn_of(n) == turn]
            every.sort(key=_neighbours)
            size = AT_ONCE // devices
            yield from (every[i : i + size] for i in range(0, len(every), size))


def _neighbours(name):
    case = run.Case.of(name)
    return case.reference.removeprefix(f"reference_{case.optimizer}"), case.job


def listed(*kinds):
    return [name for kind in kinds for names in kind.values() for name in names]


def parameters(fast, slow):
    """Return the cases of both suites."""
    return listed(fast) + [
        pytest.param(name, marks=pytest.mark.slow(group=f"layouts-{turn_of(name)}"))
        for name in listed(slow)
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What cases gave; those of a group run together when the first of them is asked for."""
    folder, made = tmp_path_factory.mktemp("layouts"), {}

    def get(name):
        if name not in made:
            group = next(names for names in groups() if name in names)
            made.update(compare.run_cases(folder, group))
        return made[name]

    return get


@pytest.mark.parametrize("name", parameters(FAST, SPLITS))
def test_a_layout_computes_what_one_process_does(name, found):
    _compare(found(name))


@pytest.mark.parametrize("name", parameters({}, EXCHANGES))
def test_an_exchange_or_a_balance_loss_computes_what_one_process_does(name, found):
    _compare(found(name))


def _compare(got):
    layout, reference = got.case.layout, got.reference["steps"]
    count = compare.steps_before_a_tie(got)
    measured = compare.errors(got, count)
    assert measured["loss"] < BOUND, measured
    assert measured["gradient"] < BOUND, measured
    later = LATER_GRADIENTS[got.case.optimizer]
    assert measured["later gradient"] < later, measured
    assert count < run.STEPS or measured["weight"] < WEIGHTS[got.case.optimizer], measured

    if got.case.optimizer == "adamw":
        pairs = zip(compare.states(got), weight_bounds(got, (BOUND, later, later)), strict=True)
        for (ours, expected), (allowed, flips) in pairs:
            for weight, bound in allowed.items():
                off = np.abs(ours[weight].astype(np.float64) - expected[weight])
                worst = np.unravel_index(np.argmax(off - bound), off.shape)
                assert (off <= bound).all(), (weight, worst, off[worst], bound[worst])
            assert np.mean([x.mean() for x in flips.values()]) < 0.05

    assert compare.steps(got.ranks, compare.APPLIED).all()
    norms = compare.steps(got.ranks, compare.NORM)
    expected = [step[compare.NORM] for step in reference]
    np.testing.assert_allclose(norms[0], expected[0], rtol=BOUND)
    np.testing.assert_allclose(norms[:count], expected[:count], rtol=later)

    # Loads count every token of the batch once, so they are reduced over all devices that hold some.
    loads = compare.steps(got.ranks, compare.LOADS)
    tokens = layout.sequences * layout.micro_batches * layout.length
    assert (loads.sum(-1) == tokens * TOP_K).all()
    biases = {n: x for n, x in compare.weights(got).items() if n.endswith("expert_bias")}
    assert len(biases) == loads.shape[1]
    assert (got.reference["dropped"] > 0) == (layout.policy is not None)
    if count == run.STEPS:
        for bias, value in biases.items():
            np.testing.assert_array_equal(value, got.reference["last"][bias], err_msg=bias)
        assert all(rank["dropped"] == got.reference["dropped"] for rank in got.ranks)
    for rank in got.ranks:
        left = ("accu_grads", "key_cache")  # zero between steps
        assert not any(x.any() for n, x in rank["last"].items() if any(w in n for w in left))


@pytest.mark.parametrize("name", parameters(FAST_FAULTS, SLOW_FAULTS))
def test_what_is_wrong_on_purpose_is_seen(name, found):
    measured = compare.errors(found(name))
    assert max(measured["loss"], measured["gradient"]) > 100 * BOUND, measured


@pytest.mark.parametrize("name", parameters({}, COUNTING_FAULTS))
def test_what_is_counted_wrong_is_seen(name, found):
    """Tokens of another batch, experts' loads in low precision or twice, losses of the router once a device."""
    measured = compare.errors(found(name))
    seen = "load" if "loads" in name else "gradient"
    assert measured[seen] > 100 * BOUND, measured


def test_the_cases_split_in_every_way():
    layouts = run.LAYOUTS.values()
    for degree in ("dp", "tp", "cp", "pp", "ep"):
        assert any(getattr(x, degree) > 1 for x in layouts), degree
    for flag in ("zero", "sp", "expert_tp", "documents", "tied", "z_loss"):
        assert any(getattr(x, flag) for x in layouts), flag
    assert any(x.parts > 1 and x.mtp for x in layouts), "labels of MTP in the next part"
    assert any(x.ep > x.dp for x in layouts), "experts over tensor-parallel devices"
    for hop in ("gather", "once"):
        assert any(x.hop == hop and x.ep > x.dp for x in layouts), hop
    assert len(run.LAYOUTS) >= 16
    asked = {name.split(":")[0] for name in listed(FAST, SPLITS, EXCHANGES)}
    assert asked == set(run.LAYOUTS)


def test_every_case_runs_with_one_group():
    grouped = [name for names in groups() for name in names]
    assert sorted(grouped) == sorted(listed(FAST, FAST_FAULTS, *SLOW))


def test_a_turn_has_eight_layouts_at_most():
    turns = [[n for n in run.LAYOUTS if turn_of(n) == turn] for turn in range(TURNS)]
    assert all(7 <= len(names) <= 8 for names in turns)
    for names in turns:
        assert {run.LAYOUTS[n].devices for n in names} == {2, 4, 8}
