"""Read `layout_sweeps.csv`: many layouts of one model on one cluster, each with its time or that it ran out of memory."""

import re
from typing import get_args

from benchmarks.plan_published.cells import (
    Fields,
    int_of,
    is_true,
    number_of,
)
from benchmarks.plan_published.models import published
from benchmarks.plan_published.words import PRECISION, WordError, meaning, recompute_of
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.layout import STACK, Layout, ScheduleName, Stack
from telechat_moe.tools.plan.cost.score import MeasuredStep
from telechat_moe.units import GIB

SWITCHES = frozenset(STACK) - {"input_bytes", "permute_bytes"}
"""Words of the column `stack` that turn something on."""


def sweep(row: Fields, table: str, line: int) -> MeasuredStep:
    """Return a row; its group is the model on one cluster with one set of kernels."""
    architecture = _architecture(row)
    layout = Layout(
        dp=int_of(row, "dp"), tp=int_of(row, "tp"), pp=int_of(row, "pp"), vpp=int_of(row, "vpp"), cp=int_of(row, "cp"),
        ep=int_of(row, "ep"), zero=int_of(row, "zero", 0), fsdp=is_true(row, "fsdp"),  # type: ignore[arg-type]
        micro_batch=int_of(row, "micro_batch"), micro_batches=int_of(row, "micro_batches"),
        sequence_parallel=is_true(row, "sequence_parallel"), recompute=recompute_of(row, "recompute"),
        schedule=meaning(row, "schedule", {name: name for name in get_args(ScheduleName)}), compute=meaning(row, "compute", PRECISION),
        gradient_bytes=int_of(row, "gradient_bytes"), stack=stack(row["stack"]),
    )  # fmt: skip
    ended = is_true(row, "oom")
    memory = number_of(row, "memory_gib", 0.0) * GIB
    return MeasuredStep(
        table=f"{table}/{row['source']}", line=line, model=row["model"], device=row["device"],
        group=f"{table}/{row['group']}", architecture=architecture, layout=layout,
        step_s=number_of(row, "step_s") if row["step_s"] else None, memory_bytes=memory or None,
        out_of_memory=ended, source=row["source"],
    )  # fmt: skip


def stack(text: str) -> Stack:
    """Return the software that a cell such as `flash+fused in2 perm16` describes.

    Raises:
        WordError: A word is not known.
    """
    match = re.fullmatch(r"(\S*) in([12]) perm(8|16)", text.strip())
    words = set(match[1].split("+")) if match else {text}
    if match is None or not words <= SWITCHES:
        unknown = "+".join(sorted(words - SWITCHES)) or text
        raise WordError("stack", unknown, dict.fromkeys(sorted(SWITCHES)))
    switches = {name: name in words for name in SWITCHES}
    return Stack(input_bytes=int(match[2]), permute_bytes=int(match[3]), **switches)


def _architecture(row: Fields) -> Architecture:
    """Return the published architecture of that name and size, or a LLaMA of the row's widths."""
    layers, experts, seq = int_of(row, "layers"), int_of(row, "experts", 0), int_of(row, "seq")
    size = (int_of(row, "hidden"), layers, experts)
    named = published(row["model"], seq=seq)
    if named and (named.hidden, len(named.layers), named.experts) == size:
        return named
    dense = int_of(row, "dense_layers", 0) if experts else layers
    return Architecture(
        name=row["model"], hidden=size[0], layers=("dense",) * dense + ("moe",) * (layers - dense),
        heads=int_of(row, "heads"), kv_heads=int_of(row, "kv_heads"), ffn=int_of(row, "ffn"), vocab=int_of(row, "vocab"),
        seq=seq, experts=experts, top_k=int_of(row, "top_k", 0), moe_ffn=int_of(row, "moe_ffn", 0),
        shared_experts=int_of(row, "shared_experts", 0), mtp=int_of(row, "mtp", 0),
    )  # fmt: skip
