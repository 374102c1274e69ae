"""A reference run for `telechat-moe align`: transformers' DeepseekV3 (TeleChat3-MoE's architecture), small, two steps.

Any device that torch knows; weights and data are the same everywhere (made on the CPU from a seed)::

    telechat-moe align capture --torch hf_deepseek.py --out golden --steps 0-1
    telechat-moe align capture --torch hf_deepseek.py --out npu --steps 0-1 -- --device npu --dtype bfloat16
    telechat-moe align bisect golden npu --html align.html

``--plant`` does one thing wrong on purpose, to see that it is found.
"""

import argparse
import sys

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

PLANTED = ("scale", "expert", "gradient")


def reference(steps: int) -> tuple[DeepseekV3ForCausalLM, torch.Tensor]:
    """Return the model and the token ids of each step, made on the CPU from a seed."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
        n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1,
        q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        max_position_embeddings=64, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    return model, torch.randint(0, config.vocab_size, (steps, 2, 32))


def main() -> None:
    """Train two steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--weights", help="file of weights.py instead of the seed")
    parser.add_argument("--plant", choices=PLANTED)
    args = parser.parse_args()
    if args.device == "npu":
        import torch_npu  # noqa: F401  (registers the device)

    model, rows = reference(args.steps)
    if args.weights:
        stored = torch.load(args.weights, weights_only=True)
        model.load_state_dict(stored["weights"])
        rows = stored["rows"][: args.steps]
    model = model.to(device=args.device, dtype=getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1)
    layer = model.model.layers[1]
    for step in range(args.steps):
        ids = rows[step].to(args.device)
        hooks = []
        if args.plant == "scale" and step == 1:
            hooks.append(layer.self_attn.o_proj.register_forward_hook(lambda m, x, y: y * 1.01))
        if args.plant == "expert" and step == 1:
            hooks.append(
                layer.mlp.gate.register_forward_hook(lambda m, x, y: (y[0].roll(1, 0), y[1]))
            )
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if args.plant == "gradient" and step == 1:
            model.lm_head.weight.grad.mul_(2.0)
        optimizer.step()
        sys.stderr.write(f"step {step} loss {loss.item():.6f}\n")
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    main()
