"""FLOPs and parameters against published counts and this package's own arithmetic."""

from dataclasses import replace

import pytest

from benchmarks.plan_published.models import published
from telechat_moe.recipe import load
from telechat_moe.recipe.arithmetic import flops_per_token, parameters
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.flops import (
    hardware_flops,
    keys_per_token,
    model_flops,
    utilisation,
)
from telechat_moe.tools.plan.cost.layout import Layout

RECIPES = (
    "telechat3_moe/pretrain_tiny.yaml",
    "telechat3_moe/pretrain_105b_a4b_4k.yaml",
    "telechat3_moe/pretrain_1t.yaml",
    "pangu_ultra_moe/pretrain_718b.yaml",
)


@pytest.mark.parametrize("name", RECIPES)
def test_architecture_of_a_recipe_has_the_parameters_and_flops_of_the_recipe(name):
    recipe = load(name)
    a, c = Architecture.from_recipe(recipe), recipe.model_config
    count, flops = parameters(c), flops_per_token(c)
    assert a.parameters == count.total
    assert a.active_parameters == count.totals()["active_without_mtp"]
    assert model_flops(a).products == flops.products
    assert model_flops(a).attention == pytest.approx(flops.attention, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("mpt13b", "MPT 13B"), ("mpt3b", "MPT 3B"), ("Internlm2-7B", "InternLM2 7B"), ("internlm_7b_ptd", "InternLM 7B"),
        ("Baichuan2-13B", "Baichuan2 13B"), ("Qwen1.5-7B", "Qwen1.5 7B"), ("Qwen-7B", "Qwen 7B"),
        ("LLaMA2-7B", "Llama 2 7B"), ("LLaMA-7B", "LLaMA 7B"), ("Llama3 70b", "Llama 3 70B"),
    ],
)  # fmt: skip
def test_names_of_tables_mean_the_right_model(name, means):
    model = published(name)
    assert model is not None
    assert model.name == means


def test_megatron_formula():
    """96 B S l h^2 (1 + S/6h + V/16lh): Narayanan et al. 2021, eq. 3, recomputation included, all keys."""
    s, layers, h, vocab = 2048, 96, 12288, 51200
    a = Architecture(
        hidden=h, layers=("dense",) * layers, heads=96, seq=s, vocab=vocab, tied=True, gated=False
    )
    body = 96 * layers * h**2 * (1 + s / (6 * h)) * s
    head = 6 * s * h * vocab  # not recomputed; the paper's V term counts 6 S h V
    every_key = model_flops(a, keys=float(s))
    recomputed = every_key.training + every_key.forward - 2 * vocab * h
    assert recomputed * s == pytest.approx(body + head, rel=1e-12)


def test_a_window_limits_keys_and_causal_is_half():
    a = Architecture(hidden=64, layers=("dense",), heads=4, seq=1000, vocab=10)
    assert keys_per_token(a) == pytest.approx(sum(range(1, 1001)) / 1000)
    w = replace(a, window=128)
    assert keys_per_token(w) == pytest.approx(sum(min(i, 128) for i in range(1, 1001)) / 1000)


def test_hardware_counts_recomputation_and_conventions_are_ordered():
    a = published("llama2 7b")
    assert a is not None
    none, full = Layout(), Layout(recompute="full")
    body = model_flops(a).forward - 2 * a.vocab * a.hidden
    assert hardware_flops(a, none) == model_flops(a).training
    assert hardware_flops(a, full) == pytest.approx(model_flops(a).training + body)
    used = utilisation(a, full, 1.0, 1e15)
    assert used["six_n"] < used["model"] * 1.1
    assert used["model"] < used["full_attention"] < used["hardware"]
