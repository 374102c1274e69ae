"""Test that no derived bound is exceeded by a correct program and none is useless; `__main__` runs 10^8 checks."""

import importlib.util

import numpy as np
import pytest

from benchmarks.align_bounds import check as bounds
from benchmarks.align_bounds import specs as bounds_specs
from benchmarks.align_bounds.inputs import ORDERS, Machine, draw, narrow
from telechat_moe.numerics import round_to
from telechat_moe.tools.align.operators import registry
from telechat_moe.tools.align.operators.approx import Approx

torch = None
if importlib.util.find_spec("torch"):
    import torch


def tally(size, rounds=range(1), every=1, names=None):
    tallies = {}
    for i, (name, dtype, kind, number) in enumerate(bounds.cases(rounds, names)):
        if sum(divmod(i, len(bounds_specs.SPECS))) % every == 0:
            result = bounds.check(name, dtype, kind, number, size, torch)
            tallies.setdefault(name, bounds.Tally()).add(result)
    return tallies


FUSED = {
    "flash_attention_score",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "fused_apply_rotary_pos_emb",
    "gmm",
    "grouped_matmul_v4",
    "grouped_mm",
    "moe_init_routing_v2",
    "npu_add_rms_norm",
    "npu_apply_adam_w",
    "npu_apply_rotary_pos_emb",
    "npu_cross_entropy_loss",
    "npu_fusion_attention",
    "npu_grouped_matmul",
    "npu_moe_compute_expert_tokens",
    "npu_moe_finalize_routing",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing",
    "npu_moe_init_routing_v2",
    "scaled_masked_softmax",
    "scaled_upper_triang_masked_softmax",
}


def test_every_operator_is_in_the_corpus():
    """All but the vendors' fused ones, which tests/align/operators/test_vendor_operators.py computes another way."""
    formulas = {f.name for f in registry._FORMULAS.values()}
    assert formulas - FUSED == set(bounds_specs.SPECS)


@pytest.mark.torch
def test_no_bound_is_broken():
    """Check a sample: every operator in every type (7 shares no divisor with the number of operators)."""
    tallies = tally(1024, every=7)
    assert set(tallies) == set(bounds_specs.SPECS)
    assert [t.broken for t in tallies.values() if t.violations] == []
    assert [(n, t.skipped) for n, t in tallies.items() if t.skipped] == []
    assert sum(t.checks for t in tallies.values()) > 10**6


@pytest.mark.torch
@pytest.mark.slow
def test_no_bound_is_broken_in_10_to_the_8_checks():
    """Check also that the median operator's bound is at most 8 times the 99.9 % quantile of observed errors."""
    tallies = tally(8192)
    assert sum(t.checks for t in tallies.values()) > 10**8
    assert [t.broken for t in tallies.values() if t.violations] == []
    tight = [t.tightness() for t in tallies.values()]
    assert np.median([t for t in tight if t is not None]) <= 8


def test_bounds_are_not_loose():
    names = (
        "add",
        "exp",
        "sum",
        "matmul",
        "softmax",
        "rms_norm",
        "cross_entropy",
        "swiglu",
        "AdamW",
    )
    for name, result in tally(1024, range(2), names=names).items():
        for dtype in bounds.DTYPES[:3]:
            tightness = result.tightness(dtype)
            assert 1 <= tightness <= 8, (name, dtype, tightness)


@pytest.mark.parametrize("name", ["matmul", "rms_norm", "softmax", "sum"])
def test_a_wrong_program_breaks_its_bound(name, monkeypatch):
    spec = bounds_specs.SPECS[name]
    for dtype, wrong in (("float32", 1.001), ("bfloat16", 1.1), ("float64", 1 + 1e-9)):
        programs = [
            lambda m, *a, p=p, w=wrong, **k: p(m, *a, **k) * m.work(w) for p in spec.programs
        ]
        monkeypatch.setitem(bounds_specs.SPECS, name, bounds.Spec(name, spec.make, tuple(programs)))
        result = bounds.check(name, dtype, "uniform", 0, 2048)
        assert result.violations > 0.2 * result.checks, dtype


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["normal", "repeated", "drifting"])
def test_long_sums(kind, order):
    """Test terms that drift from token to token, so that partial sums are far larger than the sum."""
    rng, machine = np.random.default_rng(0), Machine("float32", order, stores=False)
    for count in (1024, 4096):
        a, b = draw(rng, kind, (64, count), "float32"), draw(rng, kind, (count, 16), "float32")
        for got, want in (
            (machine.sum(a), Approx(a).sum(-1)),
            (machine.sum(a.T, 0), Approx(a.T).sum(0)),
            (machine.matmul(a, b), Approx(a).matmul(b)),
        ):
            assert (np.abs(got - want.value) <= 0.6 * want.bound("float32")).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_of_programs_is_that_of_the_tool(dtype):
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * 100
    assert np.array_equal(narrow(x, dtype), round_to(x, dtype).astype(np.float32))


def test_terms_that_are_equal_once_stored_round_alike():
    """Losses of about log 16 are one number in float16; added up in it one by one, all sums are rounded one way."""
    terms = np.log(16) + 1e-7 * np.random.default_rng(0).standard_normal(512)
    total = np.float64(0)
    for term in round_to(terms, "float16"):
        total = round_to(total + term, "float16")
    allowed = Approx(terms, "float16", "float16").sum()
    assert abs(total - allowed.value) <= allowed.bound("float16")
    assert abs(total * 1.5 - allowed.value) > allowed.bound("float16")
