"""The description of this machine: the fit, the file, and (where mindspore is) the measurement itself."""

from dataclasses import replace

import numpy as np
import pytest

from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost import cpu_step, this_machine
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import Constants, Device, load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.step import evaluate
from telechat_moe.tools.plan.cost.this_machine import (
    CALIBRATION,
    FITTED,
    RECIPE,
    Calibration,
    MeasurementError,
    StepCase,
    as_job,
    as_yaml,
    fit,
    medians,
    of_case,
    product_shapes,
    run_measurement,
    variant,
)

DEVICE = Device(
    name="x",
    peak_flops={"fp32": 1.2e11, "bf16": 1.2e11},
    memory_bytes=2.0**34,
    memory_bandwidth=1e10,
    node_devices=2,
    intra_bandwidth=1e9,
    inter_bandwidth=1e9,
)
SUM = {
    "products": 1e-11,
    "elements": 5e-9,
    "attention": 4e-11,
    "parameters": 2e-9,
    "layers": 5e-3,
}
"""Coefficients of `cpu_step`."""

TRUE = {
    "matmul_share": 0.9, "matmul_half": 60.0, "attention_share": 0.4,
    "memory_share": 1.4, "layer_host_s": 1e-3, "step_host_s": 6e-3,
}  # fmt: skip


def test_fit_finds_what_made_the_times():
    """Times made with known constants are predicted again, also of steps that were not fitted."""
    truth = replace(DEVICE, constants=replace(Constants(), **TRUE))
    pairs = [of_case(c) for c in CALIBRATION]
    seconds = evaluate([a for a, _ in pairs], [x for _, x in pairs], truth).step_s
    constants = fit(pairs, seconds, DEVICE)
    device = replace(DEVICE, constants=constants)
    others = [of_case(variant("a", layers=6)), of_case(variant("b", batch=1, layers=3, seq=256))]
    for some in (pairs, others):
        models, layouts = [a for a, _ in some], [x for _, x in some]
        expected = evaluate(models, layouts, truth).step_s
        np.testing.assert_allclose(evaluate(models, layouts, device).step_s, expected, rtol=0.02)
    untouched = set(vars(Constants())) - set(FITTED)
    assert all(getattr(constants, name) == getattr(Constants(), name) for name in untouched)


def test_noise_does_not_carry_the_fit_away():
    truth = replace(DEVICE, constants=replace(Constants(), **TRUE))
    pairs = [of_case(c) for c in CALIBRATION]
    seconds = evaluate([a for a, _ in pairs], [x for _, x in pairs], truth).step_s
    noisy = seconds * np.random.default_rng(0).uniform(1.0, 1.05, len(seconds))
    a, layout = of_case(StepCase("whole", ()))
    expected = evaluate(a, [layout], truth).step_s
    device = replace(DEVICE, constants=fit(pairs, noisy, DEVICE))
    predicted = evaluate(a, [layout], device).step_s
    np.testing.assert_allclose(predicted, expected, rtol=0.10)


def test_cpu_step_by_hand():
    """One dense layer's products counted one by one."""
    a = Architecture(
        hidden=4, layers=("dense",), heads=2, q_lora_rank=5, kv_lora_rank=6,
        qk_nope=2, qk_rope=1, v_head_dim=7, ffn=8, vocab=9, seq=10,
    )  # fmt: skip
    t = 20
    matrices = [(5, 4), (7, 4), (6, 5), (18, 6), (4, 14), (16, 4), (4, 8), (9, 4)]
    products, elements, attention, parameters, layers = cpu_step.terms(a, Layout(micro_batch=2))
    assert products == 3 * sum(2 * t * n * k for n, k in matrices)
    assert elements == sum(t * n + t * k + n * k for n, k in matrices)
    assert attention == 3 * t * 10 * 2 * (3 + 7)
    assert parameters == a.parameters
    assert layers == 1


MOE = Architecture(
    hidden=4, layers=("moe",), heads=2, q_lora_rank=5, kv_lora_rank=6,
    qk_nope=2, qk_rope=1, v_head_dim=7, ffn=8, vocab=9, seq=10, experts=4, top_k=2, moe_ffn=3, shared_ffn=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "experts", "rows"),
    [
        (Layout(micro_batch=2), 4, 10),  # 20 tokens, two of four experts each
        (Layout(micro_batch=2).with_changes(fused=False), (40 + 4 * 7) // 8, 8),  # blocks of 8 rows
    ],
)
def test_experts_compute_on_padding(layout, experts, rows):
    """The same step with experts twice as wide costs twice the experts' products more."""
    narrow, wide = (cpu_step.terms(replace(MOE, moe_ffn=w), layout)[0] for w in (3, 6))
    assert wide - narrow == pytest.approx(3 * 2 * experts * rows * 3 * 4 * 3)


def test_cpu_step_fit_finds_what_made_the_times():
    pairs = [of_case(c) for c in CALIBRATION]
    coefficients = cpu_step.fit(pairs, [cpu_step.predict(*p, SUM) for p in pairs])
    assert coefficients == pytest.approx(SUM, rel=1e-6)


def test_file_is_read_back(tmp_path):
    constants = replace(Constants(), **TRUE, intra_share=1.0, collective_host_s=3e-4)
    device = replace(DEVICE, constants=constants, fitted=FITTED, step={"products": 2e-11})
    path = tmp_path / "here.yaml"
    path.write_text(as_yaml(Calibration(device, (), ())))
    loaded = load_device(path)
    assert loaded.constants == constants
    assert loaded.step == device.step
    assert set(loaded.fitted) == set(FITTED)
    assert loaded.peak_flops == device.peak_flops
    assert all("measured here" in loaded.sources[f"constants.{name}"] for name in FITTED)


def test_variants_are_recipes():
    for case in CALIBRATION:
        load(case.recipe, list(case.overrides))
    recipe = load(RECIPE, list(variant("v", seq=1024, batch=2, moe=96).overrides))
    assert recipe.model_config.seq_length == 1024
    assert recipe.runner_config.batch_size == 2
    assert recipe.model_config.moe_intermediate_size == 96


def test_products_are_those_of_the_recipe():
    architecture, layout = of_case(StepCase("whole", ()))
    shapes = product_shapes(architecture, layout)
    tokens = layout.micro_batch * architecture.seq
    assert (tokens, architecture.vocab, architecture.hidden) in shapes
    assert (
        tokens * architecture.top_k // architecture.experts,
        2 * architecture.moe_ffn,
        256,
    ) in shapes


def test_plain_operators_keep_scores():
    _, layout = of_case(CALIBRATION[0], "plain")
    assert not layout.stack.flash
    assert not layout.stack.fused


def test_medians_of_rounds():
    times = medians({"ready": "a", "steps": {"a": [3.0, 1.0, 2.0], "b": [5.0]}})
    assert times == {"a": 2.0, "b": 5.0}
    job = as_job(CALIBRATION[:1], "plain")
    assert job[0]["overrides"][-1] == "telechat_moe.operators.default=plain"


def test_calibration_is_put_together(monkeypatch, tmp_path, capsys):
    """The measurement is replaced by one with known results; file and tables come from them.

    No coefficients give these times exactly: the least squares are those of another solver.
    """
    from scipy.optimize import lsq_linear

    from telechat_moe.cli import main

    random = np.random.default_rng(3)
    seconds = {
        c.name: cpu_step.predict(*of_case(c), SUM) * random.uniform(0.8, 1.25) for c in CALIBRATION
    }
    rows = np.array([cpu_step.terms(*of_case(c)) / seconds[c.name] for c in CALIBRATION])
    scale = rows.max(axis=0)
    expected = lsq_linear(rows / scale, np.ones(len(rows)), (0, np.inf), tol=1e-14).x

    def measured(job, *, processes=1, beside=False, on_result=None):
        if "all_reduce" in job:
            assert processes == 2
            return {"all_reduce": [1e-3, 1e-3 + 2**24 / 1e9]}
        steps = {name: [9.0, median, 0.0] for name, median in seconds.items()}
        return {"flops": [1e11] * len(job["shapes"]), "bandwidth": 2e10, "steps": steps}

    monkeypatch.setattr(this_machine, "run_measurement", measured)
    path = tmp_path / "here.yaml"
    assert main(["plan", "calibrate", "--out", str(path)]) == 0
    assert "100.0 GFLOP/s" in capsys.readouterr().out
    device = load_device(path)
    assert list(device.step) == list(SUM)
    shares = np.array(list(device.step.values())) * scale  # of a step, the largest of each
    np.testing.assert_allclose(shares, expected, rtol=1e-3, atol=1e-6)
    assert device.memory_bandwidth == 2e10
    assert device.intra_bandwidth == pytest.approx(1e9, rel=1e-3)
    assert main(["plan", "simulate", RECIPE, "--device", str(path)]) == 0
    assert "as this machine measured itself" in capsys.readouterr().out


def test_failed_measurement_says_why():
    with pytest.raises(MeasurementError, match="no_such_recipe"):
        run_measurement({"cases": [{"name": "x", "recipe": "no_such_recipe", "overrides": []}]})


def test_product_rates():
    """Rates of our products: positive, and not above what a core can do."""
    rates = run_measurement({"shapes": [(256, 256, 256)]})["flops"]
    assert 1e8 < rates[0] < 1e12


@pytest.mark.mindspore
@pytest.mark.slow
def test_calibrate(tmp_path, capsys, monkeypatch):
    """pytest -m slow tests/plan/cost/test_this_machine.py: a minute; longer on a busy machine."""
    from telechat_moe.cli import main

    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    path = tmp_path / "here.yaml"
    assert main(["plan", "calibrate", "--out", str(path)]) == 0
    assert "GFLOP/s" in capsys.readouterr().out
    device = load_device(path)
    assert main(["plan", "simulate", RECIPE, "--device", str(path)]) == 0
    assert device.intra_bandwidth > 1e6
    assert tuple(device.fitted) == this_machine.FITTED
