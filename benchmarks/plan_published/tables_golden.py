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
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.layout import Layout, Stack
from telechat_moe.tools.plan.cost.score import MeasuredStep

NOT_GIVEN = {
    "t5": "num-layers of encoder and decoder, seq-length",
    "hybrid": "which layers are Mamba's",
    "nemotron": "which layers are Mamba's",
    "grpo": "lengths of the rollouts",
    "distill": "the teacher's model",
    "frozen": "which parameters are frozen",
    "muon": "the optimizer's states",
    "flextron": "the widths that are trained",
}
"""What functional tests of a family, or with a word in their name, do not print of their layout."""


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
    for word, what in NOT_GIVEN.items():
        if word in case or word == row["family"]:
            return replace(start, reason=f"missing: {what}")
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
    layout = _layout(row, case, hardware, layers, bool(experts))
    # no time without data-parallel size and global batch
    return replace(start, architecture=architecture, layout=layout, memory_stage=pp - 1)


def _layout(row: Fields, case: str, hardware: str, layers: int, experts: bool) -> Layout:
    tp, pp = (
        int_of(row, "tensor-model-parallel-size", 1),
        int_of(row, "pipeline-model-parallel-size", 1),
    )
    cp, micro = int_of(row, "context-parallel-size", 1), int_of(row, "micro-batch-size")
    ep, etp = int_of(row, "expert-model-parallel-size", 1), 1
    if experts:
        etp = int_of(row, "expert-tensor-parallel-size", tp)  # Megatron-LM's default
    # the table does not say how many devices a test ran on: a node of GB200, two of them, or a node of 8; at least what it needs
    gpus = 4 if "gb200" in hardware and "1node" in case else 8
    dp = min(max(gpus // (tp * pp * cp), 1), max(int_of(row, "global-batch-size") // micro, 1))
    dp *= ep * etp // math.gcd(ep * etp, dp * tp * cp)
    chunks = int_of(row, "num-layers-per-virtual-pipeline-stage", 0)
    vpp = (
        layers // pp // chunks
        if chunks and pp > 1
        else int_of(row, "num-virtual-stages-per-pipeline-rank", 1)
    )
    backend = row.get("attention-backend") or ""
    earlier = "dracooci" in hardware and cp == 1 and not backend and "reshard" not in case
    local = backend in ("unfused", "local") or row.get("transformer-impl") == "local"
    flash = (
        not local and not earlier
    )  # those on dracooci were recorded before flash was the default
    return Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, sequence_parallel=is_true(row, "sequence-parallel"),
        opt_shards=max(dp * cp // 2, 1) if "multi_dist_optimizer" in case else 0,  # two copies of the optimizer
        ep=ep, etp=etp, chunks=_string(row["pipeline-model-parallel-layout"], layers, pp * vpp),
        zero=(3 if row.get("data-parallel-sharding-strategy") == "optim_grads_params" else
              1 if is_true(row, "use-distributed-optimizer") else 0),
        micro_batch=micro, micro_batches=max(int_of(row, "global-batch-size") // (dp * micro), 1),
        stack=Stack(flash=flash),
        schedule="interleaved" if vpp > 1 else "1f1b",
        compute="bf16",
    )  # fmt: skip
