"""Keep, recompute or swap each layer: the choice against all choices, the copies against a formula."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import RecipeError, load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import Device, load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.saved_activations import BACKWARD_OPERATORS, FREED, MOVED
from telechat_moe.tools.plan.cost.simulate_step import (
    SimulatedStep,
    chunk_times,
    simulate_step,
    swap_of,
)
from telechat_moe.tools.plan.report.memory import answer
from telechat_moe.tools.plan.search import layer_memory
from telechat_moe.tools.plan.search.layer_memory import choose

NAME = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
DEVICE = load_device("ascend-910b")
MODEL = "model.model_config."
STAGES = {
    f"{MODEL}num_hidden_layers": 5,
    f"{MODEL}first_k_dense_replace": 2,
    "parallel_config.pipeline_stage": 2,
    f"{MODEL}offset": "[1,0]",
}
DEEP = {  # the first stage, with four micro-batches in flight, is the fullest
    f"{MODEL}num_hidden_layers": 5,
    f"{MODEL}num_nextn_predict_layers": 0,
    f"{MODEL}vocab_size": 16384,
    f"{MODEL}offset": "[1,0,0,0]",
    "parallel_config.pipeline_stage": 4,
    "parallel_config.expert_parallel": 32,
}
CHUNKS = {
    f"{MODEL}num_hidden_layers": 4,
    "parallel_config.pipeline_stage": 2,
    f"{MODEL}pp_interleave_num": 2,
    f"{MODEL}offset": 0,
    "parallel.pipeline_config.pipeline_interleave": True,
}


def base(changes: dict[str, object], device: Device = DEVICE) -> SimulatedStep:
    recipe = load(NAME, [f"{key}={value}" for key, value in changes.items()], use="plan")
    return simulate_step(Architecture.from_recipe(recipe), Layout.from_recipe(recipe), device)


def every(step: SimulatedStep) -> dict[tuple[tuple[int, ...], tuple[int, ...]], SimulatedStep]:
    """Return the step of every choice for every layer, without the planner's search."""
    steps: dict[tuple[tuple[int, ...], tuple[int, ...]], SimulatedStep] = {}
    layers = range(len(step.architecture.layers))
    for ways in itertools.product("krs", repeat=len(layers)):
        recomputed, away = (tuple(i for i in layers if ways[i] == word) for word in "rs")
        layout = step.layout.with_changes(
            recompute="full", recompute_layers=None, recomputed=recomputed, swapped=away
        )
        steps[recomputed, away] = simulate_step(step.architecture, layout, step.device)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("changes", [STAGES, DEEP, CHUNKS], ids=["stages", "deep", "chunks"])
@pytest.mark.parametrize("gigabytes_per_s", [6.0, 60.0])
def test_the_choice_is_the_fastest_of_all(
    changes: dict[str, object], gigabytes_per_s: float
) -> None:
    step = base(changes, replace(DEVICE, host_bandwidth=gigabytes_per_s * 1e9))
    steps = every(step)
    peaks = np.array([x.peak_bytes.max() for x in steps.values()])
    hosts = np.array([x.host_bytes.max() for x in steps.values()])
    times = np.array([x.step_s for x in steps.values()])
    seen: set[tuple[bool, bool]] = set()
    for share in (0.02, 0.2, 0.4, 0.6, 0.8, 0.99):
        for part in (0.0, 0.3, 0.5, 1.0):
            top = peaks.min() + share * (peaks.max() - peaks.min())
            host = part * hosts.max()
            chosen = choose(step, top, host)
            fits = (peaks <= top) & (hosts <= host)
            if chosen is None:
                assert not fits.any()
                continue
            choice = simulate_step(step.architecture, chosen, step.device)
            assert choice.peak_bytes.max() <= top
            assert choice.host_bytes.max() <= host
            assert choice.step_s == pytest.approx(times[fits].min(), rel=1e-12)
            seen.add((bool(chosen.recomputed), bool(chosen.swapped)))
    if (
        changes is DEEP and gigabytes_per_s > 6
    ):  # elsewhere the copies take longer, or the two layers that are
        assert (True, True) in seen  # being copied need as much as is saved


def test_what_swapping_a_layer_does() -> None:
    """Bytes and waits by the formulas of docs/plan_model.md, from layouts that differ by one layer."""
    step = base(STAGES)
    kept = step.layout.with_changes(recompute="none", recompute_layers=None)
    for gigabytes_per_s in (0.5, 3.0, 1000.0):
        device = replace(DEVICE, host_bandwidth=gigabytes_per_s * 1e9)
        plain, _ = chunk_times(step.architecture, kept, device)
        fewer, _ = chunk_times(
            replace(step.architecture, layers=step.architecture.layers[:-1]),
            kept.with_changes(chunks=(3, 1)),
            device,
        )
        away, wait = chunk_times(step.architecture, kept.with_changes(swapped=(4,)), device)
        layer, forward, backward = (
            x[1] - y[1]
            for x, y in (
                (plain.activation, fewer.activation),
                (plain.forward, fewer.forward),
                (plain.dx + plain.dw, fewer.dx + fewer.dw),
            )
        )
        moved = MOVED[1] * layer
        freed = FREED[1] * layer
        assert plain.activation[1] - away.activation[1] == pytest.approx(freed, rel=1e-9)
        copy = moved / (device.host_bandwidth * device.constants.intra_share)
        expected = max(copy - forward, 0) + max(copy - backward, 0)
        assert wait[1] == pytest.approx(expected, abs=1e-9)
        assert (away.dx - plain.dx)[1] == pytest.approx(expected, abs=1e-9)
        assert wait[0] == 0
        ahead = swap_of(step.architecture, kept, device).prefetch
        assert 1 <= ahead <= max(BACKWARD_OPERATORS)
        if copy < backward / BACKWARD_OPERATORS[1]:
            assert ahead == 1
    swap, both = (
        simulate_step(step.architecture, kept.with_changes(swapped=x), DEVICE)
        for x in ((4,), (3, 4))
    )
    # the last stage has one micro-batch in flight; what is being copied stays on the device, for two layers
    assert swap.host_bytes.tolist() == pytest.approx([0.0, moved])
    assert both.host_bytes.tolist() == pytest.approx([0.0, 2 * moved])
    whole = simulate_step(step.architecture, kept, DEVICE)
    assert swap.peak_bytes[1] == pytest.approx(whole.peak_bytes[1] + 2 * moved - freed)
    assert both.peak_bytes[1] == pytest.approx(whole.peak_bytes[1] + 2 * moved - 2 * freed)


def test_too_many_choices_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    step = base(STAGES)
    assert choose(step, 1e15) is not None
    monkeypatch.setattr(layer_memory, "MOST", 17)
    assert choose(step, 1e15) is None


def test_a_device_without_a_link_swaps_nothing() -> None:
    device = replace(DEVICE, host_bandwidth=0.0)
    without = base(STAGES, device)
    with pytest.raises(BadInputError, match="host_bandwidth is missing"):
        choose(without, 1e15)
    assert all("swap" not in change.name for change in answer(NAME, [], device).changes)


def test_plan_memory_says_it_in_the_recipe_s_words() -> None:
    room = 35 * 2**30
    report = answer(NAME, [], DEVICE, memory=room)
    (mixed,) = [c for c in report.changes if c.name == "keep, recompute or swap each layer"]
    few = next(c for c in report.changes if c.name == "recompute as few layers as fit")
    assert report.fits(mixed.step)
    assert mixed.step.step_s < few.step.step_s
    recipe = load(NAME, list(mixed.overrides), use="plan")
    repeated = simulate_step(Architecture.from_recipe(recipe), Layout.from_recipe(recipe), DEVICE)
    assert repeated.step_s == mixed.step.step_s
    assert recipe.swap_config.swap
    # a limit of the host's memory leaves less to swap, and then to recompute is what is left
    half = answer(NAME, [], DEVICE, memory=room, host=mixed.step.host_bytes.max() / 4)
    (limited,) = [c for c in half.changes if c.name == mixed.name]
    assert limited.step.host_bytes.max() <= mixed.step.host_bytes.max() / 4
    assert limited.step.layout.recomputed
    assert limited.step.step_s > mixed.step.step_s
    # from a recipe that swaps, the way back is a change, too
    back = answer(NAME, list(mixed.overrides), DEVICE)
    (all_layers,) = [c for c in back.changes if c.name == "recompute all layers"]
    assert set(all_layers.overrides) == {
        *(
            "recompute_config.recompute=True",
            "swap_config.swap=False",
            "swap_config.layer_swap=null",
        )
    }


def test_operators_are_not_planned() -> None:
    with pytest.raises(RecipeError, match="whole layers"):
        load(NAME, ["recompute_config.recompute=False", "swap_config.swap=True"], use="plan")
