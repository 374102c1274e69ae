"""Losses and gradients of MindFormers' own TeleChat3-MoE class and of ours, from the same weights and batch.

``python upstream_values.py FOLDER CASE [CASE ...]`` prints one JSON line a case; FOLDER takes MindFormers' files.
MindFormers' classes run unchanged, in graph mode, with the backends of upstream_backends.py.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")  # before mindspore is imported

import mindspore as ms
import numpy as np
import yaml
from mindspore import Tensor
from upstream_backends import replaced

from telechat_moe.interop import upstream_names
from telechat_moe.interop.mindformers_dryrun import sections_of
from telechat_moe.model import CausalLM
from telechat_moe.ops import select
from telechat_moe.recipe import ModelConfig, load

RECIPE = "telechat3_moe/pretrain_tiny.yaml"
LENGTH, VOCABULARY, PAD = 16, 96, 0
DIMENSIONS: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "moe_aux_loss_coeff": 0.01,
    "use_flash_attention": True,
    "hidden_act": "fusedswiglu",
}
OF_105B = {"routed_scaling_factor": 2.8, "num_experts_per_tok": 4, "n_routed_experts": 12}

# Settings for both, for ours only and for upstream's only; and of the batch.
CASES: dict[str, dict[str, Any]] = {
    "as the 105B recipe": {"both": OF_105B},
    "two sequences": {"rows": 2, "ours": {"moe_router_load_balancing_type": "aux_loss"}},
    "parts of sequences": {
        "rows": 2,
        "both": {"moe_router_load_balancing_type": "sub_seq_aux_loss"},
    },
    "third micro-batch of a step": {
        "rows": 2,
        "before": 2,
        "both": {"moe_router_load_balancing_type": "gbs_aux_loss"},
    },
    "other layouts": {
        "rows": 1,
        "both": {
            "mla_qkv_concat": True,
            "use_interleaved_weight_layout_mlp": False,
            "hidden_act": "silu",
        },
    },
    "no compressed query, no latent norms": {"both": {"q_lora_rank": None, "qk_layernorm": False}},
    "groups of experts": {
        "both": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_routed_experts": 16}
    },
    "compressed mask": {"length": 2048, "both": {"use_attn_mask_compression": True}},
    # What differs by construction.
    "two sequences, loss over each": {"rows": 2},
    "last label known": {"last_label": True},
    "a token that is the padding": {"pad_token": True},
    "scores scaled": {"upstream": {"rotary_scaling_factor": None}},
}


def sections(case: dict[str, Any], mine: bool) -> dict[str, Any]:
    """Return the sections of the case's recipe, for upstream's class or for ours."""
    length, rows = case.get("length", LENGTH), case.get("rows", 1)
    keys = {**DIMENSIONS, "batch_size": rows, **case.get("both", {})}
    keys |= {"seq_length": length, "max_position_embeddings": length}
    given = [f"model.model_config.{key}={json.dumps(value)}" for key, value in keys.items()]
    given += [
        "trainer.type=CausalLanguageModelingTrainer",
        "trainer.auto_register=null",
        f"train_dataset.data_loader.config.seq_length={length}",
        f"runner_config.batch_size={rows}",
    ]
    if mine:
        given += [
            f"model.model_config.{k}={json.dumps(v)}" for k, v in case.get("ours", {}).items()
        ]
        return {"overrides": given}
    _, found = sections_of(RECIPE, given)
    return found


def our_config(case: dict[str, Any]) -> ModelConfig:
    """Return the model section of ours."""
    return load(RECIPE, sections(case, mine=True)["overrides"]).model_config


def upstream_model(case: dict[str, Any], config: ModelConfig, folder: Path) -> Any:
    """Return MindFormers' model, built from a recipe by its own configuration, context and classes."""
    given = sections(case, mine=False)
    given.pop("telechat_moe")
    keys = (
        given["model"]["model_config"] | upstream_names.settings(config) | case.get("upstream", {})
    )
    given["model"]["model_config"] = {
        k: v for k, v in keys.items() if v is not None or k == "q_lora_rank"
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(given))
    from mindformers import MindFormerConfig
    from mindformers.core.context import build_context
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models.telechat3_moe import TeleChat3MoeConfig, TeleChat3MoeForCausalLM

    read = MindFormerConfig(str(folder / "recipe.yaml"))
    ms.runtime.set_cpu_affinity = lambda *args, **kwargs: None
    build_context(read)
    build_parallel_config(read)
    return TeleChat3MoeForCausalLM(TeleChat3MoeConfig(**read.model.model_config))


def random_weights(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Return numbers that no default could be mistaken for, for every weight and bias of ours."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, parameter in sorted(model.parameters_and_names()):
        if name.endswith((".expert_load", ".dropped")):
            continue
        value = rng.standard_normal(parameter.shape)
        if name.endswith("expert_bias"):
            value = 0.2 * np.abs(value)
        elif value.ndim == 1:
            value = 1 + 0.2 * value
        else:
            value *= 0.3 if name.endswith("router.weight") else 0.1
        weights[name] = value.astype(np.float32)
    return weights


def batch_of(case: dict[str, Any], seed: int = 3) -> list[np.ndarray]:
    """Return ids, labels, loss mask and positions; some labels do not count."""
    rows, length = case.get("rows", 1), case.get("length", LENGTH)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCABULARY, (rows, length + 1)).astype(np.int32)
    if case.get("pad_token"):
        tokens[0, 5] = PAD
    labels = tokens[:, 1:].copy()
    if not case.get("last_label"):
        labels[:, -1] = 0  # upstream's MTP layer reads 0 there
    mask = np.ones((rows, length), np.float32)
    mask[0, 3:5] = 0
    position = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return [tokens[:, :-1].copy(), labels, mask, position]


def run(
    model: Any, batch: list[np.ndarray], before: list[list[np.ndarray]]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return ``(lm, mtp, aux)`` and the gradients of their sum by name; micro-batches ``before`` are of the same step."""
    trained = model.trainable_params()

    def total(ids: Tensor, labels: Tensor, mask: Tensor, position: Tensor) -> Any:
        losses = model(input_ids=ids, labels=labels, loss_mask=mask, position_ids=position)
        return (losses[0] + losses[1] + losses[2]).sum(), losses

    grad = ms.value_and_grad(total, None, trained, has_aux=True)
    for other in before:
        grad(*[Tensor(a) for a in other])
    (_, losses), gradients = grad(*[Tensor(a) for a in batch])
    named = {p.name: g.asnumpy().copy() for p, g in zip(trained, gradients, strict=True)}
    return [float(x.asnumpy()[0]) for x in losses[:3]], named


def routers(model: Any, what: str) -> list[list[float]]:
    """Return a state of all routers, in the order of layers."""
    found = [(n, p) for n, p in model.parameters_and_names() if n.endswith(f"router.{what}")]
    return [
        p.asnumpy().copy().tolist() for _, p in sorted(found, key=lambda pair: "mtp" in pair[0])
    ]


def compare(name: str, folder: Path) -> dict[str, Any]:
    """Return losses of both, relative differences of all gradients, and loads of experts."""
    case = CASES[name]
    config = our_config(case)
    with select.using("plain"):
        ours = CausalLM(config)
    ours.set_train()
    weights = random_weights(ours, seed=1)
    for parameter in ours.get_parameters():
        if parameter.name in weights:
            parameter.set_data(Tensor(weights[parameter.name]))
    batch, before = batch_of(case), [batch_of(case, 10 + i) for i in range(case.get("before", 0))]
    our_losses, our_gradients = run(ours, batch, before)
    with replaced() as backends:
        model = upstream_model(case, config, folder)
        model.set_train()
        own = {p.name: p for p in model.get_parameters()}
        for key, value in upstream_names.to_upstream(weights, config).items():
            own[key].set_data(Tensor(value))
        losses, gradients = run(model, batch, before)
        loads = routers(model, "expert_load")
        model.update_topk_bias(1 + len(before))
        bias = routers(model, "expert_bias")
    biases = {
        p.upstream: np.zeros(p.shape) for p in upstream_names.pairs(config) if not p.is_trained
    }
    theirs = upstream_names.to_ours({**gradients, **biases}, config)
    return {
        "case": name,
        "ours": our_losses,
        "upstream": losses,
        "gradients": {
            key: float(np.abs(theirs[key] - value).max() / np.abs(value).max())
            for key, value in our_gradients.items()
        },
        "loads": {"ours": routers(ours, "expert_load"), "upstream": loads},
        "bias": {"before": routers(ours, "expert_bias"), "upstream": bias},
        "rate": config.moe_router_bias_update_rate,
        "chosen": config.num_experts_per_tok * batch[0].size,
        "backends": sorted(backends),
    }


def main() -> None:
    """Run the cases named on the command line."""
    folder = Path(sys.argv[1]).resolve()
    results, sys.stdout = sys.stdout, sys.stderr  # MindFormers logs to standard output
    os.chdir(folder)
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    for name in sys.argv[2:]:
        print(json.dumps(compare(name, folder)), file=results, flush=True)


if __name__ == "__main__":
    main()
