"""Megatron-Core's GPT with a MoE layer on CPU, split over tensor or expert ranks; see msprobe_runs.py.

Needs megatron-core (0.16.1 was run) without Transformer Engine: its own layers, experts one after another.
"""

import zlib
from contextlib import nullcontext
from typing import Any

import torch

VOCABULARY, HIDDEN, EXPERTS = 96, 32, 4
_SIZES = {  # dimension that ranks share, and its size in the whole weight
    "word_embeddings.weight": (0, VOCABULARY),
    "output_layer.weight": (0, VOCABULARY),
    "linear_qkv.weight": (0, 64),
    "linear_proj.weight": (1, HIDDEN),
}


class _Stream:
    """The only stream of a processor; all that is asked of it has happened."""

    def record_event(self) -> "_Stream":
        """Return an event."""
        return self

    def synchronize(self) -> None:
        """Wait for nothing."""


_STREAM = _Stream()


def build(layout: str, batches: int) -> tuple[Any, list[dict[str, Any]]]:
    """Return the model of this rank and the batches, the same for every layout.

    Args:
        layout: ``tp``, ``ep`` (experts over ranks by all-gather) or ``a2a`` (by all-to-all, with auxiliary losses).
    """
    # Megatron-Core asks for devices, and for Transformer Engine, also where it needs neither.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda: _STREAM  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.stream = lambda _: nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _STREAM
    moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # nothing is random here
    ranks = torch.distributed.get_world_size()
    tensor, expert = (ranks, 1) if layout == "tp" else (1, ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,  # else each token comes twice, without sequence parallelism
    )
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2,
        add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        apply_rope_fusion=False, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        num_moe_experts=EXPERTS, moe_router_topk=2, moe_layer_freq=[0, 1], moe_ffn_hidden_size=24,
        moe_grouped_gemm=False, normalization="RMSNorm",
        moe_token_dispatcher_type="alltoall" if layout == "a2a" else "allgather",
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"] if layout == "a2a" else "none",
        moe_aux_loss_coeff=[0.1, 0.05] if layout == "a2a" else 0.0,
        tensor_model_parallel_size=tensor, expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, VOCABULARY, 64, position_embedding_type="rope").train()
    # It wants sequence parallelism beside tensor parallelism, which torch's norms cannot do.
    model.decoder.layers[1].mlp.training = False
    rank = torch.distributed.get_rank()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(_weight(name, parameter, rank, layout))
    torch.manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (batches, 2, 16))
    return _Model(model, expert), [{"tokens": t} for t in tokens]


class _Model(torch.nn.Module):
    def __init__(self, model: Any, expert_ranks: int) -> None:
        super().__init__()
        self.model, self.expert_ranks = model, expert_ranks
        self.expert_scale = 1 / expert_ranks  # each expert has the tokens of all ranks
        self.mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)

    def forward(self, tokens: Any) -> Any:
        positions = torch.arange(16).expand(2, 16)
        losses = self.model(tokens, positions, self.mask, labels=tokens.roll(-1, 1))
        return type("Output", (), {"loss": losses.mean()})()

    def reduce_gradients(self) -> None:
        """Reduce the gradients over data ranks, which are the expert ranks, as Megatron's DDP does."""
        for name, parameter in self.named_parameters() if self.expert_ranks > 1 else ():
            if "local_experts" in name:
                parameter.grad.mul_(self.expert_scale)  # pyright: ignore[reportOptionalMemberAccess]
            else:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad.div_(self.expert_ranks)  # pyright: ignore[reportOptionalMemberAccess]


def _weight(name: str, parameter: Any, rank: int, layout: str) -> Any:
    """Return the shard of a weight whose whole is the same for every layout."""
    *path, last = name.split(".")
    if layout != "tp" and "local_experts" in path:
        i = path.index("local_experts") + 1
        count = EXPERTS // torch.distributed.get_world_size()
        path[i] = str(int(path[i]) + rank * count)
    dimension, size = _SIZES.get(".".join([path[-1], last]), (0, parameter.shape[0]))
    width = 24 if "local_experts" in path else 64
    if path[-1] == "linear_fc1" or path[-1] == "linear_fc2":
        dimension, size = 1, width
    shape = list(parameter.shape)
    if path[-1] == "linear_fc1":  # gate and up
        shape = [2, shape[0] // 2, shape[1]]
    wide = [size if d == dimension else n for d, n in enumerate(shape)]
    generator = torch.Generator().manual_seed(zlib.crc32(".".join([*path, last]).encode()))
    whole = 0.15 * torch.randn(wide, generator=generator) + (parameter.ndim == 1)
    parts = size // shape[dimension]
    return whole.chunk(parts, dimension)[rank if parts > 1 else 0].reshape(parameter.shape)
