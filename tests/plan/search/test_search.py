"""The joint search against every layout and placement scored by the simulator, and what must hold when inputs change."""

import itertools
import re
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from every_placement import everything

from telechat_moe.recipe import load
from telechat_moe.recipe.load import loads
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import Device, load_device
from telechat_moe.tools.plan.cost.expert_exchange import choices
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.cost.step import evaluate
from telechat_moe.tools.plan.report.layouts import distinct, front_points, page, summary, why_not
from telechat_moe.tools.plan.search import search as search_module
from telechat_moe.tools.plan.search.emit import (
    layout_string,
    mindspeed_arguments,
    settings,
    write_recipe,
)
from telechat_moe.tools.plan.search.planner import find, recipe_text
from telechat_moe.tools.plan.search.search import GAP, search, usable
from telechat_moe.tools.plan.search.space import (
    NAMES,
    POLICIES,
    Space,
    enumerate_space,
    layout_of,
    parse_fixed,
)

CLOSE = 2e-4
"""Gap to which searches go on that are compared."""

TINY = "telechat3_moe/pretrain_tiny.yaml"
LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


def _small(layers: int = 5, **more) -> tuple[Architecture, Layout]:
    recipe = load(LARGE)
    a = Architecture.from_recipe(recipe)
    kinds = a.layers[:1] + a.layers[1:layers]
    return replace(a, layers=kinds, **more), Layout.from_recipe(recipe)


@pytest.mark.parametrize(
    ("devices", "gib"), [(2, 60.0), (2, 116.0), (4, 57.5), (8, 26.0), (8, 29.0)]
)
def test_every_layout_and_placement_scored(devices: int, gib: float) -> None:
    a, base = _small()
    device = usable(load_device("ascend-910b"), gib * 2**30)
    space = Space(devices=devices, global_batch=8, base=base, most_pp=3, most_vpp=2)
    plan = search(a, space, device, top=3, tolerance=CLOSE)
    fits, best = everything(a, space, device)
    assert fits.any() == (gib != 60.0)
    assert not fits.all()
    if not fits.any():
        assert not plan.best
        return
    assert plan.best[0].step_s == pytest.approx(best, rel=CLOSE)
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    assert plan.optimal


def _best(a, base, device, **changes) -> float:
    space = Space(**{"devices": 64, "global_batch": 64, "base": base, "most_vpp": 2, **changes})
    plan = search(a, space, device, top=1, tolerance=CLOSE)
    assert plan.optimal
    return plan.best[0].step_s


def test_more_memory_or_bandwidth_never_hurts() -> None:
    a, base = _small(13)
    device = load_device("ascend-910b")
    steps = [_best(a, base, usable(device, gib * 2**30)) for gib in (9, 10, 12, 60)]
    assert all(b <= a * (1 + CLOSE) for a, b in itertools.pairwise(steps))
    assert steps[0] > steps[-1]
    room = usable(device, 20 * 2**30)
    for name in ("memory_bandwidth", "intra_bandwidth", "inter_bandwidth"):
        faster = replace(room, **{name: 2 * getattr(room, name)})
        assert _best(a, base, faster) <= _best(a, base, room) * (1 + CLOSE)


@lru_cache(1)
def _free() -> tuple[Architecture, Space, Device, float]:
    a, base = _small(5)
    device = usable(load_device("ascend-910b"), 27 * 2**30)
    space = Space(devices=8, global_batch=16, base=base, most_vpp=2)
    plan = search(a, space, device, top=1, tolerance=CLOSE)
    assert plan.optimal
    return a, space, device, plan.best[0].step_s


@pytest.mark.parametrize("name", NAMES)
def test_the_best_of_all_fixed_choices_is_the_free_one(name: str) -> None:
    a, space, device, free = _free()
    values = np.unique(enumerate_space(a, space)[:, NAMES.index(name)])
    assert len(values) > 1 or name == "ends"  # recipes have one
    steps = []
    for value in values:
        plan = search(a, replace(space, fixed={name: int(value)}), device, top=1, tolerance=CLOSE)
        assert plan.optimal or not plan.best
        steps += [best.step_s for best in plan.best[:1]]
    assert min(steps) == pytest.approx(free, rel=CLOSE)


def test_time_limit_is_honest() -> None:
    a, base = _small(13)
    device = usable(load_device("ascend-910b"), 20 * 2**30)
    space = Space(devices=64, global_batch=64, base=base)
    unlimited, cut = search(a, space, device, top=1), search(a, space, device, top=1, limit_s=0.0)
    assert unlimited.optimal
    assert not cut.best
    assert not cut.optimal
    assert cut.lower_bound_s <= unlimited.best[0].step_s


def test_time_that_is_up_ends_the_table(monkeypatch) -> None:
    a, base = _small(9)
    device = usable(load_device("ascend-910b"), 30 * 2**30)
    space = Space(devices=16, global_batch=32, base=base, most_vpp=2)
    unlimited = search(a, space, device, top=5)
    assert len(unlimited.best) > 5
    monkeypatch.setattr(search_module._LayoutSearch, "_late", lambda self: bool(self.placed))
    cut = search(a, space, device, top=5)
    assert len(cut.best) == 1
    assert cut.timed_out
    assert not cut.optimal
    assert cut.lower_bound_s <= unlimited.best[0].step_s <= cut.best[0].step_s


def test_the_front_says_how_sure_it_is() -> None:
    a, base = _small(9)
    space = Space(devices=16, global_batch=32, base=base, most_vpp=2)
    device = load_device("ascend-910b")
    plans = [search(a, space, usable(device, gib * 2**30), top=1) for gib in (30, 24, 18)]
    points = front_points(plans)
    assert len(points) > 1
    assert all(p.gap <= GAP * (1 + 1e-6) for p in points)
    assert sorted(points, key=lambda p: -p.step_s) == points
    for plan in plans[1:]:  # as if time had been up; what is known of more memory still holds
        plan.lower_bound_s = 0.5 * plans[0].lower_bound_s
    known = plans[0].lower_bound_s
    gaps = {p.step_s: p.gap for p in front_points(plans)}
    assert gaps == pytest.approx({step: step / known - 1 for step in gaps}, abs=1e-6)


def test_bounds_are_below_what_is_found() -> None:
    a, base = _small(9)
    device = usable(load_device("ascend-910b"), 30 * 2**30)
    plan = search(a, Space(devices=16, global_batch=32, base=base, most_vpp=2), device, top=40)
    assert len(plan.best) >= 15
    for c in plan.best:
        assert c.bound_s <= c.step_s * (1 + 1e-9)
        assert simulate_step(a, c.layout, device).step_s == pytest.approx(c.step_s)


def test_why_not_names_every_other_layout() -> None:
    a, base = _small(9)
    device = usable(load_device("ascend-910b"), 30 * 2**30)
    plan = search(a, Space(devices=16, global_batch=32, base=base, most_vpp=2), device, top=3)
    lines = list(why_not(plan))
    assert len(lines) == len(plan.rows) - 1
    assert any("out of memory by" in line and "on stage" in line for line in lines)
    assert any("dominated: at least" in line for line in lines)
    assert not any("not closed" in line for line in lines)
    text = page(plan, [], summary(plan, 3))
    assert "<svg" in text
    assert "16 x ascend-910b, 32 sequences a step, 30.0 GiB a device" in text
    assert ">1</text>" in text  # the point of the first layout, numbered as in the table
    assert not re.search(r"\d\.\d{8}|[a-z]_[a-z]+: |None", text)  # no dump of Python values


def test_recipe_is_accepted_and_says_the_same() -> None:
    a = Architecture.from_recipe(load(LARGE))
    base = Layout.from_recipe(load(LARGE))
    device = usable(load_device("ascend-910b"), 20 * 2**30)
    for fixed in (
        [],
        ["vpp=1", "pp=8", "recompute=full"],
        ["pp=1"],
        ["tp=8", "recompute=norm+activation"],
        ["etp=2"],
    ):
        space = Space(devices=256, global_batch=64, base=base, fixed=parse_fixed(fixed), most_vpp=3)
        plan = search(a, space, device, top=1, limit_s=3)
        if not plan.best:
            continue
        layout = plan.best[0].layout
        text = write_recipe(LARGE, [], layout, "test")
        repeated = Layout.from_recipe(loads(text))
        table = evaluate(a, [layout, repeated], device)
        assert table.step_s[0] == pytest.approx(table.step_s[1], rel=1e-12)
        assert repeated.devices == 256
        assert repeated.global_batch == 64


def test_the_step_that_is_searched_is_the_step_of_the_recipe_that_is_written(tmp_path) -> None:
    plan = find(LARGE, [], 256, "ascend-910b", 55 * 2**30, None, ["pp=4", "vpp=2", "tp=1"], top=3)
    written = tmp_path / "planned.yaml"
    ways = set()
    for pick, best in enumerate(distinct(plan), start=1):
        written.write_text(recipe_text(plan, LARGE, [], pick))
        layout = Layout.from_recipe(load(str(written)))
        ways.add(layout.exchange)
        assert layout.exchange == best.layout.exchange
        step = simulate_step(plan.architecture, layout, plan.device)
        assert step.step_s == pytest.approx(best.step_s, rel=1e-9)
        assert f"Predicted step {step.step_s:.4f} s" in written.read_text()
        # no other exchange that the layout allows is faster
        for kind in choices(plan.architecture, layout, plan.device):
            other = layout.with_changes(exchange=kind)
            assert simulate_step(plan.architecture, other, plan.device).step_s >= step.step_s * (
                1 - 1e-9
            )
    assert ways - {"alltoall"}


def test_layout_string_and_mindspeed() -> None:
    a, base = _small(8)
    layout = base.with_changes(
        dp=1, tp=2, pp=2, vpp=2, ep=2, micro_batches=4, chunks=(1, 2, 2, 3), schedule="interleaved"
    )
    assert layout_string(a, layout) == "Et|(tt|)*2tttmL"
    words = mindspeed_arguments(a, layout)
    assert words[words.index("--num-layers") + 1] == "12"
    assert words[words.index("--noop-layers") + 1] == "1,2,5,8"
    assert words[words.index("--expert-model-parallel-size") + 1] == "1"
    assert "--moe-tp-extend-ep" in words
    assert settings(layout, 8)["model.model_config.offset"] == [[-1, 0], [0, 1]]


def test_space_keeps_the_rules_of_recipes() -> None:
    """A sample of the space, written as recipes, is accepted."""
    a, base = Architecture.from_recipe(load(LARGE)), Layout.from_recipe(load(LARGE))
    rows = enumerate_space(a, Space(devices=256, global_batch=64, base=base))
    rng = np.random.default_rng(1)
    for row in rows[rng.choice(len(rows), 12, replace=False)]:
        layout = layout_of(row, Space(devices=256, global_batch=64, base=base))
        count = layout.pp * layout.vpp
        first = len(a.layers) - (count - 1) * (len(a.layers) // count or 1)
        chunks = (first,) + (len(a.layers) // count or 1,) * (count - 1) if count > 1 else None
        if chunks and first < 0:
            continue
        if row[NAMES.index("policy")] == POLICIES.index("full") and chunks:
            layout = layout.with_changes(recompute_layers=chunks)
        loads(write_recipe(LARGE, [], layout.with_changes(chunks=chunks), "test"))
