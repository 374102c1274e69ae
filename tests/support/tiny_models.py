"""Small models for the tests: configurations, weights, batches, and a cell that differentiates."""

from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from safetensors.numpy import save_file

from telechat_moe.model import CausalLM, Logits
from telechat_moe.recipe import ModelConfig

Arrays = dict[str, np.ndarray]


def tiny_config(**changes) -> ModelConfig:
    """Return a model of 2 layers, one of them dense."""
    values = {
        "vocab_size": 96,
        "seq_length": 16,
        "max_position_embeddings": 32,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "qk_layernorm": True,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.1,
        "compute_dtype": "float32",
        "fp32_residual_connection": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
        "moe_router_load_balancing_type": "none",
    }
    return ModelConfig(**(values | changes))


def random_weights(model: nn.Cell, seed: int) -> Arrays:
    """Fill every parameter that is no counter with numbers that no default could be mistaken for."""
    rng = np.random.default_rng(seed)
    weights: Arrays = {}
    for name, p in model.parameters_and_names():
        if name.endswith((".expert_load", ".dropped")):
            continue
        value = rng.standard_normal(p.shape)
        if name.endswith("expert_bias"):
            value = 0.2 * np.abs(value)
        elif value.ndim == 1:
            value = 1 + 0.2 * value
        elif name.endswith("router.weight"):
            value *= 0.3
        else:
            value *= 0.1
        weights[name] = value.astype(np.float32)
        p.set_data(Tensor(weights[name]))
    return weights


@dataclass(frozen=True)
class Batch:
    """What the model reads."""

    input_ids: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    attention_mask: np.ndarray | None = None

    def tensors(self) -> list[Tensor]:
        """Return the arguments of the model."""
        arrays = [self.input_ids, self.labels, self.loss_mask, self.position_ids]
        if self.attention_mask is not None:
            arrays.append(self.attention_mask)
        return [Tensor(a) for a in arrays]


def random_batch(config: ModelConfig, seed: int, batch: int = 2, length: int = 16) -> Batch:
    """Return random tokens; the last label of a sequence does not count, as it has no next token."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab_size, (batch, length)).astype(np.int32)
    labels = np.concatenate([ids[:, 1:], np.zeros((batch, 1), np.int32)], 1)
    mask = np.ones((batch, length), np.float32)
    mask[:, -1] = 0
    position = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
    return Batch(ids, labels, mask, position)


class Probe(nn.Cell):
    """Losses, logits and the gradients of the sum of the losses.

    The logits come from a second pass, through which training mode counts expert loads once more.
    """

    def __init__(self, model: CausalLM, with_logits: bool = True):
        super().__init__(auto_prefix=False)
        self.model = model
        self.logits = Logits(model) if with_logits else None
        self.params = model.trainable_params()

        def total(*batch):
            lm, mtp, aux = model(*batch)[:3]
            return (lm + mtp + aux).sum(), (lm, mtp, aux)

        self.grad = ms.value_and_grad(total, None, self.params, has_aux=True)

    def construct(self, *batch):
        (_, losses), grads = self.grad(*batch)
        logits = losses[0] if self.logits is None else self.logits(batch[0], batch[3])
        return losses, logits, grads

    def run(self, batch: Batch) -> tuple[list[float], np.ndarray, Arrays]:
        """Return ``([lm, mtp, aux], logits_TV, gradients by name)``."""
        losses, logits, grads = self(*batch.tensors())
        named = {p.name: g.asnumpy().copy() for p, g in zip(self.params, grads, strict=True)}
        return [float(x.asnumpy()[0]) for x in losses], logits.asnumpy().copy(), named


def save_weights(path: Path, weights: Arrays) -> Path:
    """Write our weights as one safetensors file."""
    save_file(weights, path)
    return path
