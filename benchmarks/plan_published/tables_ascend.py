"""Tables of runs on Ascend: MindFormers and MindSpeed-LLM."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.plan_published.cells import (
    Fields,
    MissingError,
    divided,
    int_of,
    is_true,
    new_row,
    number_of,
)
from benchmarks.plan_published.models import checked_kind, published
from benchmarks.plan_published.words import dispatcher_of, meaning, recompute_of
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.layout import Layout, Stack
from telechat_moe.tools.plan.cost.score import MeasuredStep


def _listed(text: str) -> Any:
    """Return what a cell holds in YAML; of a list that may hold lists its numbers."""
    value = yaml.safe_load(text) if text else None
    if not isinstance(value, list):
        return value
    return [int(x) for entry in value for x in (entry if isinstance(entry, list) else [entry])]


SMALL_GB = 31
"""Gigabytes that a recipe for the Ascend 910 of 32 GB may use: gpt2_13b's table of the 910B links `run_gpt2_13b.yaml` (30 GB,
dp 4, tp 8), while `run_gpt2_13b_910b.yaml` (59 GB, dp 8, tp 1) is what that device runs."""


def mindformers(row: Fields, table: str, line: int) -> MeasuredStep:
    """MindFormers recipes on Ascend."""
    name = row["name"]
    device = row.get("hw") or "ascend-910b"
    devices = int_of(row, "devices", 0)
    start = new_row(
        table, line, name, device, devices, source=row.get("yaml") or row.get("doc") or ""
    )
    if row["phase"] not in ("finetune", "pretrain", "sft"):
        return replace(start, reason=f"missing: what {row['phase']} trains")
    if "ptuning" in name or "lora" in name:
        return replace(start, reason="missing: what a partial fine-tuning trains")
    if "a2" in device.lower() and 0 < number_of(row, "max_device_memory", 0) <= SMALL_GB:
        return replace(start, reason="missing: the layout on this device (the recipe is for 32 GB)")
    speed = number_of(row, "tok_s_device")
    known = published(name)
    experts = int_of(row, "expert_num", 1)
    checked_kind(name, known, experts)
    seq = int_of(row, "seq")
    known = known and replace(known, seq=seq)
    hidden, layers, heads = int_of(row, "hidden"), int_of(row, "layers"), int_of(row, "heads")
    inter = int_of(row, "inter", 0)
    kv = int_of(row, "kv_heads", known.kv_heads if known else heads)
    if known is not None and known.experts:
        architecture = known
    else:
        gpt = name.startswith("gpt")
        ffn = inter or (known.ffn if known else 0) or (4 * hidden if gpt else 0)
        if not ffn:
            raise MissingError("inter")
        vocab = int_of(row, "vocab", known.vocab if known else None)
        architecture = Architecture(
            name=name, hidden=hidden, layers=("dense",) * layers, heads=heads, kv_heads=kv, ffn=ffn, gated=not gpt,
            seq=seq, vocab=vocab,
        )  # fmt: skip
    dp, tp, pp, cp = (int_of(row, k, 1) for k in ("dp", "mp", "pp", "cp"))
    micro = int_of(row, "batch_per_dp")
    count = int_of(row, "micro_batch_num") if pp > 1 else int_of(row, "grad_accum", 1)
    count *= int_of(row, "micro_interleave", 1)
    vpp = max(int_of(row, "pp_interleave", 1), 1) if pp > 1 else 1
    recompute, again = _ascend_recompute(row, pp * vpp)
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=int_of(row, "ep", 1),
        sequence_parallel=is_true(row, "seq_parallel") and tp > 1, zero=1 if is_true(row, "opt_parallel") else 0,
        micro_batch=micro, micro_batches=count, recompute=recompute, recompute_layers=again,
        chunks=_offset(row.get("offset") or "", layers, pp * vpp),
        stack=Stack(flash=is_true(row, "flash"), graphs=True, fused_loss=False),
        schedule="interleaved" if vpp > 1 else "1f1b", compute="bf16", gradient_bytes=2, parameter_bytes=2,
    )  # fmt: skip
    tokens = layout.global_batch * seq
    return replace(
        start, architecture=architecture, layout=layout, step_s=tokens / (speed * layout.devices),
        memory_bytes=None,
    )  # fmt: skip


def _offset(text: str, layers: int, chunks: int) -> tuple[int, ...] | None:
    flat = _listed(text)
    if not isinstance(flat, list) or len(flat) != chunks:
        return None
    counts = tuple(layers // chunks + extra for extra in flat)
    return counts if sum(counts) == layers and min(counts) >= 0 else None


def _ascend_recompute(row: Fields, chunks: int) -> tuple[str, tuple[int, ...] | None]:
    """Return the policy and the layers of each chunk: `recompute` before `select_recompute`.

    Raises:
        WordError: A cell is neither yes, nor no, nor a list.
        MissingError: A list does not have a number for each chunk.
    """
    full, select = (_marks(row, column, chunks) for column in ("recompute", "select_recompute"))
    for policy, value in (("full", full), ("activation", select)):
        if value:
            return policy, value if isinstance(value, tuple) else None
    return "none", None


def _marks(row: Fields, column: str, chunks: int) -> bool | tuple[int, ...]:
    """Return whether a cell recomputes every layer, or how many of each chunk."""
    value = _listed(row[column]) if row[column].startswith("[") else None
    if not isinstance(value, list):
        return meaning(row, column, {"true": True, "false": False, "": False})
    if len(value) != chunks:
        raise MissingError(f"{column}: {len(value)} numbers for {chunks} chunks")
    return tuple(value)


def _mindspeed_recompute(row: Fields, chunks: int) -> tuple[str, tuple[int, ...] | None]:
    """Return the policy and, for the method `block`, the layers of each chunk."""
    if row["recompute"].strip().lower() == "full_block":
        return "full", (int_of(row, "recompute_layers"),) * chunks
    return recompute_of(row, "recompute"), None


def mindspeed(row: Fields, table: str, line: int) -> MeasuredStep:
    """MindSpeed-LLM launch scripts on Ascend 910B, and their reference on A100."""
    model = row["model"]
    reference = row["device"] in ("参考", "reference", "GPU", "GPUs")
    device = "a100" if reference else "ascend-910b"
    nodes, per_node = int_of(row, "nnodes", 0), int_of(row, "npus_per_node", 8)
    start = new_row(
        table, line, model, device, nodes * per_node, source=f"{row['tag']} {row['script']}"
    )
    if not row.get("script"):
        return replace(start, reason="missing: launch script (tp, pp, batch)")
    seq, micro, batch = int_of(row, "seq"), int_of(row, "mbs"), int_of(row, "gbs")
    tp, pp, cp = int_of(row, "tp"), int_of(row, "pp"), int_of(row, "cp", 1)
    key = Path(row["script"]).stem.removeprefix("pretrain_")
    known = published(model, seq=seq) or published(key, seq=seq)
    hidden, layers, heads = int_of(row, "hidden"), int_of(row, "layers"), int_of(row, "heads")
    if known is None:
        raise MissingError(f"vocabulary of {model}")
    checked_kind(model, known, int_of(row, "num_experts", 0))
    if known.experts:
        architecture = replace(known, seq=seq)
    else:
        architecture = Architecture(
            name=known.name, hidden=hidden, layers=("dense",) * layers, heads=heads, kv_heads=int_of(row, "kv", known.kv_heads),
            ffn=int_of(row, "ffn", known.ffn), gated=known.gated, seq=seq, window=known.window, vocab=known.vocab, tied=known.tied,
            head_dim=known.head_dim if known.hidden == hidden else hidden // heads, biases=known.biases,
        )  # fmt: skip
    gpus = nodes * per_node
    dp = divided(gpus, tp * pp * cp, "devices")
    per_chunk = int_of(row, "vpp_layers", 0)
    vpp = layers // pp // per_chunk if per_chunk and pp > 1 else 1
    speed = number_of(row, "tok_s_device")
    recompute, counts = _mindspeed_recompute(row, pp * vpp)
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=int_of(row, "ep", 1), sequence_parallel=is_true(row, "sp") and tp > 1,
        zero=1 if is_true(row, "distopt") else 0, micro_batch=micro,
        micro_batches=divided(batch, dp * micro, "gbs"), recompute=recompute, recompute_layers=counts,
        schedule="interleaved" if vpp > 1 else "1f1b", compute="bf16",
        stack=Stack(flash=is_true(row, "flash"), fused_loss=False),
    ).with_changes(**dispatcher_of(row, "dispatcher"))  # fmt: skip
    return replace(
        start, architecture=architecture, layout=layout, step_s=batch * seq / (speed * gpus)
    )
