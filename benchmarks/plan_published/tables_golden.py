"""Megatron-LM's functional tests as rows."""

import math
import re
from dataclasses import replace

from benchmarks.plan_published.cells import (
    MOST,
    Fields,
    MissingError,
    int_of,
    is_true,
    new_row,
    number_of,
)
from benchmarks.plan_published.words import PRECISION, dispatcher_of, meaning, recompute_of
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.layout import Layout, Stack
from telechat_moe.tools.plan.cost.score import MeasuredStep

FAMILY = {
    "gpt": "", "gpt-nemo": "", "moe": "", "mixtral": "", "bert": "",
    "t5": "num-layers of encoder and decoder, seq-length",
    "hybrid": "which layers are Mamba's",
    "nemotron": "which layers are Mamba's",
    "mimo": "a term for the encoder of a multimodal model",
    "multimodal-llava": "a term for the encoder of a multimodal model",
}  # fmt: skip
"""Families of functional tests, and what their rows lack for a prediction."""

OPTIMIZER = {"": True, "adam": True, "muon": False, "dist_muon": False, "sgd": False}
"""Whether an optimizer keeps what `Layout.optimizer_bytes` counts."""

SHARDING = {"": 0, "no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""`zero` of Megatron-LM's FSDP."""

FUSED = {"": True, "auto": True, "flash": True, "fused": True, "unfused": False, "local": False}
"""Whether an attention backend keeps no scores in memory."""

IMPLEMENTATION = {"": True, "transformer_engine": True, "local": False}


def _string(text: str, layers: int, chunks: int) -> tuple[int, ...] | None:
    """Return decoder layers of each chunk from Megatron-LM's string such as `Et*3|(tt|)*6tmL`; None: there is none.

    Raises:
        MissingError: The string does not hold the model's layers or chunks.
    """
    if not text:
        return None
    plain = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), text[:200].strip("'\""))
    plain = re.sub(r"([A-Za-z])\*(\d+)", lambda m: m[1] * min(int(m[2]), MOST), plain)
    counts = tuple(chunk.count("t") for chunk in plain.split("|"))
    if len(counts) != chunks or sum(counts) != layers:
        raise MissingError(f"a pipeline layout of {layers} layers in {chunks} chunks, not {text}")
    return counts


def golden(row: Fields, table: str, line: int) -> MeasuredStep:
    """Megatron-LM functional tests: last rank's peak memory; time where the model is not a toy."""
    case, hardware = row["case"], row["hw"]
    found = re.search(r"(gb200|h100|a100)", hardware)
    device = found.group(1) if found else "a100"
    start = new_row(
        table,
        line,
        case,
        device,
        row["family"],
        memory_bytes=number_of(row, "mem_max_alloc_bytes", 0) or None,
    )
    if lacks := _lacks(row):
        return replace(start, reason=f"missing: {lacks}")
    hidden, layers, heads = (
        int_of(row, k) for k in ("hidden-size", "num-layers", "num-attention-heads")
    )
    seq, tp = int_of(row, "seq-length"), int_of(row, "tensor-model-parallel-size", 1)
    pp = int_of(row, "pipeline-model-parallel-size", 1)
    swiglu = is_true(row, "swiglu")
    bert = row["family"] == "bert"
    vocab = int_of(row, "vocab-size", 30522 if bert else 50257)
    vocab = -(-vocab // (128 * tp)) * 128 * tp
    experts = int_of(row, "num-experts", 0)
    if is_true(row, "multi-latent-attention"):
        return replace(start, reason="missing: q-lora-rank, kv-lora-rank and head widths of MLA")
    ffn = int_of(row, "ffn-hidden-size", 4 * hidden)
    architecture = Architecture(
        name=case, hidden=hidden, layers=("moe" if experts else "dense",) * layers,
        heads=heads, kv_heads=int_of(row, "num-query-groups", heads), ffn=ffn,
        gated=swiglu, experts=experts, top_k=int_of(row, "moe-router-topk", 2 if experts else 0),
        moe_ffn=int_of(row, "moe-ffn-hidden-size", ffn) if experts else 0, vocab=vocab,
        tied=not is_true(row, "untie-embeddings-and-output-weights"), seq=seq, positions=seq, biases=not swiglu,
        pair_share=float(bert),
    )  # fmt: skip
    layout = _layout(row, layers, bool(experts))
    # no time without data-parallel size and global batch
    return replace(start, architecture=architecture, layout=layout, memory_stage=pp - 1)


def _lacks(row: Fields) -> str:
    """Return what a row does not give of what it trains; empty: nothing."""
    if lacks := meaning(row, "family", FAMILY):
        return lacks
    if not meaning(row, "optimizer", OPTIMIZER):
        return "the optimizer's states"
    if is_true(row, "perform-rl-step"):
        return "lengths of the rollouts"
    return "the teacher's model" if row["export-kd-teacher-load"] else ""


def _recompute(row: Fields, layers: int, chunks: int) -> tuple[str, tuple[int, ...] | None]:
    """Return the policy and, for the method `block`, the layers of each chunk."""
    policy = meaning(
        row, "recompute-granularity", {"": "none", "selective": "selective", "full": "full"}
    )
    block = meaning(row, "recompute-method", {"": False, "uniform": False, "block": True})
    if policy == "selective" and row["recompute-modules"]:
        policy = recompute_of(row, "recompute-modules")
    if policy == "full" and block:
        return policy, (min(int_of(row, "recompute-num-layers"), layers // chunks),) * chunks
    return policy, None


def _layout(row: Fields, layers: int, experts: bool) -> Layout:
    tp, pp = (
        int_of(row, "tensor-model-parallel-size", 1),
        int_of(row, "pipeline-model-parallel-size", 1),
    )
    cp, micro = int_of(row, "context-parallel-size", 1), int_of(row, "micro-batch-size")
    ep, etp = int_of(row, "expert-model-parallel-size", 1), 1
    if experts:
        etp = int_of(row, "expert-tensor-parallel-size", tp)  # Megatron-LM's default
    gpus = int_of(row, "gpus", 8)  # at least what a stage needs
    dp = min(max(gpus // (tp * pp * cp), 1), max(int_of(row, "global-batch-size") // micro, 1))
    dp *= ep * etp // math.gcd(ep * etp, dp * tp * cp)
    chunks = int_of(row, "num-layers-per-virtual-pipeline-stage", 0)
    vpp = (
        layers // pp // chunks
        if chunks and pp > 1
        else int_of(row, "num-virtual-stages-per-pipeline-rank", 1)
    )
    # Transformer Engine of the LTS image has no deterministic flash attention; what dracooci recorded later names its backend
    plain = "dracooci" in row["hw"] and cp == 1 and not row["attention-backend"]
    deterministic = not is_true(row, "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    flash = meaning(row, "attention-backend", FUSED) and meaning(
        row, "transformer-impl", IMPLEMENTATION
    )
    copies = int_of(row, "num-distributed-optimizer-instances", 1)
    recompute, counts = _recompute(row, layers, pp * vpp)
    return Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, sequence_parallel=is_true(row, "sequence-parallel"),
        opt_shards=max(dp * cp // copies, 1) if copies > 1 else 0, recompute=recompute, recompute_layers=counts,
        ep=ep, etp=etp, chunks=_string(row["pipeline-model-parallel-layout"], layers, pp * vpp),
        zero=(meaning(row, "data-parallel-sharding-strategy", SHARDING)  # type: ignore[arg-type]
              or int(is_true(row, "use-distributed-optimizer"))),
        micro_batch=micro, micro_batches=max(int_of(row, "global-batch-size") // (dp * micro), 1),
        stack=Stack(flash=flash and not (plain and deterministic)),
        schedule="interleaved" if vpp > 1 else "1f1b",
        compute=meaning(row, "fp8-format", {"": "bf16"} | PRECISION),
    ).with_changes(**dispatcher_of(row, "moe-token-dispatcher-type"))  # fmt: skip
