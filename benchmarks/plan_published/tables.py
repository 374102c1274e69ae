"""Published measurements as rows: architecture, layout, device and what was measured.

A table is recognised by its columns, so that other parts of the same tables are read alike. A row that cannot be
predicted keeps the reason: a layout field that is missing, a device without a description, or an impossible figure
(`validate.py`).
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.plan_published.cells import (
    Cells,
    Fields,
    MissingError,
    divided,
    int_of,
    is_true,
    new_row,
    number_of,
    or_reason,
)
from benchmarks.plan_published.models import checked_kind, published
from benchmarks.plan_published.tables_ascend import mindformers, mindspeed
from benchmarks.plan_published.tables_golden import golden
from benchmarks.plan_published.tables_sweeps import sweep
from benchmarks.plan_published.tables_yaml import read_sets
from benchmarks.plan_published.words import (
    PRECISION,
    WordError,
    dispatcher_of,
    meaning,
    recompute_of,
)
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.layout import Layout, Stack
from telechat_moe.tools.plan.cost.measured_steps import read_csv
from telechat_moe.tools.plan.cost.score import MeasuredStep


def _vtrain(row: Fields, table: str, line: int) -> MeasuredStep:
    """Megatron-DeepSpeed: GPT, fp16, full recomputation, unfused attention, reduction after the backward pass."""
    hidden, layers = int_of(row, "hidden size"), int_of(row, "# layers")
    heads, seq = int_of(row, "attention heads"), int_of(row, "sequence length")
    dp, tp, pp = (int_of(row, f"{w} parallelism") for w in ("data", "tensor", "pipeline"))
    micro = int_of(row, "micro batch")
    vocab = -(-50257 // (128 * tp)) * 128 * tp
    architecture = Architecture(
        name=f"GPT {hidden}x{layers}", hidden=hidden, layers=("dense",) * layers, heads=heads, seq=seq, vocab=vocab,
        positions=seq, tied=True, biases=True, gated=False,
    )  # fmt: skip
    layout = Layout(
        dp=dp, tp=tp, pp=pp, micro_batch=micro,
        micro_batches=divided(int_of(row, "global batch"), dp * micro, "global batch"),
        recompute="full", compute="fp16", gradient_bytes=2,
        stack=Stack(flash=False, fused_loss=False, overlap=False),
    )  # fmt: skip
    return new_row(
        table, line, architecture.name, "a100-100g", row["# GPUs"], architecture=architecture, layout=layout,
        step_s=number_of(row, "iteration time (ms)") / 1e3,
    )  # fmt: skip


def _foundry(row: Fields, table: str, line: int) -> MeasuredStep:
    """MosaicML llm-foundry: MPT, PyTorch FSDP, flash attention, a fused loss, no other fused kernels."""
    seq, gpus, micro = (
        int_of(row, "SeqLen (T)"),
        int_of(row, "# GPUs"),
        int_of(row, "MicroBatchSize"),
    )
    architecture = published(f"mpt{row['Model']}", seq=seq)
    if architecture is None:
        raise MissingError(f"Model {row['Model']}: no published architecture")
    gathered_again = meaning(row, "Sharding Strategy", {"full_shard": True, "shard_grad_op": False})
    layout = Layout(
        dp=gpus, zero=3, fsdp=gathered_again, micro_batch=micro,
        micro_batches=int_of(row, "GradAccum"), compute=meaning(row, "Precision", PRECISION),
        recompute="full+early_stop" if is_true(row, "Activation Checkpointing") else "none",
        gradient_bytes=meaning(row, "MP Mode", {"pure": 2, "default": 4, "": 4}),
        parameter_bytes=4, optimizer_bytes=8, stack=Stack(fused=False, fused_attention=False),
    )  # fmt: skip
    return new_row(
        table, line, f"MPT {row['Model']}", row["GPU"], gpus, architecture=architecture, layout=layout,
        step_s=number_of(row, "GlobalBatchSize (T)") / number_of(row, "Throughput (T/s)"),
    )  # fmt: skip


def _dgxc(row: Fields, table: str, line: int) -> MeasuredStep:
    """NVIDIA DGX Cloud recipes: NeMo (Megatron core), MaxText and Paxml (FSDP)."""
    config, gpus = row["config"], int_of(row, "gpus")
    step = number_of(row, "step_s")
    base = re.sub(r"\(.*\)|BF16|FP8|24\.\d\d|Dev|Strong Scaling|GB200|H100", "", config).strip()
    start = new_row(table, line, base, row["gpu"], gpus, step_s=step, source=row.get("commit", ""))
    batch = int_of(row, "gbs")
    seq = round(number_of(row, "tok_s") * step / batch / 128) * 128
    given = {
        word.lower(): int(value) for word, value in re.findall(r"\b(SEQ|MBS|GA)=(\d+)", config)
    }
    architecture = published(config, seq=given.get("seq", seq))
    if architecture is None:
        return replace(start, reason=f"missing: architecture of {base}")
    compute = "fp8" if "FP8" in config else "bf16"
    micro = int_of(row, "mbs", given.get("mbs"))
    if "FSDP" in config:
        layout = Layout(
            dp=gpus, zero=3, fsdp=True, micro_batch=micro, compute=compute,
            micro_batches=divided(batch, gpus * micro, "gbs"), gradient_bytes=2,
            recompute="norm+activation+core_attention" if "axml" in config else "save_qkv",
            # sharded inside a node (Paxml), from 64 nodes over 16 of them (MaxText); the rest are copies
            stack=Stack(graphs=True), opt_shards=8 if "axml" in config else 128 if gpus >= 512 else 0,
        )  # fmt: skip
        return replace(start, architecture=architecture, layout=layout)
    layout = _megatron(row, architecture, gpus, micro, batch, compute)
    again = "selective" if "340b" in config.lower() else "none"
    layout = replace(layout, gradient_bytes=2, recompute=again)
    return replace(start, architecture=architecture, layout=layout)


def _megatron(
    row: Fields, a: Architecture, gpus: int, micro: int, batch: int, compute: str
) -> Layout:
    """Return a Megatron-core layout with its usual settings: sequence parallel, distributed optimizer, overlap."""
    tp, pp, cp = int_of(row, "tp"), int_of(row, "pp"), int_of(row, "cp", 1)
    vpp, ep = int_of(row, "vp", 1), int_of(row, "ep", 1)
    dp = divided(gpus, tp * pp * cp, "gpus")
    layers, count = len(a.layers), pp * vpp
    if pp == 1 or count > layers + 2:
        vpp = 1
    chunks = None
    if pp > 1 and layers % (pp * vpp) and (layers + 2) % (pp * vpp) == 0:
        each = (layers + 2) // (pp * vpp)  # embedding and loss count as a layer each
        chunks = (each - 1, *[each] * (pp * vpp - 2), each - 1)
    elif pp > 1 and layers % (pp * vpp):  # as DeepSeek-V3's `Et*4|(t*4|)*14tmL` and `Et|(tt|)*30mL`
        each = -(-layers // (pp * vpp))
        left = layers - each * (pp * vpp - 1)
        chunks = (each + min(left, 0), *[each] * (pp * vpp - 2), max(left, 0))
    return Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=ep, sequence_parallel=tp > 1, zero=1, micro_batch=micro,
        micro_batches=divided(batch, dp * micro, "gbs"), compute=compute,  # type: ignore[arg-type]
        schedule="interleaved" if vpp > 1 else "1f1b", gradient_bytes=4, chunks=chunks,
        stack=Stack(tp_overlap=tp > 1, input_bytes=1 if compute in ("fp8", "fp4") else 2),
    )  # fmt: skip


def _bridge(row: Fields, table: str, line: int) -> MeasuredStep:
    """NeMo Megatron-Bridge performance summary."""
    model, gpus = row["model"], int_of(row, "gpus")
    device = re.sub(r"^DGX-", "", row["system"])
    start = new_row(
        table,
        line,
        model,
        device,
        gpus,
        source=f"{row['source']} {row['container']} {row['precision']}",
    )
    batch, micro, seq = int_of(row, "gbs"), int_of(row, "mbs"), int_of(row, "seq")
    speed = number_of(row, "tok_s_gpu")
    start = replace(start, step_s=batch * seq / (speed * gpus))
    architecture = published(model, seq=seq)
    if architecture is None:
        return replace(start, reason=f"missing: architecture of {model}")
    checked_kind(model, architecture, 0)
    if not row["precision"].strip():
        return replace(start, reason="missing: precision")
    precision = row["precision"].split()[0].upper()
    layout = _megatron(
        row,
        architecture,
        gpus,
        micro,
        batch,
        meaning({"precision": precision}, "precision", PRECISION),
    )
    # scripts/performance of the same repository: HybridEP unless the row says otherwise, gradients reduced in 2 bytes
    dispatcher = dispatcher_of(row, "dispatcher") or dispatcher_of({"": "hybridep"}, "")
    layout = layout.with_changes(
        **dispatcher, gradient_bytes=2, recompute=recompute_of(row, "recompute")
    )
    if precision == "MXFP8" and "B" in device and _version(row["container"]) >= _fused_from(model):
        layout = layout.with_changes(graphs=True, fused_experts=True, ep_overlap=True)
    return replace(start, architecture=architecture, layout=layout)


def _version(container: str) -> tuple[int, int]:
    """Return year and month of a container such as `26.06.01 NeMo Container`."""
    found = re.match(r"(\d+)\.(\d+)", container)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _fused_from(model: str) -> tuple[int, int]:
    """Return the first container whose MXFP8 recipe on Blackwell is one captured graph, with fused experts.

    Their all-to-all is overlapped, too (NVIDIA-NeMo/Megatron-Bridge, pull requests 3983, 4249, 4606, 5168).
    """
    name = model.lower()
    if name.startswith(("qwen3", "deepseek")):
        return 26, 6
    return (26, 8) if name.startswith("kimi") else (99, 0)


FORMATS: tuple[tuple[set[str], Callable[[Fields, str, int], MeasuredStep]], ...] = (
    ({"# GPUs", "iteration time (ms)", "tensor parallelism"}, _vtrain),
    ({"MicroBatchSize", "Sharding Strategy", "Throughput (T/s)"}, _foundry),
    ({"config", "gpu", "step_s", "tok_s", "mfu_pct"}, _dgxc),
    ({"container", "system", "tok_s_gpu", "precision"}, _bridge),
    ({"case", "hw", "mem_max_alloc_bytes", "hidden-size"}, golden),
    ({"tok_s_device", "micro_batch_num", "opt_parallel", "yaml"}, mindformers),
    ({"group", "stack", "step_s", "oom"}, sweep),
    ({"tok_s_device", "script", "nnodes", "vpp_layers"}, mindspeed),
)


def read_table(file: str | Path) -> list[MeasuredStep]:
    """Read a table of steps.

    Args:
        file: A CSV file in one of `FORMATS`, or a YAML file with `sets`.

    Raises:
        BadInputError: The file is missing, its columns fit no format, or a word is not known (see `words.py`).
    """
    path = Path(file)
    if path.suffix in (".yaml", ".yml"):
        return read_sets(path)
    columns, rows = read_csv(path)
    for needed, parse in FORMATS:
        if needed <= set(columns):
            return [_row(row, parse, path, line) for line, row in enumerate(rows, start=2)]
    raise BadInputError(
        f"{path}: columns {', '.join(sorted(columns))[:200]} fit no known table; see the formats in "
        "benchmarks/plan_published/README.md"
    )


def _row(
    given: Fields, parse: Callable[[Fields, str, int], MeasuredStep], path: Path, line: int
) -> MeasuredStep:
    # cells beyond the header come under the key None, missing ones as None
    fields = Cells({k: v for k, v in given.items() if k is not None and v is not None})
    model, device = (
        next((fields[key] for key in keys if fields[key]), "")
        for keys in (
            ("model", "Model", "config", "name", "case"),
            ("gpu", "GPU", "system", "hw", "device"),
        )
    )
    table = path.stem
    bare = MeasuredStep(
        table=table, line=line, model=model, device=device, group=f"{table}/{model}"
    )
    try:
        return or_reason(bare, lambda: parse(fields, table, line))
    except WordError as error:
        raise BadInputError(f"{path}:{line}: {error}") from None
