"""Published measurements as rows: architecture, layout, device and what was measured.

A table is recognised by its columns, so that other parts of the same tables are read alike. A row that cannot be
predicted keeps the reason: a layout field that is missing, a device without a description, or an impossible figure
(`validate.py`).
"""

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.architecture import Architecture, plain
from telechat_moe.tools.plan.layout import Layout
from telechat_moe.tools.plan.models import published


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run."""

    table: str
    line: int
    """Line of the CSV file, or number of the row within its set."""

    model: str
    device: str
    """Device as the table names it; empty: the command's default."""

    group: str
    """Model and scale: rows of one group are left out of a fit together."""

    architecture: Architecture | None = None
    layout: Layout | None = None
    step_s: float | None = None
    memory_bytes: float | None = None
    memory_stage: int | None = None
    """Stage whose memory was measured; None: the largest."""

    provenance: str = "A"
    reason: str = ""
    """Why the row is not predicted; empty: it is."""

    source: str = ""

    @property
    def label(self) -> str:
        """Model and layout on one line."""
        return f"{self.model} {self.layout.short()}" if self.layout else self.model


class _MissingError(Exception):
    """A layout field that the row does not give."""


Fields = Mapping[str, str]

LARGEST = 1e18
"""No size or speed of a table is larger."""

MOST = 2**22
"""No count is larger: of layers, devices, sequences, tokens of a sequence."""


class _Cells(dict[str, str]):
    """A row's cells by column: empty where the table has no such column or the line ends early."""

    def __missing__(self, key: str) -> str:
        return ""


def _number(row: Fields, key: str, default: float | None = None) -> float:
    text = (row.get(key) or "").strip()
    match = re.match(r"^-?\d+(\.\d+)?([eE][+-]?\d+)?", text.replace(",", ""))
    if match is None or text.lower() in ("n/a", "-", "nan"):
        if default is None:
            raise _MissingError(key)
        return default
    number = float(match.group(0))
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise _MissingError(f"{key}: {text[:20]} is out of range")
    return number


def _int(row: Fields, key: str, default: int | None = None) -> int:
    number = _number(row, key, default)
    if number != int(number) or (number < 1 and default != 0) or number > MOST:
        raise _MissingError(f"{key}: {number:g}, expected a whole number from 1 to {MOST:,}")
    return int(number)


def _divide(whole: float, part: float, what: str) -> int:
    if part <= 0 or whole % part or whole < part:
        raise _MissingError(f"{what}: {whole:g} is not a multiple of {part:g}")
    return int(whole // part)


def _true(row: Fields, key: str) -> bool:
    return (row.get(key) or "").strip().lower() in ("true", "1", "1.0", "yes")


def _row(table: str, line: int, model: str, device: str, gpus: object, **rest: Any) -> Row:
    return Row(
        table=table, line=line, model=model, device=device, group=f"{table}/{model}/{gpus}", **rest
    )


def _vtrain(row: Fields, table: str, line: int) -> Row:
    """Megatron-DeepSpeed: GPT, fp16, full recomputation, unfused attention, reduction after the backward pass."""
    hidden, layers = _int(row, "hidden size"), _int(row, "# layers")
    heads, seq = _int(row, "attention heads"), _int(row, "sequence length")
    dp, tp, pp = (_int(row, f"{w} parallelism") for w in ("data", "tensor", "pipeline"))
    micro = _int(row, "micro batch")
    vocab = -(-50257 // (128 * tp)) * 128 * tp
    architecture = plain(
        f"GPT {hidden}x{layers}", hidden=hidden, layers=layers, heads=heads, seq=seq, vocab=vocab,
        positions=seq, tied=True, biases=True,
    )  # fmt: skip
    layout = Layout(
        dp=dp, tp=tp, pp=pp, micro_batch=micro,
        micro_batches=_divide(_int(row, "global batch"), dp * micro, "global batch"),
        recompute="full", compute="fp16", gradient_bytes=2, flash=False, fused_loss=False, overlap=False,
    )  # fmt: skip
    return _row(
        table, line, architecture.name, "a100-100g", row["# GPUs"], architecture=architecture, layout=layout,
        step_s=_number(row, "iteration time (ms)") / 1e3,
    )  # fmt: skip


def _foundry(row: Fields, table: str, line: int) -> Row:
    """MosaicML llm-foundry: MPT, PyTorch FSDP, flash attention, a fused loss, no other fused kernels."""
    seq, gpus, micro = _int(row, "SeqLen (T)"), _int(row, "# GPUs"), _int(row, "MicroBatchSize")
    architecture = published(f"mpt{row['Model']}", seq=seq, positions=seq)
    if architecture is None:
        raise _MissingError(f"Model {row['Model']}: no published architecture")
    precision = row["Precision"]
    layout = Layout(
        dp=gpus, zero=3, fsdp=row["Sharding Strategy"] == "FULL_SHARD", micro_batch=micro,
        micro_batches=_int(row, "GradAccum"), compute="fp8" if "fp8" in precision else "bf16",
        recompute="full+early_stop" if _true(row, "Activation Checkpointing") else "none",
        gradient_bytes=2 if row.get("MP Mode") == "PURE" else 4, fused=False, fused_attention=False,
        parameter_bytes=4, optimizer_bytes=8,
    )  # fmt: skip
    return _row(
        table, line, f"MPT {row['Model']}", row["GPU"], gpus, architecture=architecture, layout=layout,
        step_s=_number(row, "GlobalBatchSize (T)") / _number(row, "Throughput (T/s)"),
    )  # fmt: skip


def _dgxc(row: Fields, table: str, line: int) -> Row:
    """NVIDIA DGX Cloud recipes: NeMo (Megatron core), MaxText and Paxml (FSDP)."""
    config, gpus = row["config"], _int(row, "gpus")
    step = _number(row, "step_s")
    base = re.sub(r"\(.*\)|BF16|FP8|24\.\d\d|Dev|Strong Scaling|GB200|H100", "", config).strip()
    start = _row(table, line, base, row["gpu"], gpus, step_s=step, source=row.get("commit", ""))
    batch = _int(row, "gbs")
    seq = round(_number(row, "tok_s") * step / batch / 128) * 128
    given = {
        word.lower(): int(value) for word, value in re.findall(r"\b(SEQ|MBS|GA)=(\d+)", config)
    }
    architecture = published(config, seq=given.get("seq", seq))
    if architecture is None:
        return replace(start, reason=f"missing: architecture of {base}")
    compute = "fp8" if "FP8" in config else "bf16"
    micro = _int(row, "mbs", given.get("mbs"))
    if "FSDP" in config:
        layout = Layout(
            dp=gpus, zero=3, fsdp=True, micro_batch=micro, compute=compute,
            micro_batches=_divide(batch, gpus * micro, "gbs"), gradient_bytes=2,
            recompute="norm+activation+core_attention" if "axml" in config else "save_qkv",
            # sharded inside a node (Paxml), from 64 nodes over 16 of them (MaxText); the rest are copies
            graphs=True, opt_shards=8 if "axml" in config else 128 if gpus >= 512 else 0,
        )  # fmt: skip
        return replace(start, architecture=architecture, layout=layout)
    tp, pp, cp = _int(row, "tp"), _int(row, "pp"), _int(row, "cp", 1)
    layout = _megatron(
        row, architecture, gpus, tp, pp, cp, _int(row, "vp", 1), 1, micro, batch, compute
    )
    again = "selective" if "340b" in config.lower() else "none"
    layout = replace(layout, gradient_bytes=2, recompute=again)
    return replace(start, architecture=architecture, layout=layout)


def _megatron(
    row: Fields, a: Architecture, gpus: int, tp: int, pp: int, cp: int, vpp: int, ep: int, micro: int, batch: int,
    compute: str,
) -> Layout:  # fmt: skip
    """Return a Megatron-core layout with its usual settings: sequence parallel, distributed optimizer, overlap."""
    del row
    dp = _divide(gpus, tp * pp * cp, "gpus")
    layers, count = len(a.layers), pp * vpp
    if pp == 1 or count > layers + 2:
        vpp = 1
    chunks = None
    if pp > 1 and layers % (pp * vpp) and (layers + 2) % (pp * vpp) == 0:
        each = (layers + 2) // (pp * vpp)  # embedding and loss count as a layer each
        chunks = (each - 1, *[each] * (pp * vpp - 2), each - 1)
    return Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=ep, sequence_parallel=tp > 1, zero=1, micro_batch=micro,
        micro_batches=_divide(batch, dp * micro, "gbs"), compute=compute,  # type: ignore[arg-type]
        schedule="interleaved" if vpp > 1 else "1f1b", tp_overlap=tp > 1, gradient_bytes=4, chunks=chunks,
    )  # fmt: skip


def _bridge(row: Fields, table: str, line: int) -> Row:
    """NeMo Megatron-Bridge performance summary."""
    model, gpus = row["model"], _int(row, "gpus")
    device = re.sub(r"^DGX-", "", row["system"])
    start = _row(table, line, model, device, gpus, source=f"{row['source']} {row['container']}")
    batch, micro, seq = _int(row, "gbs"), _int(row, "mbs"), _int(row, "seq")
    speed = _number(row, "tok_s_gpu")
    start = replace(start, step_s=batch * seq / (speed * gpus))
    architecture = published(model, seq=seq)
    if architecture is None:
        return replace(start, reason=f"missing: architecture of {model}")
    if not row["precision"].strip():
        return replace(start, reason="missing: precision")
    precision = row["precision"].split()[0]
    compute = "bf16" if precision.upper().startswith("BF16") else "fp8"
    if precision.upper() == "NVFP4":
        return replace(start, reason="missing: a peak for NVFP4 in the device's description")
    tp, pp, cp = _int(row, "tp"), _int(row, "pp"), _int(row, "cp", 1)
    layout = _megatron(
        row,
        architecture,
        gpus,
        tp,
        pp,
        cp,
        _int(row, "vp", 1),
        _int(row, "ep", 1),
        micro,
        batch,
        compute,
    )
    # scripts/performance of the same repository: HybridEP, gradients reduced in 2 bytes
    layout = replace(layout, hierarchical=True, gradient_bytes=2)
    return replace(start, architecture=architecture, layout=layout)


def _golden(row: Fields, table: str, line: int) -> Row:
    """Megatron-LM functional tests: last rank's peak memory; time where the model is not a toy."""
    case, hardware = row["case"], row["hw"]
    found = re.search(r"(gb200|h100|a100)", hardware)
    device = found.group(1) if found else "a100"
    start = _row(
        table,
        line,
        case,
        device,
        row["family"],
        memory_bytes=_number(row, "mem_max_alloc_bytes", 0) or None,
    )
    if row["family"] in ("bert", "t5", "hybrid"):
        return replace(start, reason=f"missing: a decoder-only architecture ({row['family']})")
    if (
        "grpo" in case
        or "distill" in case
        or "frozen" in case
        or "muon" in case
        or "flextron" in case
    ):
        return replace(
            start, reason="missing: what the run trains (frozen parts, rollouts, another optimizer)"
        )
    hidden, layers, heads = (
        _int(row, k) for k in ("hidden-size", "num-layers", "num-attention-heads")
    )
    seq, tp, pp = (
        _int(row, "seq-length"),
        _int(row, "tensor-model-parallel-size", 1),
        _int(row, "pipeline-model-parallel-size", 1),
    )
    swiglu = _true(row, "swiglu")
    vocab = _int(row, "vocab-size", 50257)
    vocab = -(-vocab // (128 * tp)) * 128 * tp
    experts = _int(row, "num-experts", 0)
    if _true(row, "multi-latent-attention") or row.get("pipeline-model-parallel-layout"):
        return replace(start, reason="missing: MLA widths or a layout of the pipeline's layers")
    ffn = _int(row, "ffn-hidden-size", 4 * hidden)
    kv = _int(row, "num-query-groups", heads)
    architecture = Architecture(
        name=case, hidden=hidden, layers=("moe" if experts else "dense",) * layers,
        attention="gqa" if kv != heads else "mha", heads=heads, kv_heads=kv, head_dim=hidden // heads, ffn=ffn,
        gated=swiglu, experts=experts, top_k=_int(row, "moe-router-topk", 2 if experts else 0),
        moe_ffn=_int(row, "moe-ffn-hidden-size", ffn) if experts else 0, vocab=vocab,
        tied=not _true(row, "untie-embeddings-and-output-weights"), seq=seq, positions=seq, biases=not swiglu,
    )  # fmt: skip
    cp, micro = _int(row, "context-parallel-size", 1), _int(row, "micro-batch-size")
    gpus = 8 if "1node" in case or tp * pp * cp <= 8 else tp * pp * cp
    dp = max(gpus // (tp * pp * cp), 1)
    dp = min(dp, max(_int(row, "global-batch-size") // micro, 1))
    chunks = _int(row, "num-layers-per-virtual-pipeline-stage", 0)
    vpp = (
        layers // pp // chunks
        if chunks and pp > 1
        else _int(row, "num-virtual-stages-per-pipeline-rank", 1)
    )
    backend = row.get("attention-backend") or ""
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, sequence_parallel=_true(row, "sequence-parallel"),
        ep=_int(row, "expert-model-parallel-size", 1),
        zero=(3 if row.get("data-parallel-sharding-strategy") == "optim_grads_params" else
              1 if _true(row, "use-distributed-optimizer") else 0),
        micro_batch=micro, micro_batches=max(_int(row, "global-batch-size") // (dp * micro), 1),
        flash=backend not in ("unfused", "local")
            and row.get("transformer-impl") != "local"
            and not ("dracooci" in hardware and cp == 1 and not backend),  # recorded before attention was fused there
 schedule="interleaved" if vpp > 1 else "1f1b",
        compute="bf16",
    )  # fmt: skip
    # the table does not say how many devices a test ran on: no time without data-parallel size and global batch
    return replace(start, architecture=architecture, layout=layout, memory_stage=pp - 1)


def _list(text: str) -> Any:
    return yaml_value(text) if text else None


def yaml_value(text: str) -> Any:
    """Parse a cell that holds a YAML list or scalar."""
    return yaml.safe_load(text)


def _mindformers(row: Fields, table: str, line: int) -> Row:
    """MindFormers recipes on Ascend."""
    name = row["name"]
    device = row.get("hw") or "ascend-910b"
    devices = _int(row, "devices", 0)
    start = _row(table, line, name, device, devices, source=row.get("yaml") or row.get("doc") or "")
    if row["phase"] not in ("finetune", "pretrain", "sft"):
        return replace(start, reason=f"missing: what {row['phase']} trains")
    if "ptuning" in name or "lora" in name:
        return replace(start, reason="missing: what a partial fine-tuning trains")
    speed = _number(row, "tok_s_device")
    seq = _int(row, "seq")
    known = published(name, seq=seq)
    hidden, layers, heads = _int(row, "hidden"), _int(row, "layers"), _int(row, "heads")
    inter = _int(row, "inter", 0)
    kv = _int(row, "kv_heads", known.kv_heads if known else heads)
    experts = _int(row, "expert_num", 1)
    if experts > 1 and known is not None and known.experts:
        architecture = known
    else:
        gpt = name.startswith("gpt")
        ffn = inter or (known.ffn if known else 0) or (4 * hidden if gpt else 0)
        if not ffn:
            raise _MissingError("inter")
        vocab = _int(row, "vocab", known.vocab if known else None)
        architecture = plain(
            name, hidden=hidden, layers=layers, heads=heads, kv_heads=kv, ffn=ffn, gated=not gpt, seq=seq,
            vocab=vocab,
        )  # fmt: skip
    dp, tp, pp, cp = (_int(row, k, 1) for k in ("dp", "mp", "pp", "cp"))
    micro = _int(row, "batch_per_dp")
    count = _int(row, "micro_batch_num") if pp > 1 else _int(row, "grad_accum", 1)
    count *= _int(row, "micro_interleave", 1)
    vpp = max(_int(row, "pp_interleave", 1), 1) if pp > 1 else 1
    recompute, again = _ascend_recompute(row, pp * vpp)
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=_int(row, "ep", 1),
        sequence_parallel=_true(row, "seq_parallel") and tp > 1, zero=1 if _true(row, "opt_parallel") else 0,
        micro_batch=micro, micro_batches=count, recompute=recompute, recompute_layers=again,
        chunks=_offset(row.get("offset") or "", layers, pp * vpp), flash=_true(row, "flash"),
        schedule="interleaved" if vpp > 1 else "1f1b", compute="bf16", graphs=True, overlap=True,
        fused=True, fused_loss=False, gradient_bytes=2, parameter_bytes=2,
    )  # fmt: skip
    tokens = layout.global_batch * seq
    return replace(
        start, architecture=architecture, layout=layout, step_s=tokens / (speed * layout.devices),
        memory_bytes=None,
    )  # fmt: skip


def _offset(text: str, layers: int, chunks: int) -> tuple[int, ...] | None:
    value = _list(text)
    if not isinstance(value, list):
        return None
    flat = [int(x) for entry in value for x in (entry if isinstance(entry, list) else [entry])]
    if len(flat) != chunks:
        return None
    counts = tuple(layers // chunks + extra for extra in flat)
    return counts if sum(counts) == layers and min(counts) >= 0 else None


def _ascend_recompute(row: Fields, chunks: int) -> tuple[str, tuple[int, ...] | None]:
    value = _list(row.get("recompute") or "")
    if isinstance(value, list):
        flat = [int(x) for entry in value for x in (entry if isinstance(entry, list) else [entry])]
        return "full", tuple(flat) if len(flat) == chunks else None
    if value is True:
        return "full", None
    select = row.get("select_recompute") or ""
    if select.startswith("[") or select == "True":
        return "activation", None
    return "none", None


def _mindspeed(row: Fields, table: str, line: int) -> Row:
    """MindSpeed-LLM launch scripts on Ascend 910B, and their reference on A100."""
    model = row["model"]
    reference = row["device"] in ("参考", "reference", "GPU", "GPUs")
    device = "a100" if reference else "ascend-910b"
    nodes, per_node = _int(row, "nnodes", 0), _int(row, "npus_per_node", 8)
    start = _row(
        table, line, model, device, nodes * per_node, source=f"{row['tag']} {row['script']}"
    )
    if not row.get("script"):
        return replace(start, reason="missing: launch script (tp, pp, batch)")
    seq, micro, batch = _int(row, "seq"), _int(row, "mbs"), _int(row, "gbs")
    tp, pp, cp = _int(row, "tp"), _int(row, "pp"), _int(row, "cp", 1)
    key = Path(row["script"]).stem.removeprefix("pretrain_")
    known = published(model, seq=seq) or published(key, seq=seq)
    hidden, layers, heads = _int(row, "hidden"), _int(row, "layers"), _int(row, "heads")
    if known is None:
        raise _MissingError(f"vocabulary of {model}")
    experts = _int(row, "num_experts", 0)
    if experts:
        architecture = replace(known, seq=seq)
    else:
        architecture = plain(
            known.name, hidden=hidden, layers=layers, heads=heads, kv_heads=_int(row, "kv", known.kv_heads),
            ffn=_int(row, "ffn", known.ffn), gated=known.gated, seq=seq, window=known.window, vocab=known.vocab, tied=known.tied,
            head_dim=known.head_dim if known.hidden == hidden else hidden // heads, biases=known.biases,
        )  # fmt: skip
    gpus = nodes * per_node
    dp = _divide(gpus, tp * pp * cp, "devices")
    per_chunk = _int(row, "vpp_layers", 0)
    vpp = layers // pp // per_chunk if per_chunk and pp > 1 else 1
    speed = _number(row, "tok_s_device")
    full = row.get("recompute") == "full"
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=_int(row, "ep", 1), sequence_parallel=_true(row, "sp") and tp > 1,
        zero=1 if _true(row, "distopt") else 0, micro_batch=micro,
        micro_batches=_divide(batch, dp * micro, "gbs"), recompute="full" if full else "none",
        flash=_true(row, "flash"), schedule="interleaved" if vpp > 1 else "1f1b", compute="bf16", overlap=True,
        fused_loss=False,
    )  # fmt: skip
    return replace(
        start, architecture=architecture, layout=layout, step_s=batch * seq / (speed * gpus)
    )


UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    yaml.YAMLError,
)
"""What a row's own figures can raise, such as a division by a speed of 0."""


def unreadable(what: str, error: Exception) -> str:
    """Return the reason, in one line, why a row whose figures raise is not predicted."""
    reason = f"missing: a readable {what} ({type(error).__name__}: {str(error)[:60]})"
    return " ".join(reason.split())


FORMATS: tuple[tuple[set[str], Callable[[Fields, str, int], Row]], ...] = (
    ({"# GPUs", "iteration time (ms)", "tensor parallelism"}, _vtrain),
    ({"MicroBatchSize", "Sharding Strategy", "Throughput (T/s)"}, _foundry),
    ({"config", "gpu", "step_s", "tok_s", "mfu_pct"}, _dgxc),
    ({"container", "system", "tok_s_gpu", "precision"}, _bridge),
    ({"case", "hw", "mem_max_alloc_bytes", "hidden-size"}, _golden),
    ({"tok_s_device", "micro_batch_num", "opt_parallel", "yaml"}, _mindformers),
    ({"tok_s_device", "script", "nnodes", "vpp_layers"}, _mindspeed),
)
OTHER = (
    ({"device", "gpus", "bytes", "time_us", "busbw_GBps"}, "list of collectives"),
    ({"start_us", "dur_us", "stream", "name"}, "kernel list"),
)
"""Tables that have no steps; `plan score` names them and leaves them to the parts that read them."""


def read_table(file: str | Path) -> list[Row]:
    """Read a table of steps.

    Args:
        file: A CSV file in one of `FORMATS`, or a YAML file with `sets`.

    Raises:
        BadInputError: The file is missing or its columns fit no format.
    """
    path = Path(file)
    if not path.is_file():
        raise BadInputError(f"{path}: no such file")
    if path.suffix in (".yaml", ".yml"):
        from telechat_moe.tools.plan.tables_yaml import read_sets

        return read_sets(path)
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            columns = set(reader.fieldnames or ())
            for needed, parse in FORMATS:
                if needed <= columns:
                    return list(_rows(reader, parse, path.stem))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{path}: not a CSV table in UTF-8 ({error})") from None
    for needed, what in OTHER:
        if needed <= columns:
            reason = f"missing: steps (the table is a {what})"
            return [
                Row(table=path.stem, line=0, model="", device="", group=path.stem, reason=reason)
            ]
    if not columns:
        raise BadInputError(f"{path}: empty, expected a table with a header")
    raise BadInputError(
        f"{path}: columns {', '.join(sorted(columns))[:200]} fit no known table; see the formats in "
        "docs/plan_accuracy.md"
    )


def _rows(reader: Any, parse: Callable[[Fields, str, int], Row], table: str) -> Iterator[Row]:
    for line, given in enumerate(reader, start=2):
        # cells beyond the header come under the key None, missing ones as None
        fields = _Cells({k: v for k, v in given.items() if k is not None and v is not None})
        try:
            yield parse(fields, table, line)
        except _MissingError as missing:
            yield _bare(fields, table, line, f"missing: {missing}")
        except BadInputError as error:
            yield _bare(fields, table, line, f"missing: a consistent layout ({error})")
        except UNREADABLE as error:
            yield _bare(fields, table, line, unreadable("layout", error))


def _bare(fields: Fields, table: str, line: int, reason: str) -> Row:
    model = next(
        (fields[k] for k in ("model", "Model", "config", "name", "case") if fields.get(k)), ""
    )
    device = next(
        (fields[k] for k in ("gpu", "GPU", "system", "hw", "device") if fields.get(k)), ""
    )
    return Row(
        table=table, line=line, model=model, device=device, group=f"{table}/{model}", reason=reason
    )
