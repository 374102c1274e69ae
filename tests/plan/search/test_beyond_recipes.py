"""What recipes cannot say, as the planner searches it: against every layout and placement, and by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from every_placement import everything

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import Device, load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import chunk_times, simulate_step
from telechat_moe.tools.plan.cost.step import evaluate
from telechat_moe.tools.plan.search.emit import layout_string, mindspeed_arguments, settings
from telechat_moe.tools.plan.search.search import GAP, search, usable
from telechat_moe.tools.plan.search.space import Space

LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
CLOSE = 2e-4
"""Gap to which these searches go on."""

NO_V = {"schedule": (0, 1)}


def _small(layers: int = 5) -> tuple[Architecture, Layout]:
    recipe = load(LARGE)
    a = Architecture.from_recipe(recipe)
    return replace(a, layers=a.layers[:layers]), Layout.from_recipe(recipe)


def _device(gib: float, host: float = 32e9) -> Device:
    return replace(usable(load_device("ascend-910b"), gib * 2**30), host_bandwidth=host)


CASES = [
    # devices, GiB, host link, what is fixed
    (2, 100.0, 32e9, {"policy": (3,)}),
    (4, 54.0, 32e9, {"policy": (3,), "pp": (2,), "zero": (0, 1)}),
    (4, 54.0, 8e9, {"policy": (1, 3), "pp": (2,), "ends": (0,), "zero": (0, 1)}),
    (4, 58.0, 32e9, {"ends": (1,), "zero": (0, 1)}),
    (8, 30.0, 32e9, {"ends": (1,), "zero": (0, 1)}),
    (4, 56.0, 32e9, {"zero": (2, 3), "policy": (0,), "pp": (1, 2)}),
    (8, 30.0, 32e9, {"zero": (2, 3), "policy": (0,), "pp": (2,)}),
]


@pytest.mark.parametrize(("devices", "gib", "host", "fixed"), CASES)
def test_every_layout_and_placement_scored(
    devices: int, gib: float, host: float, fixed: dict[str, tuple[int, ...]]
) -> None:
    a, base = _small()
    device = _device(gib, host)
    space = Space(
        devices=devices, global_batch=8, base=base, most_pp=3, most_vpp=2, beyond_recipes=True,
        fixed=fixed,
    )  # fmt: skip
    _agree(a, space, device)


def _agree(a: Architecture, space: Space, device: Device) -> None:
    """Compare the search with every placement, its step simulated."""
    plan = search(a, space, device, top=1, tolerance=CLOSE)
    fits, best = everything(a, space, device)
    assert 0 < fits.sum() < len(fits)
    assert plan.best[0].step_s == pytest.approx(best, rel=CLOSE)
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    assert plan.optimal


@pytest.mark.parametrize("zero", [2, 3])
def test_every_placement_where_reduction_shows(zero: int) -> None:
    a, base = _small()
    fixed = {"zero": (zero,), "policy": (0,), "pp": (2,), "dp": (2,)}
    space = Space(
        devices=8, global_batch=8, base=base, most_vpp=2, beyond_recipes=True, fixed=fixed
    )
    device = replace(_device(34.0), intra_bandwidth=4e9)
    _agree(a, space, device)
    best = search(a, space, device, top=1).best[0]
    table = evaluate(a, [best.layout], device)
    assert table.data_s[0] > 0.05 * best.step_s


def _tight(**changes: object) -> tuple[Architecture, Space, Device]:
    a, base = _small(7)
    given = {"devices": 16, "global_batch": 16, "base": base, "most_vpp": 2, "fixed": NO_V}
    return a, Space(**{**given, "beyond_recipes": True, **changes}), _device(19.0)


def _step(a: Architecture, space: Space, device: Device) -> float:
    plan = search(a, space, device, top=1)
    assert plan.optimal
    return plan.best[0].step_s


def test_more_choices_or_a_faster_host_link_never_hurt() -> None:
    a, space, device = _tight()
    links = [_step(a, space, replace(device, host_bandwidth=b)) for b in (1e9, 16e9, 64e9)]
    assert all(b <= a * (1 + GAP) for a, b in itertools.pairwise(links))
    assert links[-1] < links[0]
    free = links[-1]
    fast = replace(device, host_bandwidth=64e9)
    narrow = _step(a, replace(space, beyond_recipes=False), fast)
    recipes = {"ends": (0,), "policy": (0, 1, 2), "zero": (0, 1)}
    fixed = [*({name: value} for name, value in recipes.items()), recipes]
    steps = [_step(a, replace(space, fixed=NO_V | one), fast) for one in fixed]
    assert all(free <= step * (1 + GAP) <= narrow * (1 + 3 * GAP) for step in steps)
    assert steps[-1] == pytest.approx(narrow, rel=GAP)


def test_swap_by_hand() -> None:
    """A layer's wait is what copies take beyond its passes; none of it stays but two layers' activations."""
    a, base = _small(8)
    plain = base.with_changes(
        dp=1, tp=2, pp=2, vpp=1, ep=2, micro_batches=4, chunks=(4, 4), schedule="1f1b", recompute="none",
        recompute_layers=None, sequence_parallel=False, cp=1, zero=0,
    )  # fmt: skip
    swapped = plain.with_changes(recompute="swap", recompute_layers=(3, 0))
    for host in (1e9, 4e9, 1e12):
        device = _device(64.0, host)
        times, wait = chunk_times(a, swapped, device)
        alone, _ = chunk_times(a, plain, device)
        np.testing.assert_allclose(times.dx - wait, alone.dx, rtol=1e-12)
        assert wait[1] == 0
        # two MoE layers and the dense one of the first chunk
        one = [chunk_times(a, plain.with_changes(chunks=(n, 8 - n)), device)[0] for n in (0, 1, 2)]
        expected = 0.0
        for count, small, large in ((1, one[0], one[1]), (2, one[1], one[2])):
            f, b, kept = (
                x[0] - y[0]
                for x, y in (
                    (large.forward, small.forward),
                    (large.dx + large.dw, small.dx + small.dw),
                    (large.activation, small.activation),
                )
            )
            copy = kept / (host * device.constants.intra_share)
            expected += count * (max(copy - f, 0) + max(copy - b, 0))
        assert wait[0] == pytest.approx(expected, abs=1e-12)
    peaks = [simulate_step(a, x, _device(64.0)) for x in (plain, swapped)]
    dense, moe = (one[i + 1].activation[0] - one[i].activation[0] for i in (0, 1))
    saved = peaks[0].peak_bytes[0] - peaks[1].peak_bytes[0]
    # two micro-batches in flight keep nothing of three layers; the backward pass of one needs two, when what it kept of the
    # fourth layer is gone
    assert saved == pytest.approx(2 * (dense + 2 * moe) - 2 * moe + moe, rel=1e-9)
    assert peaks[0].peak_bytes[1] == pytest.approx(peaks[1].peak_bytes[1])


def test_mtp_before_the_heads() -> None:
    a, base = _small(8)
    last = base.with_changes(
        dp=1, tp=2, pp=4, vpp=1, ep=2, micro_batches=8, chunks=(3, 3, 2, 0), schedule="1f1b",
        recompute="none", recompute_layers=None, cp=1, zero=0,
    )  # fmt: skip
    before = last.with_changes(ends="mtp-before")
    device = _device(64.0)
    one, two = simulate_step(a, last, device), simulate_step(a, before, device)
    moved = one.times.forward - two.times.forward
    np.testing.assert_allclose(moved[:2], 0)
    assert moved[3] > 0 > moved[2]
    layer = (
        chunk_times(a, last.with_changes(chunks=(3, 2, 2, 1)), device)[0].forward[3]
        - one.times.forward[3]
    )
    assert moved[3] == pytest.approx(layer, rel=0.06)  # and a projection; host and device overlap
    assert two.times.forward.sum() > one.times.forward.sum()  # a tensor more is sent
    states = [np.array([s.table.memory.parameters[0]]) for s in (one, two)]
    assert states[0].sum() == pytest.approx(states[1].sum())
    assert layout_string(a, before) == "Ettt|ttt|ttm|L"


def test_sharded_gradients_and_parameters_by_hand() -> None:
    """What ZeRO 2 and 3 keep and what they send, one stage, without anything that hides it."""
    a, base = _small(4)
    device = _device(64.0)
    device = replace(device, constants=replace(device.constants, exposed=1.0))
    x = base.with_changes(
        dp=8, tp=1, pp=1, vpp=1, ep=1, cp=1, micro_batches=4, chunks=None, recompute="none", sequence_parallel=False,
        recompute_layers=None, opt_shards=0,
    )  # fmt: skip
    one, two, three = (
        evaluate(a, [x.with_changes(zero=z, fsdp=z == 3)], device) for z in (1, 2, 3)
    )
    count = a.parameters
    for table, gradients, parameters in ((one, 1, 1), (two, 8, 1), (three, 8, 8)):
        held = table.memory
        assert held.gradients[0, 0] == pytest.approx(count * x.gradient_bytes / gradients, rel=1e-2)
        assert held.parameters[0, 0] == pytest.approx(
            count * x.parameter_bytes / parameters, rel=1e-2
        )
    assert three.memory.buffers[0, 0] > two.memory.buffers[0, 0] == one.memory.buffers[0, 0]
    bus = device.intra_bandwidth * device.constants.intra_share
    scatter, gather = (count * b * 7 / 8 / bus for b in (x.gradient_bytes, 2))
    assert one.data_s[0] == pytest.approx(scatter + gather, rel=2e-2)
    assert two.data_s[0] == pytest.approx(4 * scatter + gather, rel=2e-2)
    assert three.data_s[0] == pytest.approx(4 * (scatter + 2 * gather), rel=2e-2)


def test_what_cannot_be_said_is_refused() -> None:
    a, base = _small(8)
    layout = base.with_changes(
        dp=1, tp=2, pp=2, vpp=1, ep=2, cp=1, micro_batches=4, chunks=(8, 0), schedule="1f1b"
    )
    for changed, word in (
        ({"recompute": "swap", "recompute_layers": (1, 0)}, "swap"),
        ({"ends": "mtp-before", "recompute": "none", "recompute_layers": None}, "MTP"),
        ({"zero": 2}, "gradients"),
        ({"schedule": "zb-v", "vpp": 2, "chunks": (2, 2, 2, 2)}, "zb-v"),
    ):
        x = layout.with_changes(**changed)
        with pytest.raises(BadInputError, match=f"cannot .*{word}"):
            settings(x, 8)
        with pytest.raises(BadInputError, match=f"cannot .*{word}"):
            mindspeed_arguments(a, x)
    with pytest.raises(BadInputError, match=r"cannot .*zb-v"):
        layout_string(a, x)
    with pytest.raises(BadInputError, match="no layers in the last chunk"):
        layout.with_changes(ends="mtp-before", chunks=(7, 1))
    with pytest.raises(BadInputError, match="host_bandwidth is missing"):
        simulate_step(
            a, layout.with_changes(recompute="swap", recompute_layers=None), _device(64.0, 0.0)
        )
