"""Convert weights between this package and Hugging Face's DeepseekV3ForCausalLM, bit for bit.

``telechat-moe convert SRC DST --recipe RECIPE --to hf`` runs :func:`convert`. Tensors stream from
file to file; the most that is in memory at once is one matrix of one expert, twice, or 16 MiB. See
:mod:`telechat_moe.interop.names` for what is transposed, renamed or written twice.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from telechat_moe import tensor_files
from telechat_moe.checkpoint.weights import own_weights, read_weights, unfit
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.files import require_checksums
from telechat_moe.interop import fp8
from telechat_moe.interop.names import (
    HF_STATE,
    OUR_STATE,
    Pair,
    empty_shared_experts,
    first_mtp_layer,
    pairs,
)
from telechat_moe.interop.writing import Destination, Progress
from telechat_moe.recipe import ModelConfig
from telechat_moe.recipe.schema.model import DEEPSEEK_V3
from telechat_moe.tensor_files import BYTES_OF_DTYPE, Bytes, Entry, Output
from telechat_moe.units import ranges_text

Format = Literal["hf", "telechat"]

SHARD_BYTES = 5_000_000_000
_SAME_KEYS = (
    *(key for key in DEEPSEEK_V3 if key != "seq_length"),
    *("initializer_range", "max_position_embeddings", "norm_topk_prob", "rms_norm_eps"),
    *("rope_interleave", "rope_theta", "scoring_func", "tie_word_embeddings"),
)
_COMPARED_KEYS = (
    *(k for k in _SAME_KEYS if k not in ("initializer_range", "max_position_embeddings")),
    *("attention_bias", "hidden_act", "rope_scaling"),
)
CONFIG = "config.json"
_LABELS = {"hf": "pt", "telechat": "telechat-moe"}  # transformers reads files labelled "pt"
_TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LATENT_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says


class WeightsError(BadInputError):
    """A checkpoint does not hold the tensors of the recipe's model (exit code 3).

    Attributes:
        problems: One line for each tensor that is unknown, missing or not as expected.
    """

    def __init__(self, source: Path, problems: list[str], hint: str = "") -> None:
        self.problems = problems
        text = f"{source}: {len(problems)} problem(s), nothing was written:\n  "
        super().__init__(text + "\n  ".join(problems) + hint)


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        source: Where the weights came from.
        destination: File or folder that was written.
        to: Format of the destination.
        files: Names of the files written.
        tensors: Number of tensors written.
        parameters: Number of weights of the model, each counted once.
        total_bytes: Size of all tensors written.
        dtypes: Number of tensors written of each data type.
        ignored: Tensors of the source that are no weights.
        notes: Where Hugging Face's model computes something else than ours with these weights, and what was not
            copied bit for bit.
        resumed_files: Files of weights that an interrupted conversion had finished.
    """

    source: str
    destination: str
    to: Format
    files: list[str]
    tensors: int
    parameters: int
    total_bytes: int
    dtypes: dict[str, int]
    ignored: list[str]
    notes: list[str]
    resumed_files: int


def convert(
    src: str | Path,
    dst: str | Path,
    model_config: ModelConfig,
    to: Format,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Conversion:
    """Write the weights of ``src`` in the other format to ``dst``.

    Called with the same arguments, it resumes one that was killed (:mod:`telechat_moe.interop.writing`).

    Args:
        src: Safetensors file, folder with one or with an index, or folder of a training checkpoint.
        dst: Folder, or a name that ends in ``.safetensors`` for one file without config.json. Must
            not exist; appears only when it is complete.
        model_config: Model section of the recipe whose weights these are.
        to: ``hf``: ``src`` has our names; ``telechat``: ``src`` has Hugging Face's.
        shard_bytes: Largest file in a folder, in bytes of tensors; a larger tensor gets its own file.
        progress: Called with what is being done, the bytes done so far and in all.

    Raises:
        WeightsError: If a tensor is unknown, missing, of wrong shape or type, or a copy differs.
        BadInputError: If ``src`` is unreadable or changed, or Hugging Face cannot hold the model.
        UsageError: If ``dst`` exists, or another process is writing it.
        TelechatMoeError: If writing failed; ``dst`` was not made.
    """
    src, dst = Path(src), Path(dst)
    if dst.exists() or dst.is_symlink():
        raise UsageError(f"{dst} exists; remove it or name another destination")
    found = _open(src, model_config, to)
    outputs, extra = _outputs(found.table, found.entries, model_config, to)
    largest = 1 << 62 if dst.suffix == ".safetensors" else shard_bytes
    shards = tensor_files.split(outputs, largest)
    if len(shards) > 1:
        extra[tensor_files.INDEX] = tensor_files.index_of(shards)
    destination = Destination(dst, src, found.files, shards, extra, _LABELS[to], progress)
    files, resumed = destination.write()
    return Conversion(
        source=str(src),
        destination=str(dst),
        to=to,
        files=files,
        tensors=len(outputs),
        parameters=sum(int(np.prod(p.shape, dtype=np.int64)) for p in found.table if not p.is_bias),
        total_bytes=sum(o.nbytes for o in outputs),
        dtypes=dict(Counter(o.dtype for o in outputs)),
        ignored=found.ignored,
        notes=found.notes,
        resumed_files=resumed,
    )


def weights(source: Path, config: ModelConfig, *, verify: bool = True) -> list[Output]:
    """Return the weights of a model, all that it has and no others, from either format.

    A folder with ``config.json`` is Hugging Face's: its weights are those that :func:`convert` writes.

    Args:
        verify: Compare the files with their checksums, and weights that must be equal; False: only names, shapes, types
            and config.json are looked at.

    Raises:
        BadInputError: Nothing readable is there, or it does not fit the model; says how.
    """
    if not (source / CONFIG).is_file():
        return own_weights(source, config, verify=verify)
    if not list(source.glob("*.safetensors")):
        files = ", ".join(sorted(p.name for p in source.iterdir())[:5])
        raise BadInputError(
            f"{source} is a Hugging Face folder without safetensors ({files}); download them, or convert its files "
            "with transformers (save_pretrained)"
        )
    _check_config(source / CONFIG, config)
    if verify:
        require_checksums(source)
    try:
        found = _open(source, config, "telechat", contents=verify)
    except WeightsError as error:
        raise unfit(source, error.problems) from None
    return list(_to_ours(found.table, found.entries))


def _check_config(path: Path, config: ModelConfig) -> None:
    """Refuse weights of a model that computes something else than the recipe's."""
    try:
        given = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise BadInputError(f"{path}: no configuration of a model ({error})") from error
    ours = hf_config(config, "float32")
    differing = [
        f"{key} is {given[key]}, the recipe's model has {ours[key]}"
        for key in _COMPARED_KEYS
        if key in given and given[key] != ours[key]
    ]
    if differing:
        raise BadInputError(
            f"{path}: {'; '.join(differing)}; set model.model_config to the same (to change it on purpose, convert the "
            "weights with telechat-moe convert first)"
        )


class _Source(NamedTuple):
    """Tensors that were opened: their files, the table that maps them, the names that are no weights, and notes."""

    entries: dict[str, Entry]
    files: list[Path]
    table: list[Pair]
    ignored: list[str]
    notes: list[str]


def _open(src: Path, config: ModelConfig, to: Format, *, contents: bool = True) -> _Source:
    """Open a source and compare it with what the recipe needs."""
    _check_expressible(config)
    entries = read_weights(src)
    files = sorted({entry.file for entry in entries.values()})
    notes, mtp_layer = _notes(config), config.num_hidden_layers
    if to == "telechat":
        mtp_layer = first_mtp_layer(entries, config)
        entries = _dequantised(src, entries, notes)
    table = pairs(config, mtp_layer)
    ignored = _check(src, entries, table, config, to, mtp_layer, contents)
    return _Source(entries, files, table, ignored, notes)


def _dequantised(source: Path, entries: dict[str, Entry], notes: list[str]) -> dict[str, Entry]:
    """Return the tensors with FP8 matrices read as bfloat16; add a note if there are any."""
    entries, problems = fp8.dequantised(source, entries)
    if problems:
        raise WeightsError(source, problems)
    if quantised := sum(isinstance(entry, fp8.Fp8Entry) for entry in entries.values()):
        notes.append(f"{quantised} FP8 matrices times their block scales were rounded to bfloat16")
    return entries


def _outputs(
    table: list[Pair], entries: dict[str, Entry], config: ModelConfig, to: Format
) -> tuple[list[Output], dict[str, dict[str, Any]]]:
    """Return the tensors to write, and the JSON files to write beside them."""
    if to == "telechat":
        return list(_to_ours(table, entries)), {}
    outputs = list(_to_hf(table, entries))
    dtype = _main_dtype(outputs)
    empty = empty_shared_experts(config)
    outputs += [Output(name, dtype, shape, list) for name, shape in empty.items()]
    return outputs, {CONFIG: hf_config(config, _TORCH_DTYPES[dtype])}


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of transformers' DeepseekV3ForCausalLM for a model section.

    Args:
        dtype: Data type of the weights, as PyTorch names it.
    """
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{key: getattr(config, key) for key in _SAME_KEYS},
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank or None,
        "n_shared_experts": config.shared_width // config.moe_intermediate_size,
        "n_group": max(1, config.n_group),
        "topk_group": max(1, config.topk_group),
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }


# ---------------------------------------------------------------------------------------- checking


def _check_expressible(config: ModelConfig) -> None:
    problems: list[str] = []
    if not config.qk_layernorm:
        problems.append("qk_layernorm is False, but there the latents always have an RMSNorm")
    if config.scoring_func != "sigmoid":
        problems.append(f"scoring_func is {config.scoring_func}, but there it is always sigmoid")
    width, unit = config.shared_width, config.moe_intermediate_size
    if width % unit:
        problems.append(
            f"moe_shared_expert_intermediate_size ({width}) must be a multiple of "
            f"moe_intermediate_size ({unit})"
        )
    if config.n_group > 1 and config.n_routed_experts // config.n_group < 2:
        problems.append("a group has 1 expert, but there it needs at least 2")
    if problems:
        raise BadInputError(
            "Hugging Face's DeepseekV3ForCausalLM cannot hold the recipe's model:\n  "
            + "\n  ".join(problems)
        )


def _notes(config: ModelConfig) -> list[str]:
    notes: list[str] = []
    if config.norm_topk_prob and config.num_experts_per_tok == 1:
        notes.append(
            "with one expert per token transformers sets its weight to 1, here it is the score"
        )
    if config.rms_norm_eps != _LATENT_EPS:
        notes.append(
            f"transformers normalises the query and key/value latents with eps {_LATENT_EPS:g}, "
            f"this recipe with rms_norm_eps {config.rms_norm_eps:g}; logits differ slightly"
        )
    if config.n_group > 1:
        best = max(1, config.num_experts_per_tok // config.topk_group)
        if best != 2:
            notes.append(
                f"transformers ranks a group of experts by its best 2, this recipe by its best "
                f"{best} (num_experts_per_tok / topk_group); some tokens choose other experts"
            )
        notes.append(
            "transformers masks the experts of dropped groups with 0, here with -inf; they differ "
            "where a kept expert's biased score is negative"
        )
    if config.num_nextn_predict_layers:
        notes.append("transformers ignores the MTP layers, and warns of unexpected tensors")
    return notes


def _check(
    source: Path,
    entries: dict[str, Entry],
    table: list[Pair],
    config: ModelConfig,
    to: Format,
    mtp_layer: int,
    contents: bool,
) -> list[str]:
    """Compare the source with what the recipe needs; return the names that are no weights."""
    wanted: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {}
    for p in table:
        if to == "hf":
            wanted[p.ours] = p.shape
        else:
            wanted |= dict.fromkeys(p.hf, p.hf_shape)
            optional |= dict.fromkeys((*p.copies, *p.spare), p.hf_shape)
    state = OUR_STATE if to == "hf" else HF_STATE
    ignored = {n for n in entries if state.fullmatch(n)}
    if to == "telechat":
        ignored |= {
            n
            for n in empty_shared_experts(config, mtp_layer)
            if n in entries and not entries[n].nbytes
        }
    unknown = [n for n in entries if n not in wanted and n not in optional and n not in ignored]
    missing = [n for n in wanted if n not in entries]
    problems = [f"unknown tensor {n}" for n in _folded(unknown)]
    problems += [f"missing tensor {n}" for n in _folded(missing)]
    for name, shape in (wanted | optional).items():
        if name in entries:
            problems += _mismatch(name, entries[name], shape)
    if contents and not problems:
        problems = _differences(entries, table, config, to)
    if problems:
        other = {name for p in table for name in ((p.ours,) if to == "telechat" else p.hf)}
        hint = ""
        if missing and unknown and other <= entries.keys():
            hint = f"\nThe source already has the names of format {to!r}."
        raise WeightsError(source, problems, hint)
    return sorted(ignored)


def _folded(names: list[str]) -> list[str]:
    """Return names, those that differ only in the expert in one line with the experts listed."""
    experts: dict[str, list[int]] = {}
    for name in names:
        match = re.search(r"\.experts\.(\d+)\.", name)
        key = name if match is None else name.replace(match[0], ".experts.*.", 1)
        experts.setdefault(key, []).extend([] if match is None else [int(match[1])])
    lines: list[str] = []
    for key, found in experts.items():
        if len(found) == 1:
            lines.append(key.replace(".*.", f".{found[0]}."))
        else:
            lines.append(f"{key} (* = {ranges_text(sorted(found))})" if found else key)
    return lines


def _mismatch(name: str, entry: Entry, shape: tuple[int, ...]) -> list[str]:
    problems: list[str] = []
    if entry.shape != shape:
        problems.append(f"{name} has shape {list(entry.shape)}, the recipe needs {list(shape)}")
    if entry.dtype not in BYTES_OF_DTYPE:
        known = ", ".join(BYTES_OF_DTYPE)
        problems.append(f"{name} has type {entry.dtype}; weights must be one of {known}")
    return problems


def _differences(
    entries: dict[str, Entry], table: list[Pair], config: ModelConfig, to: Format
) -> list[str]:
    """Return what is wrong with contents; names, shapes and types are right already."""
    problems: list[str] = []
    for p in table:
        if p.is_bias and not config.moe_router_enable_expert_bias:
            name = p.ours if to == "hf" else p.hf[0]
            if entries[name].read().any():
                problems.append(f"{name} is not 0, but moe_router_enable_expert_bias is False")
        if to == "hf":
            continue
        dtypes = Counter(entries[n].dtype for n in p.hf)
        if len(dtypes) > 1:
            kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
            problems.append(f"{_folded(list(p.hf))[0]} are of different types: {kinds}")
        for copy in (*p.copies, *p.spare):
            if copy in entries and not _equal(entries[copy], entries[p.hf[0]]):
                problems.append(f"{copy} differs from {p.hf[0]}; this model shares the two")
    return problems


def _equal(a: Entry, b: Entry) -> bool:
    if a.dtype != b.dtype:
        return False
    return all(np.array_equal(x, y) for x, y in zip(a.chunks(), b.chunks(), strict=True))


# ------------------------------------------------------------------------------------- converting


def _to_hf(table: list[Pair], entries: dict[str, Entry]) -> Iterator[Output]:
    for p in table:
        entry = entries[p.ours]
        if not p.stacked:
            for name in (*p.hf, *p.copies):
                yield Output(name, entry.dtype, p.hf_shape, entry.chunks)
            continue
        _, rows, columns = p.shape
        size = entry.nbytes // p.shape[0]
        for j, name in enumerate(p.hf):
            yield Output(
                name,
                entry.dtype,
                p.hf_shape,
                lambda e=entry, at=j * size, n=size, r=rows, c=columns: [
                    _transposed(e.read(at, n), r, c)
                ],
            )


def _to_ours(table: list[Pair], entries: dict[str, Entry]) -> Iterator[Output]:
    for p in table:
        parts = [entries[name] for name in p.hf]
        if p.stacked:
            rows, columns = p.hf_shape
            yield Output(
                p.ours,
                parts[0].dtype,
                p.shape,
                lambda parts=parts, r=rows, c=columns: (_transposed(e.read(), r, c) for e in parts),
            )
        else:
            yield Output(p.ours, parts[0].dtype, p.shape, parts[0].chunks)


def _transposed(raw: Bytes, rows: int, columns: int) -> Bytes:
    """Return the bytes of a ``[rows, columns]`` matrix transposed."""
    matrix = raw.view(f"u{raw.nbytes // (rows * columns)}").reshape(rows, columns)
    return np.ascontiguousarray(matrix.T).reshape(-1).view(np.uint8)


def _main_dtype(outputs: list[Output]) -> str:
    size: Counter[str] = Counter()
    for output in outputs:
        size[output.dtype] += output.nbytes
    return size.most_common(1)[0][0]
