"""The independent checker takes true certificates and refuses changed ones."""

import copy
import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from telechat_moe.errors import UsageError
from telechat_moe.recipe import load
from telechat_moe.tools.plan.architecture import Architecture
from telechat_moe.tools.plan.certify import certificate
from telechat_moe.tools.plan.check_certificate import Wrong, check, main
from telechat_moe.tools.plan.device import load_device
from telechat_moe.tools.plan.layout import Layout
from telechat_moe.tools.plan.search import Plan, search, usable
from telechat_moe.tools.plan.space import Space

LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


def small_plan(**more: Any) -> Plan:
    recipe = load(LARGE)
    a = Architecture.from_recipe(recipe)
    a = replace(a, layers=a.layers[:1] + a.layers[1:9])
    device = usable(load_device("ascend-910b"), 30 * 2**30)
    space = Space(
        devices=16,
        global_batch=16,
        base=Layout.from_recipe(recipe),
        most_vpp=3,
        **{"fixed": {"cp": 1}, **more},
    )
    return search(a, space, device, top=1)


@lru_cache(1)
def stated() -> str:
    plan = small_plan()
    assert plan.optimal
    return json.dumps(certificate(plan))


def test_a_true_certificate_passes() -> None:
    found = json.loads(stated())
    check(found)
    assert len(found["configurations"]) > 100
    assert found["layout"]["step_s"] == pytest.approx(found["bound_s"], rel=1e-6)


def refused(**changes: Any) -> Any:
    found = json.loads(stated())
    found |= changes
    with pytest.raises(Wrong) as raised:
        check(found)
    return str(raised.value)


def test_a_bound_above_the_optimum_is_refused() -> None:
    said = refused(bound_s=json.loads(stated())["bound_s"] * 1.001)
    assert "not proven" in said or "a placement is faster" in said


def test_another_layout_than_stated_is_refused() -> None:
    layout = json.loads(stated())["layout"]
    assert "the layout takes" in refused(layout=layout | {"step_s": layout["step_s"] * 0.999})
    fewer = [
        n - (i == layout["layers"].index(max(layout["layers"])))
        for i, n in enumerate(layout["layers"])
    ]
    assert "not the model's" in refused(layout=layout | {"layers": fewer})
    assert "none of the configurations" in refused(layout=layout | {"row": -1})


def test_a_configuration_that_became_cheaper_is_refused() -> None:
    """Half the time of every layer: what was proven before does not hold."""
    found = json.loads(stated())
    for _, _, problem, _ in found["configurations"]:
        for layer in problem[1]:
            layer[1] = [t // 2 for t in layer[1]]
    assert refused(configurations=found["configurations"])


def test_weights_and_paths_are_checked() -> None:
    proofs = json.loads(stated())["proofs"]
    for name, change in (("fewest", 10.0), ("most", -1.0), ("memory", -1.0)):
        changed = copy.deepcopy(proofs)
        for proof in changed:
            proof[name] = [v + change for v in proof[name]]
        assert refused(proofs=changed)
    changed = copy.deepcopy(proofs)
    for proof in changed:
        proof["paths"] = [[n, 2 * w] for n, w in proof["paths"]]
    assert "add up to more than 1" in refused(proofs=changed)
    schedules = json.loads(stated())["schedules"]
    for schedule in schedules:
        for path in schedule["paths"].values():
            path[1:] = path[2:]  # a step is left out
    assert "path" in refused(schedules=schedules)


def test_a_part_that_is_left_out_is_refused() -> None:
    found = json.loads(stated())
    cut = [c for c in found["configurations"] if isinstance(c[3], list)]
    assert cut
    for configuration in cut:
        configuration[3][2].pop()
    assert "fewer parts" in refused(configurations=found["configurations"])
    empty = json.loads(stated())["configurations"]
    for configuration in empty:
        configuration[3] = -1
    assert "not proven" in refused(configurations=empty)


def test_command(tmp_path, capsys) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(stated())
    bad.write_text(json.dumps(json.loads(stated()) | {"bound_s": 1e9}))
    assert main([str(good)]) == 0
    assert main([str(good), str(bad)]) == 1
    said = capsys.readouterr().out
    assert "gap 0.000%" in said
    assert "WRONG" in said


def test_what_the_checker_does_not_know_is_not_certified() -> None:
    with pytest.raises(UsageError, match="--beyond-recipes"):
        certificate(small_plan(beyond_recipes=True, fixed={"pp": 2, "cp": 1}))
