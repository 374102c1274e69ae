"""Published sets in YAML: paper and README tables whose rows name their fields with a few words in common.

A row is read by those words (`gpus`, `tp`, `pp`, `gbs`, `mbs`, `seq`, `step`, `ms`, `tps` ...) and by the set's `common`
block; nothing is assumed for a layout field that neither gives.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.plan_published.cells import MOST, UNREADABLE, MissingError, or_reason, unreadable
from benchmarks.plan_published.models import checked_kind, published
from benchmarks.plan_published.partial_steps import PARTS
from benchmarks.plan_published.words import (
    PRECISION,
    WordError,
    dispatcher_of,
    meaning,
    recompute_of,
)
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.flops import hardware_flops, model_flops
from telechat_moe.tools.plan.cost.layout import Compute, Layout, Stack
from telechat_moe.tools.plan.cost.score import MeasuredStep
from telechat_moe.units import GIB

TITAN = {
    "": "none", "none": "none", "full": "full+early_stop", "selective": "save_half", "per_op_sac": "save_half",
}  # fmt: skip
"""What torchtitan's activation checkpointing recomputes."""

TITAN_CHUNKS = {"": 1, "1f1b": 1, "interleaved1f1b": 2, "interleaved_zero_bubble": 2}
"""Chunks of a stage by torchtitan's schedules."""


def _first(row: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    if default is None:
        raise MissingError(keys[0])
    return default


def _device(row: Mapping[str, Any], name: str) -> str:
    given = str(row.get("device") or row.get("hw") or row.get("gpu") or "")
    if given:
        return given
    if name.startswith("torchtitan"):
        return "h100-96gb"
    found = re.search(r"(gb200|gb300|b200|b300|h200|a100|h100|h800|v100)", name.lower())
    return found[0] if found else ""


def read_sets(path: Path) -> list[MeasuredStep]:
    """Read a file with `sets`.

    Raises:
        BadInputError: It has none.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"{path}: not a YAML file in UTF-8 ({str(error)[:80]})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("sets"), list):
        raise BadInputError(f"{path}: expected a mapping with `sets`, a list")
    rows: list[MeasuredStep] = []
    for number, entry in enumerate(raw["sets"], start=1):
        if not isinstance(entry, dict) or not entry.get("id"):
            raise BadInputError(f"{path}: set {number} has no `id`")
        rows += list(_set(entry, path, number))
    return rows


def _line(path: Path, number: int, row: int) -> int:
    """Return the line of a set's row; sets and rows are counted from 1."""
    node: Any = yaml.compose(path.read_text(encoding="utf-8"))
    for key, index in (("sets", number), ("rows", row)):
        node = next(value for name, value in node.value if name.value == key).value[index - 1]
    return node.start_mark.line + 1


def _set(entry: Mapping[str, Any], path: Path, order: int) -> Iterator[MeasuredStep]:
    """Yield the rows of a file's set number `order`."""
    name, grade = str(entry["id"]), str(entry.get("prov", "?"))
    table = f"published_steps/{name}"
    common = entry.get("common") or {}
    if name in PARTS:
        return
    bare = MeasuredStep(table=table, line=0, model="", device="", group=table, provenance=grade)
    if not isinstance(entry.get("rows"), list):
        yield replace(bare, reason="missing: steps (the set has no rows with a time)")
        return
    for number, given in enumerate(entry["rows"], start=1):
        try:
            variants = list(_variants({**common, **given}, name))
        except UNREADABLE as error:
            yield replace(bare, line=number, reason=unreadable("row", error))
            continue
        for variant in variants:
            try:
                yield replace(_row(variant, table, name, number), provenance=grade)
            except WordError as error:
                line = _line(path, order, number)
                raise BadInputError(f"{path}:{line}: set {name}, row {number}: {error}") from None


def _variants(row: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield one row for each measurement of a line."""
    words = ("v100_ms_b8", "a100_ms_b16", "a100_dp128_b2048")
    if not any(word in row for word in words):
        if "tps_vanilla" in row:
            yield {**row, "tps": row["tps_vanilla"], "async_tp": 0}
            yield {**row, "tps": row["tps_async"], "async_tp": 1}
        else:
            yield row
        return
    # Megatron-LM 2020: batch 8 or 16 on one model-parallel group, and 2048 over 128 of them
    base = {**row, "seq": 1024, "recompute": "full", "vocab": 51200, "pp": 1, "old": True}
    tp = int(row["tp"])
    yield {**base, "device": "v100", "gpus": tp, "gbs": 8, "mbs": 8, "ms": row.get("v100_ms_b8")}
    yield {**base, "device": "a100", "gpus": tp, "gbs": 16, "mbs": 16, "ms": row.get("a100_ms_b16")}
    wide = row.get("a100_dp128_b2048") or {}
    yield {**base, **wide, "device": "a100", "gbs": 2048, "mbs": 16}


def _row(row: dict[str, Any], table: str, name: str, number: int) -> MeasuredStep:
    model, device = str(row.get("model", "")), _device(row, name)
    gpus = row.get("gpus") or row.get("devices") or row.get("npus") or "?"
    start = MeasuredStep(
        table=table, line=number, model=model, device=device, group=f"{table}/{model}/{gpus}",
        source=str(row.get("src", "")),
    )  # fmt: skip

    def read() -> MeasuredStep:
        architecture = _architecture(row, model)
        layout = _layout(row, architecture)
        return replace(
            start,
            architecture=architecture,
            layout=layout,
            step_s=_step(row, architecture, layout),
            memory_bytes=float(row["mem"]) * GIB if row.get("mem") else None,
        )

    return or_reason(start, read)


def _architecture(row: Mapping[str, Any], model: str) -> Architecture:
    if float(row.get("layers") or 0) > MOST:
        raise MissingError(f"layers: {row['layers']} is out of range")
    if row.get("hidden") and row.get("layers") and row.get("heads") and not row.get("experts"):
        checked_kind(model, None, 0)
        return Architecture(
            name=model, hidden=int(row["hidden"]), layers=("dense",) * int(row["layers"]), heads=int(row["heads"]),
            kv_heads=int(row.get("kv", 0)), ffn=int(row.get("ffn") or row.get("inter") or 0),
            seq=int(_first(row, "seq")), vocab=int(_first(row, "vocab", default=51200)), tied=True, biases=True,
            gated=bool(row.get("kv")),
        )  # fmt: skip
    found = published(model, seq=int(_first(row, "seq")))
    if found is None:
        raise MissingError(f"architecture of {model}")
    return found


def _layout(row: Mapping[str, Any], a: Architecture) -> Layout:
    titan = "ac" in row or "fsdp" in row
    tp, pp, cp = (int(row.get(k) or 1) for k in ("tp", "pp", "cp"))
    gpus = int(_first(row, "gpus", "devices", "npus"))
    if not titan:
        _first(row, "tp")
        _first(row, "pp")
    if gpus % (tp * pp * cp):
        raise MissingError(f"gpus: {gpus} is not a multiple of tp x pp x cp = {tp * pp * cp}")
    dp = gpus // (tp * pp * cp)
    default: Compute = "fp8" if row.get("fp8") else "bf16"
    compute = meaning(row, "precision", {"": default} | PRECISION)
    vpp = int(row.get("vpp") or row.get("vp") or 1)
    if titan:
        local = int(_first(row, "lbs"))
        micro, count = (1, local) if pp > 1 else (local, 1)
        recompute, vpp = meaning(row, "ac", TITAN), meaning(row, "schedule", TITAN_CHUNKS)
        return Layout(
            dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, zero=3 if pp == 1 else 2, fsdp=pp == 1, micro_batch=micro,
            micro_batches=count, recompute=recompute, compute=compute,
            sequence_parallel=tp > 1,
            schedule="interleaved" if vpp > 1 else "1f1b", parameter_bytes=4, optimizer_bytes=8,
            stack=Stack(
                fused=bool(row.get("compile")), fused_loss=False, tp_overlap=bool(row.get("async_tp")), cp_overlap=False,
                gathered=pp > 1,
            ),
        )  # fmt: skip
    batch, micro = int(_first(row, "gbs", "batch")), int(_first(row, "mbs", "micro_batch"))
    if batch % (dp * micro):
        raise MissingError(f"gbs: {batch} is not a multiple of dp x mbs = {dp * micro}")
    old = bool(row.get("old"))
    return Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=int(row.get("ep") or 1), micro_batch=micro,
        micro_batches=batch // (dp * micro), recompute=recompute_of(row, "recompute"), compute=compute,
        schedule="interleaved" if vpp > 1 else "1f1b", stack=Stack(flash=not old, fused=not old, fused_loss=not old, overlap=not old),
        sequence_parallel=bool(row.get("sp", not old)) and tp > 1, gradient_bytes=2 if old else 4,
        zero=0 if old else int(row.get("zero", 1)),  # type: ignore[arg-type]
    ).with_changes(**dispatcher_of(row, "dispatcher"))  # fmt: skip


def _step(row: Mapping[str, Any], a: Architecture, x: Layout) -> float:
    tokens = x.global_batch * a.seq
    for unit, keys in ((1.0, ("step", "step_s", "iter_s")), (1e-3, ("ms", "iter_ms"))):
        for key in keys:
            if row.get(key) is not None:
                return float(row[key]) * unit
    if row.get("tps") is not None:  # tokens/s of one device
        return tokens / (float(row["tps"]) * x.devices)
    if row.get("tok_s") is not None:
        return tokens / float(row["tok_s"])
    if row.get("tflops") is not None:  # Megatron-LM's count: all keys, recomputation included
        count = model_flops(a, keys=float(a.seq)).training
        if x.recompute == "full":
            count *= hardware_flops(a, x) / model_flops(a).training
        return tokens * count / (float(row["tflops"]) * 1e12 * x.devices)
    raise MissingError("step")
