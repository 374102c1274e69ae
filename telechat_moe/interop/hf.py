"""Convert weights between this package and Hugging Face's DeepseekV3ForCausalLM, bit for bit.

``telechat-moe convert SRC DST --recipe RECIPE --to hf`` runs :func:`convert`. Tensors stream from
file to file; the most that is in memory at once is one matrix of one expert, twice, or 16 MiB. See
:mod:`telechat_moe.interop.names` for what is transposed, renamed or written twice.
"""

import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from telechat_moe import tensor_files
from telechat_moe.checkpoint import manifest
from telechat_moe.checkpoint import weights as checkpoint_weights
from telechat_moe.checkpoint.weights import ProblemHandler, finite, refuse
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.files import Progress, require_checksums
from telechat_moe.interop import fp8, mindformers_tensors
from telechat_moe.interop.names import (
    HF_STATE,
    OUR_STATE,
    WeightNames,
    empty_shared_experts,
    first_mtp_layer,
    mtp_layers,
    pairs,
)
from telechat_moe.interop.writing import Destination
from telechat_moe.recipe import ModelConfig, Recipe, hugging_face
from telechat_moe.recipe.hugging_face import CONFIG, ModelDifference, OtherModelError, hf_config
from telechat_moe.tensor_files import (
    BYTES_OF_DTYPE,
    Array,
    Bytes,
    TensorEntry,
    TensorOutput,
    read_entries,
)
from telechat_moe.units import ranges_text

Format = Literal["hf", "telechat"]

SHARD_BYTES = 5_000_000_000
_LABELS = {"hf": "pt", "telechat": "telechat-moe"}  # transformers reads files labelled "pt"
_TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MTP_LOSS_FACTOR = 0.3  # DeepSeek-V3, section 4.2, for the first 10T tokens
_SHOWN = 8
_LATENT_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says


class WeightsError(BadInputError):
    """A checkpoint does not hold the tensors of the recipe's model (exit code 3).

    Attributes:
        problems: One line for each tensor that is unknown, missing or not as expected.
    """

    def __init__(self, source: Path, problems: list[str], hint: str = "") -> None:
        self.problems = problems
        text = f"{source}: {len(problems)} problem(s), nothing was written:\n  "
        self.hint = hint
        super().__init__(text + "\n  ".join(problems) + (hint and f"\n{hint}"))


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        parameters: Number of weights of the model, each counted once.
        dtypes: Number of tensors written of each data type.
        ignored: Tensors of the source that are no weights.
        notes: Where Hugging Face's model computes something else than ours with these weights, what was not copied bit
            for bit or not judged, and which tensors hold NaN or infinite values.
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
        src: Safetensors file, folder with one or with an index, or folder of a training checkpoint, MindFormers' too.
        dst: Folder, or a name that ends in ``.safetensors`` for one file without config.json. Must
            not exist; appears only when it is complete.
        to: ``hf``: ``src`` has our names or MindFormers'; ``telechat``: Hugging Face's or MindFormers'.
        shard_bytes: Largest file in a folder, in bytes of tensors; a larger tensor gets its own file.

    Raises:
        WeightsError: If a tensor is unknown, missing, of wrong shape or type, or a copy differs.
        BadInputError: If ``src`` is unreadable or changed, or Hugging Face cannot hold the model.
        UsageError: If ``dst`` exists, or another process is writing it.
        TelechatMoeError: If writing failed; ``dst`` was not made.
    """
    src, dst = Path(src), Path(dst)
    if dst.exists() or dst.is_symlink():
        raise UsageError(f"{dst} exists; remove it or name another destination")
    notes: list[str] = []
    entries = mindformers_tensors.weights_of(src, model_config)
    if entries is not None and to == "telechat":
        notes.append(f"{src}: {checkpoint_weights.NO_SETTINGS}")
        checkpoint_weights.outputs_of(src, entries, model_config, verify=True, notes=notes)
        sources = sorted({entry.file for entry in entries.values()})
        opened = _Source(entries, sources, [], [], notes)
    else:
        opened = _open(src, entries or _read(src, model_config), model_config, to, notes)
    scan = _Scan()
    outputs, extra = _outputs(opened, model_config, to, scan.odd.append)
    outputs = scan.recorded(outputs)
    largest = 1 << 62 if dst.suffix == ".safetensors" else shard_bytes
    shards = tensor_files.split(outputs, largest)
    if len(shards) > 1:
        extra[tensor_files.INDEX] = tensor_files.index_of(shards)
    destination = Destination(dst, src, opened.files, shards, extra, _LABELS[to], progress)
    files, resumed = destination.write()
    return Conversion(
        source=str(src),
        destination=str(dst),
        to=to,
        files=files,
        tensors=len(outputs),
        parameters=sum(math.prod(p.shape) for p in pairs(model_config) if not p.is_bias),
        total_bytes=sum(o.nbytes for o in outputs),
        dtypes=dict(Counter(o.dtype for o in outputs)),
        ignored=opened.ignored,
        notes=opened.notes + scan.notes(outputs),
        resumed_files=resumed,
    )


def weights(
    source: Path, config: ModelConfig, *, verify: bool = True, notes: list[str] | None = None
) -> list[TensorOutput]:
    """Return the weights of a model, all that it has and no others, from any format.

    The names of the tensors tell which: ours, MindFormers', or Hugging Face's, which :func:`convert` writes.

    Args:
        verify: Compare the files with their checksums, and weights that must be equal; False: names, shapes, types,
            config.json and the beginning of the contents are looked at.
        notes: Receives what is not judged, and where Hugging Face's model computes something else.

    Raises:
        OtherModelError: A config.json says that the weights are of another model.
        BadInputError: Nothing readable is there, or it does not fit the model; says how.
    """
    notes = [] if notes is None else notes
    if (source / CONFIG).is_file() and not list(source.glob("*.safetensors")):
        files = ", ".join(sorted(p.name for p in source.iterdir())[:5])
        raise BadInputError(
            f"{source} is a Hugging Face folder without safetensors ({files}); download them, or convert its files "
            "with transformers (save_pretrained)"
        )
    if (of_mindformers := mindformers_tensors.weights_of(source, config)) is not None:
        notes.append(f"{source}: {checkpoint_weights.NO_SETTINGS}")
        return checkpoint_weights.outputs_of(
            source, of_mindformers, config, verify=verify, notes=notes
        )
    if (source / manifest.FILE).is_file() or not _is_hf(entries := read_entries(source)):
        settings(source, config, notes)
        return checkpoint_weights.own_weights(source, config, verify=verify, notes=notes)
    if verify:
        require_checksums(source)
    try:
        opened = _open(source, entries, config, "telechat", notes, contents=verify)
    except WeightsError as error:
        raise checkpoint_weights.unfit(source, error.problems, error.hint) from None
    outputs = list(_to_ours(opened.table, opened.entries))
    if not verify:
        checkpoint_weights.glance(outputs, notes)
    return outputs


def settings(
    source: Path, config: ModelConfig, notes: list[str], *, hf: bool = False
) -> hugging_face.HfConfig | None:
    """Compare the settings that stand beside weights with the recipe's model; return the config.json, if there is one.

    Args:
        hf: The tensors have Hugging Face's names.

    Raises:
        OtherModelError: The two are not of one model; names every difference.
    """
    file = hugging_face.config_beside(source) if hf or source.is_dir() else None
    if file is None:
        if checkpoint_weights.trained_with(source) is None:
            notes.append(f"{source}: {checkpoint_weights.NO_SETTINGS}")
        return None
    hf_settings = hugging_face.read(file)
    if differing := hugging_face.differences(hf_settings, config):
        raise OtherModelError(differing)
    notes += hf_settings.notes
    if hf_settings.longest is not None and hf_settings.longest < config.seq_length:
        notes.append(
            f"{file}: max_position_embeddings {hf_settings.longest} is less than the recipe's seq_length {config.seq_length}"
        )
    return hf_settings


def fitting(source: Path, recipe: Recipe) -> list[str]:
    """Return the overrides with which a recipe's model is that of a Hugging Face folder.

    Raises:
        OtherModelError: No recipe can say what its config.json says.
        BadInputError: There is none.
    """
    file = hugging_face.config_beside(source)
    if file is None:
        text = f"no {CONFIG} beside the weights, so no recipe follows from it"
        raise BadInputError(f"{source}: {text}")
    hf_settings, config = hugging_face.read(file), recipe.model_config
    if hf_settings.refused:
        raise OtherModelError(hugging_face.differences(hf_settings, config))
    section = recipe.given["model"]["model_config"]
    overrides = list(hugging_face.overrides(hf_settings, config, section))
    if (depth := mtp_layers(read_entries(source))) != config.num_nextn_predict_layers:
        overrides.append(f"model.model_config.num_nextn_predict_layers={depth}")
        if depth and config.mtp_loss_factor is None:
            overrides.append(f"model.model_config.mtp_loss_factor={_MTP_LOSS_FACTOR}")
    return overrides


def _is_hf(entries: Mapping[str, TensorEntry]) -> bool:
    return any(name.startswith("model.") for name in entries)


def _read(source: Path, config: ModelConfig) -> dict[str, TensorEntry]:
    """Return the tensors of a source; a checkpoint must be of a model that computes the same."""
    before = checkpoint_weights.trained_with(source)
    if before is not None and (differing := hugging_face.changed(before, config)):
        raise OtherModelError(differing)
    return checkpoint_weights.read_weights(source)


class _Source(NamedTuple):
    """Tensors that were opened: their files, the table that maps them, the names that are no weights, and notes."""

    entries: dict[str, TensorEntry]
    files: list[Path]
    table: list[WeightNames]
    ignored: list[str]
    notes: list[str]


def _open(
    src: Path,
    entries: dict[str, TensorEntry],
    config: ModelConfig,
    to: Format,
    notes: list[str],
    *,
    contents: bool = True,
) -> _Source:
    """Compare a source with what the recipe needs, its settings first."""
    hf_settings = settings(src, config, notes, hf=to == "telechat" and _is_hf(entries))
    _check_expressible(config, to)
    files = sorted({entry.file for entry in entries.values()})
    notes += _notes(config, to)
    mtp_layer = config.num_hidden_layers
    if to == "telechat":
        mtp_layer = first_mtp_layer(entries, config)
        if _is_hf(entries) and (depth := mtp_layers(entries)) != config.num_nextn_predict_layers:
            text = f"{config.num_nextn_predict_layers}, but {src} holds {depth} MTP layers (model.layers.*.enorm.weight)"
            key = "num_nextn_predict_layers"
            raise OtherModelError([ModelDifference(key, text, f"set it to {depth}")])
        entries = _dequantised(src, entries, hf_settings.block if hf_settings else fp8.BLOCK, notes)
    table = pairs(config, mtp_layer)
    hint = ""
    if to == "telechat" and not hf_settings:
        hint = f"There is no {CONFIG} that says which model they are of."
    ignored = _check(src, entries, table, config, to, mtp_layer, contents, hint)
    return _Source(entries, files, table, ignored, notes)


def _dequantised(
    source: Path, entries: dict[str, TensorEntry], block: tuple[int, int], notes: list[str]
) -> dict[str, TensorEntry]:
    """Return the tensors with FP8 matrices read as bfloat16; add a note if there are any."""
    entries, problems = fp8.dequantised(entries, block)
    if problems:
        raise WeightsError(source, problems)
    if quantised := sum(isinstance(entry, fp8.Fp8Entry) for entry in entries.values()):
        notes.append(
            f"{quantised} FP8 matrices times their block scales were rounded to bfloat16; activations are not rounded to FP8 here"
        )
    return entries


class _Scan:
    """Which tensors of a conversion hold NaN or infinite values."""

    def __init__(self) -> None:
        self.odd: list[str] = []
        self.read: set[str] = set()

    def recorded(self, outputs: list[TensorOutput]) -> list[TensorOutput]:
        """Return tensors that are recorded when they are read."""
        return [replace(output, chunks=partial(self._chunks, output)) for output in outputs]

    def _chunks(self, output: TensorOutput) -> Iterable[Bytes]:
        self.read.add(output.name)
        return output.chunks()

    def notes(self, outputs: list[TensorOutput]) -> list[str]:
        """Return a note for each tensor; those in files that an interrupted conversion had finished are read again."""
        for output in outputs:
            if output.name not in self.read:
                deque(output.chunks(), 0)
        odd = list(dict.fromkeys(self.odd))
        suffix = [f"{len(odd) - _SHOWN} more tensors hold NaN or infinite values"]
        return odd[:_SHOWN] + (suffix if len(odd) > _SHOWN else [])


def _outputs(
    opened: _Source, config: ModelConfig, to: Format, report: ProblemHandler
) -> tuple[list[TensorOutput], dict[str, dict[str, Any]]]:
    """Return the tensors to write, and the JSON files to write beside them."""
    if to == "telechat":
        outputs = list(_to_ours(opened.table, opened.entries, report))
        if not opened.table:  # they have our names already
            outputs = [
                TensorOutput(n, e.dtype, e.shape, partial(finite, n, e, report=report))
                for n, e in opened.entries.items()
            ]
        return outputs, {checkpoint_weights.MODEL_CONFIG: asdict(config)}
    outputs = list(_to_hf(opened.table, opened.entries, report))
    dtype = _main_dtype(outputs)
    empty = empty_shared_experts(config)
    outputs += [TensorOutput(name, dtype, shape, list) for name, shape in empty.items()]
    return outputs, {CONFIG: hf_config(config, _TORCH_DTYPES[dtype])}


# ---------------------------------------------------------------------------------------- checking


def _check_expressible(config: ModelConfig, to: Format) -> None:
    problems: list[str] = []
    if (kind := config.position_embedding_type) != "rope":
        problem = f"position_embedding_type is {kind}, whose scaling this package does not write"
        problems.append(problem)
    best = hugging_face.best_of_group(config.num_experts_per_tok, config.n_group, config.topk_group)
    if to == "hf" and best not in (None, 2):
        problems.append(
            f"a group of experts is ranked by its best {best} (num_experts_per_tok / topk_group), but there by its best 2"
        )
    if not config.qk_layernorm:
        problems.append("qk_layernorm is False, but there the latents always have an RMSNorm")
    width, unit = config.shared_width, config.moe_intermediate_size
    if width % unit:
        key = f"moe_shared_expert_intermediate_size ({width})"
        problems.append(f"{key} must be a multiple of moe_intermediate_size ({unit})")
    if config.n_group > 1 and config.n_routed_experts // config.n_group < 2:
        problems.append("a group has 1 expert, but there it needs at least 2")
    if problems:
        text = "Hugging Face's DeepseekV3ForCausalLM cannot hold the recipe's model:"
        raise BadInputError("\n  ".join([text, *problems]))


def _notes(config: ModelConfig, to: Format) -> list[str]:
    notes: list[str] = []
    if config.rms_norm_eps != _LATENT_EPS:
        notes.append(
            f"transformers normalises the query and key/value latents with eps {_LATENT_EPS:g}, "
            f"this recipe with rms_norm_eps {config.rms_norm_eps:g}; logits differ, the more the smaller the latents"
        )
    if 0 < config.topk_group < config.n_group:
        notes.append(
            "transformers 4 masks the experts of dropped groups with 0; 5 and this model with -inf; they differ "
            "where a kept expert's biased score is negative"
        )
    if config.num_nextn_predict_layers and to == "hf":
        notes.append("transformers ignores the MTP layers, and warns of unexpected tensors")
    return notes


def _check(
    source: Path,
    entries: dict[str, TensorEntry],
    table: list[WeightNames],
    config: ModelConfig,
    to: Format,
    mtp_layer: int,
    contents: bool,
    hint: str,
) -> list[str]:
    """Compare the source with what the recipe needs; return the names that are no weights."""
    needed: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {}
    for p in table:
        if to == "hf":
            needed[p.name] = p.shape
        else:
            needed |= dict.fromkeys(p.hf, p.hf_shape)
            optional |= dict.fromkeys((*p.copies, *p.spare), p.hf_shape)
    state = OUR_STATE if to == "hf" else HF_STATE
    ignored = {n for n in entries if state.fullmatch(n)}
    if to == "telechat":
        empty = empty_shared_experts(config, mtp_layer)
        ignored |= {n for n in empty if n in entries and not entries[n].nbytes}
    unknown = [n for n in entries if n not in needed and n not in optional and n not in ignored]
    missing = [n for n in needed if n not in entries]
    problems = [f"unknown tensor {n}" for n in _folded(unknown)]
    problems += [f"missing tensor {n}" for n in _folded(missing)]
    for name, shape in (needed | optional).items():
        if name in entries:
            problems += _mismatch(name, entries[name], shape)
    if not problems:
        problems = _differences(entries, table, config, to, contents)
    if problems:
        other = {name for p in table for name in ((p.name,) if to == "telechat" else p.hf)}
        if missing and unknown and other <= entries.keys():
            hint = f"The source already has the names of format {to!r}."
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
    for key, numbers in experts.items():
        if len(numbers) == 1:
            lines.append(key.replace(".*.", f".{numbers[0]}."))
        else:
            lines.append(f"{key} (* = {ranges_text(sorted(numbers))})" if numbers else key)
    return lines


def _mismatch(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> list[str]:
    problems: list[str] = []
    if entry.shape != shape:
        problems.append(f"{name} has shape {list(entry.shape)}, the recipe needs {list(shape)}")
    if entry.dtype not in BYTES_OF_DTYPE:
        types = ", ".join(BYTES_OF_DTYPE)
        problems.append(f"{name} has type {entry.dtype}; weights must be one of {types}")
    return problems


def _differences(
    entries: dict[str, TensorEntry],
    table: list[WeightNames],
    config: ModelConfig,
    to: Format,
    entire: bool,
) -> list[str]:
    """Return what is wrong with contents; names, shapes and types are right already.

    Args:
        entire: Compare all of two tensors that must be equal; False: their first 16 MiB.
    """
    problems: list[str] = []
    for p in table:
        if p.is_bias and not config.moe_router_enable_expert_bias:
            name = p.name if to == "hf" else p.hf[0]
            if entries[name].read().any():
                problems.append(f"{name} is not 0, but moe_router_enable_expert_bias is False")
        if to == "hf":
            continue
        dtypes = Counter(entries[n].dtype for n in p.hf)
        if len(dtypes) > 1:
            kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
            problems.append(f"{_folded(list(p.hf))[0]} are of different types: {kinds}")
        for copy in (*p.copies, *p.spare):
            if copy in entries and not _equal(entries[copy], entries[p.hf[0]], entire):
                problems.append(f"{copy} differs from {p.hf[0]}; this model shares the two")
    return problems


def _equal(a: TensorEntry, b: TensorEntry, entire: bool) -> bool:
    if a.dtype != b.dtype:
        return False
    chunks = islice(zip(a.chunks(), b.chunks(), strict=True), None if entire else 1)
    return all(np.array_equal(x, y) for x, y in chunks)


# ------------------------------------------------------------------------------------- converting


def _to_hf(
    table: list[WeightNames], entries: dict[str, TensorEntry], report: ProblemHandler = refuse
) -> Iterator[TensorOutput]:
    for p in table:
        entry = entries[p.name]
        for j, name in enumerate((*p.hf, *p.copies)):
            chunks = partial(finite, p.name, entry, report=report)
            if p.stacked:
                chunks = partial(_expert, p, entry, j, report)
            yield TensorOutput(name, entry.dtype, p.hf_shape, chunks)


def _expert(
    p: WeightNames, entry: TensorEntry, number: int, report: ProblemHandler
) -> Iterator[Bytes]:
    size = entry.nbytes // p.shape[0]
    offset = number * size
    for raw in finite(p.name, entry, [entry.read(offset, size)], offset, report):
        yield _transposed(raw, p.shape[1:])


def _to_ours(
    table: list[WeightNames], entries: dict[str, TensorEntry], report: ProblemHandler = refuse
) -> Iterator[TensorOutput]:
    for p in table:
        parts = {name: entries[name] for name in p.hf}
        name, first = next(iter(parts.items()))
        chunks, read_region = partial(finite, name, first, report=report), first.read_region
        if p.stacked:
            chunks = partial(_stack, p, parts, report)
            read_region = partial(_stacked_region, list(parts.values()))
        yield TensorOutput(p.name, first.dtype, p.shape, chunks, read_region)


def _stack(
    p: WeightNames, experts: Mapping[str, TensorEntry], report: ProblemHandler
) -> Iterator[Bytes]:
    for name, entry in experts.items():
        for raw in finite(name, entry, [entry.read()], report=report):
            yield _transposed(raw, p.hf_shape)


def _stacked_region(experts: Sequence[TensorEntry], region: Sequence[tuple[int, int]]) -> Array:
    """Return a region of the stack ``[E, inputs, outputs]`` of experts that are ``[outputs, inputs]`` each."""
    (first, last), inputs, outputs = region
    matrices = [entry.read_region((outputs, inputs)).T for entry in experts[first:last]]
    return np.stack(matrices)


def _transposed(raw: Bytes, shape: tuple[int, ...]) -> Bytes:
    matrix = raw.view(f"u{raw.nbytes // math.prod(shape)}").reshape(shape)
    return np.ascontiguousarray(matrix.T).reshape(-1).view(np.uint8)


def _main_dtype(outputs: list[TensorOutput]) -> str:
    size: Counter[str] = Counter()
    for output in outputs:
        size[output.dtype] += output.nbytes
    return size.most_common(1)[0][0]
