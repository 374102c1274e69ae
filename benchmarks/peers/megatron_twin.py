"""Train Megatron-Core's GPTModel (MLA, MoE) from the weights and on the batches that hf_twin.py prepared; one CPU process.

    python hf_twin.py prepare mine.yaml twin --steps 2 --set ...      # needs MindSpore
    telechat-moe align capture --torch megatron_twin.py --modules --out megatron --steps 0-1 -- twin
    telechat-moe align bisect megatron ours

Needs megatron-core (0.16.1 was run), without Transformer Engine: its own layers, experts one after another. A bug of
megatron_bugs.py can be planted.
"""

import argparse
import json
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import megatron_bugs
import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

warnings.simplefilter("ignore")  # Transformer Engine and Apex are not installed: meant
torch.cuda.current_device = lambda: torch.device("cpu")  # what Megatron-Core allocates buffers on

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig

multi_latent_attention.HAVE_TE = False  # 0.16.1 believes that it is there
moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]  # 0.16.1 forgets to
CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # nothing is random here

SAME = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.gate": "mlp.router",
}
"""Modules of a layer in Hugging Face's model and in Megatron-Core's."""


class LatentAttention(DotProductAttention):
    """Megatron-Core's own attention, whose values have another width than its keys; there only Transformer Engine's can."""

    def __init__(
        self, *given: Any, k_channels: int = 0, v_channels: int = 0, **options: Any
    ) -> None:
        super().__init__(*given, **options)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def config_of(hf: dict[str, Any]) -> MLATransformerConfig:
    """Return Megatron-Core's settings for a configuration of Hugging Face's DeepseekV3."""
    dense = hf["first_k_dense_replace"]
    return MLATransformerConfig(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"], num_attention_heads=hf["num_attention_heads"],
        q_lora_rank=hf["q_lora_rank"], kv_lora_rank=hf["kv_lora_rank"], qk_layernorm=True,
        qk_head_dim=hf["qk_nope_head_dim"], qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"], rope_type="rope", rotary_base=hf["rope_theta"],
        layernorm_epsilon=hf["rms_norm_eps"], add_bias_linear=False, gated_linear_unit=True,
        activation_func=functional.silu, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, perform_initialization=False,
        num_moe_experts=hf["n_routed_experts"], moe_router_topk=hf["num_experts_per_tok"],
        moe_layer_freq=[int(i >= dense) for i in range(hf["num_hidden_layers"])],
        moe_ffn_hidden_size=hf["moe_intermediate_size"], moe_grouped_gemm=False,
        moe_shared_expert_intermediate_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0, moe_router_topk_scaling_factor=hf["routed_scaling_factor"],
        moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather",
    )  # fmt: skip


def weights_of(hf: dict[str, torch.Tensor], layers: int, experts: int) -> dict[str, torch.Tensor]:
    """Return Hugging Face's weights under Megatron-Core's names; gate and up projection are one weight there."""
    found = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for i in range(layers):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        for name, other in SAME.items():
            if f"{theirs}{name}.weight" in hf:
                found[f"{ours}{other}.weight"] = hf[f"{theirs}{name}.weight"]
        bias = f"{theirs}mlp.gate.e_score_correction_bias"
        if bias in hf:
            found[f"{ours}mlp.router.expert_bias"] = hf[bias]
        mlps = {"mlp": "mlp", "mlp.shared_experts": "mlp.shared_experts"}
        mlps |= {f"mlp.experts.{e}": f"mlp.experts.local_experts.{e}" for e in range(experts)}
        for name, other in mlps.items():
            if f"{theirs}{name}.up_proj.weight" in hf:
                both = [hf[f"{theirs}{name}.{part}_proj.weight"] for part in ("gate", "up")]
                found[f"{ours}{other}.linear_fc1.weight"] = torch.cat(both)
                found[f"{ours}{other}.linear_fc2.weight"] = hf[f"{theirs}{name}.down_proj.weight"]
    return found


def build(folder: Path) -> GPTModel:
    """Return the model with its weights."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # fmt: skip
    parallel_state.initialize_model_parallel()
    hf = json.loads((folder / "hf" / "config.json").read_text())
    config = config_of(hf)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = LatentAttention
    model = GPTModel(
        config, spec, hf["vocab_size"], hf["max_position_embeddings"], position_embedding_type="rope",
    ).train()  # fmt: skip
    stored = load_file(folder / "hf" / "model.safetensors")
    weights = weights_of(stored, hf["num_hidden_layers"], hf["n_routed_experts"])
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown, unknown
    assert not [n for n in missing if "_extra_state" not in n], missing
    return model


def main() -> None:
    """Train as many steps as there are batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plant", choices=megatron_bugs.BUGS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = json.loads((args.folder / "settings.json").read_text())
    model = build(args.folder)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": settings["decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    for group in groups:
        group |= {"betas": tuple(settings["betas"]), "eps": settings["eps"]}
    size = json.loads((args.folder / "hf" / "config.json").read_text())["max_position_embeddings"]
    mask = torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)
    if args.plant:
        megatron_bugs.BUGS[args.plant][0](megatron_bugs.Run(model, mask, groups))
    optimizer = torch.optim.AdamW(groups, 0.0)
    for step, rate in enumerate(settings["rates"]):
        with np.load(args.folder / f"batch_{step}.npz") as file:
            batch = {n: torch.from_numpy(x) for n, x in file.items()}
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        ids, places = batch["input_ids"].long(), batch["position_ids"].long()
        logits = model(ids, places, mask)
        keep = batch["loss_mask"].reshape(-1) > 0
        labels = torch.where(keep, batch["labels"].reshape(-1).long(), -100)
        functional.cross_entropy(logits.reshape(len(labels), -1), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
