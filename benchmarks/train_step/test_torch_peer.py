"""The experts that torch's rows use compute what transformers' own loop does."""

import pytest

pytestmark = pytest.mark.torch


def test_grouped_experts_are_transformers_experts():
    torch = pytest.importorskip("torch", reason="compares with torch: pip install torch==2.13.0")
    transformers = pytest.importorskip("transformers", reason="pip install '.[test]'")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    from benchmarks.train_step.torch_peer import GroupedExperts

    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )
    moe = DeepseekV3MoE(config)
    grouped = GroupedExperts(moe.experts)
    x = torch.randn(24, 32)
    index = torch.randint(0, 7, (24, 2))  # the last expert gets no token
    weight = torch.rand(24, 2)
    expected, found = moe.moe(x, index, weight), grouped(x, index, weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    expected.square().sum().backward()
    found.square().sum().backward()
    for expert, up in zip(moe.experts, grouped.up.grad, strict=True):
        gate = expert.gate_proj.weight.grad
        gate = torch.zeros(16, 32) if gate is None else gate
        torch.testing.assert_close(up[:, :16].T, gate, rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = grouped(x, index, weight)
    torch.testing.assert_close(
        rounded, expected, rtol=5e-2, atol=5e-3 * float(expected.detach().abs().max())
    )
    assert not torch.equal(rounded, found)
