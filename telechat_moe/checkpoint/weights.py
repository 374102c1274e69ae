"""Read weights tensor by tensor from any source, also from a checkpoint that several ranks wrote together."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import numpy as np
from numpy.typing import NDArray

from telechat_moe.checkpoint import checkpoint, manifest
from telechat_moe.checkpoint.manifest import Region
from telechat_moe.checkpoint.stored import merged_region, tensors_of
from telechat_moe.errors import BadInputError
from telechat_moe.files import require_checksums
from telechat_moe.narrowing import short
from telechat_moe.reading import MALFORMED, read_object
from telechat_moe.recipe import ModelConfig
from telechat_moe.recipe.hugging_face import changed, of_recipe
from telechat_moe.recipe.weights import weights
from telechat_moe.tensor_files import (
    BYTES_OF_DTYPE,
    READ_BYTES,
    Array,
    Bytes,
    TensorEntry,
    TensorOutput,
    read_entries,
)

# Zero between steps, or of an analysis (`analysis.observe`).
TRANSIENT = ("expert_load", "dropped", "main_grad", "observed", "source_sums")
MODEL_CONFIG = "model_config.json"
"""The recipe's model section, beside weights that ``convert`` wrote."""

NO_SETTINGS = "no config.json beside the weights; names and shapes are compared, not what they do not show (rope_theta, eps, routing)"
_SHOWN = 4
ProblemHandler = Callable[[str], None]
_GLANCE_BYTES = 256 << 20
_SCANNED = 1 << 17
_PARTS = {
    "F32": (np.dtype("<u4"), 0x7F800000, 0x7FFFFF),
    "BF16": (np.dtype("<u2"), 0x7F80, 0x7F),
    "F16": (np.dtype("<u2"), 0x7C00, 0x3FF),
}
"""Bits of a type, those of its exponent, all ones in NaN and infinity, and those of its fraction, 0 in infinity."""


class ReadWeights(Protocol):
    """What finds the weights of a model in a file or folder: :func:`own_weights`, or one that knows more formats."""

    def __call__(
        self,
        source: Path,
        config: ModelConfig,
        *,
        verify: bool = True,
        notes: list[str] | None = None,
    ) -> list[TensorOutput]:
        """See :func:`own_weights`."""
        ...


def is_transient(name: str) -> bool:
    """Return whether a parameter is zero between steps and so belongs in no checkpoint."""
    return name.split(".")[-1] in TRANSIENT


def own_weights(
    source: Path, config: ModelConfig, *, verify: bool = True, notes: list[str] | None = None
) -> list[TensorOutput]:
    """Return the weights of a model, all that it has and no others; their bytes are read later.

    The source has this package's names: a safetensors file, a folder with an index, or a training checkpoint.

    Args:
        verify: Compare the files with their checksums; False: names, shapes, types and the beginning of the contents are
            looked at.
        notes: Receives what a checkpoint was trained with that the recipe's model computes in another way.

    Raises:
        BadInputError: Nothing readable is there, or it does not fit the model; says how.
    """
    notes = [] if notes is None else notes
    if verify:
        require_checksums(source)
    if before := trained_with(source):
        notes += [f"{source}: {d.key} is {d.found}" for d in changed(before, config)]
    stored = read_weights(source, verify=verify)
    entries = {name: entry for name, entry in stored.items() if not is_transient(name)}
    return outputs_of(source, entries, config, verify=verify, notes=notes)


def outputs_of(
    source: Path,
    entries: Mapping[str, TensorEntry],
    config: ModelConfig,
    *,
    verify: bool,
    notes: list[str],
) -> list[TensorOutput]:
    """Return tensors of this package's names as the weights of a model, all that it has and no others.

    Raises:
        BadInputError: They do not fit the model; says how.
    """
    shapes = {w.name: w.shape for w in weights(config)}
    problems = differing_shapes(entries, shapes)
    for name in shapes.keys() & entries.keys():
        if (dtype := entries[name].dtype) not in BYTES_OF_DTYPE:
            problems.append(f"{name} is {dtype}, weights are one of {', '.join(BYTES_OF_DTYPE)}")
    if problems:
        raise unfit(source, sorted(problems))
    outputs = [
        TensorOutput(
            n, entries[n].dtype, shape, partial(finite, n, entries[n]), entries[n].read_region
        )
        for n, shape in shapes.items()
    ]
    if not verify:
        glance(outputs, notes)
    return outputs


def differing_shapes(
    entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return a text for each tensor that is missing, unknown or of another shape than expected, sorted."""
    problems = [f"{name} is missing" for name in shapes.keys() - entries.keys()]
    problems += [f"{name} is unknown" for name in entries.keys() - shapes.keys()]
    problems += [
        f"{name} is {list(entries[name].shape)} instead of {list(shapes[name])}"
        for name in shapes.keys() & entries.keys()
        if entries[name].shape != tuple(shapes[name])
    ]
    return sorted(problems)


def trained_with(source: Path) -> ModelConfig | None:
    """Return the model section of a training checkpoint, or of a folder that ``convert`` wrote; None: of neither.

    Raises:
        BadInputError: It cannot be read.
    """
    file = source / MODEL_CONFIG
    try:
        if (source / manifest.FILE).is_file():
            file, state = source / manifest.FILE, manifest.read(source).get("state", {})
            return _model_config(state["model_config"]) if "model_config" in state else None
        return _model_config(read_object(file)) if file.is_file() else None
    except MALFORMED as error:
        finding = f"{file}: no model section ({error}); convert the weights again"
        raise BadInputError(finding) from error


def _model_config(section: Mapping[str, Any]) -> ModelConfig:
    types = get_type_hints(ModelConfig)
    if lacks := {"vocab_size", "hidden_size", "num_hidden_layers"} - set(section):
        raise ValueError(f"it has no {min(lacks)}")
    for key, kind in types.items():
        kinds = (int, float) if kind is float else (kind,)
        if kind in (int, float, bool) and key in section and type(section[key]) not in kinds:
            raise ValueError(f"{key} is {short(section[key])!r}")
    config = ModelConfig(**{key: value for key, value in section.items() if key in types})
    of_recipe(config)  # fails for values of other types
    return config


def refuse(problem: str) -> None:
    """Refuse weights that are not finite; what :func:`finite` does by default."""
    raise BadInputError(
        f"{problem}; weights that are all finite, such as an earlier checkpoint or a new download"
    )


def finite(
    name: str,
    entry: TensorEntry,
    pieces: Iterable[Bytes] | None = None,
    begin: int = 0,
    report: ProblemHandler = refuse,
) -> Iterator[Bytes]:
    """Yield the bytes of a tensor; after the last, report how many of its values are NaN or infinite, if any.

    Args:
        pieces: Bytes of the tensor in order; None: all.
        begin: Where they begin, in bytes.
        report: Receives file, name, counts and the index of the first.
    """
    bits, exponent, fraction = _PARTS[entry.dtype]
    place, nan, odd, first = begin // bits.itemsize, 0, 0, -1
    for piece in entry.chunks() if pieces is None else pieces:
        values = piece.view(bits)
        if _any_odd(values, exponent):
            is_odd = (values & exponent) == exponent
            odd += int(is_odd.sum())
            nan += int((is_odd & ((values & fraction) != 0)).sum())
            first = place + int(is_odd.argmax()) if first < 0 else first
        place += len(values)
        yield piece
    if odd:
        index = [int(i) for i in np.unravel_index(first, entry.shape)]
        report(
            f"{entry.file}: {name} holds {nan:,} NaN and {odd - nan:,} infinite values, the first at {index}"
        )


def _any_odd(values: NDArray[Any], exponent: int) -> bool:
    """Return whether all bits of an exponent are ones anywhere; in blocks, as a large copy takes longer than reading."""
    block = np.empty(_SCANNED, values.dtype)
    for begin in range(0, len(values), _SCANNED):
        part = values[begin : begin + _SCANNED]
        if np.bitwise_and(part, exponent, out=block[: len(part)]).max() == exponent:
            return True
    return False


def glance(outputs: Iterable[TensorOutput], notes: list[str]) -> None:
    """Look for NaN and infinite values in the first tensors; note it if more follow.

    Raises:
        BadInputError: There are; see :func:`refuse`.
    """
    left = _GLANCE_BYTES
    for output in outputs:
        for chunk in output.chunks():
            left -= chunk.nbytes
            if left < 0:
                notes.append(
                    f"NaN and infinite weights: looked at the first {_GLANCE_BYTES >> 20} MiB"
                )
                return


@dataclass(frozen=True)
class ShardedEntry(TensorEntry):
    """A tensor whose shards are in several files; it is put together in memory, one tensor at a time.

    Attributes:
        shards: Each shard and its (begin, end) in every dimension of the tensor.
    """

    shards: tuple[tuple[TensorEntry, Region], ...] = ()

    def read(self, offset: int = 0, count: int | None = None) -> Bytes:
        """See :meth:`TensorEntry.read`."""
        data = self._merge_shards()
        return data[offset : len(data) if count is None else offset + count]

    def chunks(self) -> Iterator[Bytes]:
        """See :meth:`TensorEntry.chunks`."""
        data = self._merge_shards()
        for offset in range(0, len(data), READ_BYTES):
            yield data[offset : offset + READ_BYTES]

    def read_region(self, region: Sequence[tuple[int, int]]) -> Array:
        """See :meth:`TensorEntry.read_region`."""
        return merged_region(self.shards, tuple(region))

    def _merge_shards(self) -> Bytes:
        width = self.nbytes // max(math.prod(self.shape), 1)
        data = np.empty((*self.shape, width), np.uint8)
        for shard, region in self.shards:
            target = data[manifest.slices(region)]
            target[...] = shard.read().reshape(target.shape)
        return data.reshape(-1)


def unfit(source: Path, problems: Sequence[str], hint: str = "") -> BadInputError:
    """Return the error that says in one line how weights do not fit a model, and a hint at the reason."""
    others = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return BadInputError(
        f"{source} does not fit the model: {', '.join(problems[:_SHOWN])}{others}; weights of the recipe's model, or a "
        f"model section that says what these are of. {hint}".rstrip(" .")
    )


def read_weights(
    source: Path, *, verify: bool = True, group: str = "model"
) -> dict[str, TensorEntry]:
    """Return the weights of a training checkpoint, which is verified first, or of another file or folder.

    Args:
        verify: False: of a checkpoint, only look at the names and sizes of its files.
        group: Group of a checkpoint.

    Raises:
        BadInputError: If nothing readable is there; says what was found.
    """
    if not (source / manifest.FILE).is_file():
        return read_entries(source)
    if verify:
        checkpoint.verify(source)
    elif problem := manifest.incomplete(source):
        raise problem
    entries: dict[str, TensorEntry] = {}
    for name, tensor in tensors_of(source, manifest.read(source)).items():
        if tensor.group == group:
            first, nbytes = tensor.shards[0][0], sum(part.nbytes for part, _ in tensor.shards)
            about = first.file, first.dtype, tensor.shape, first.start, nbytes
            single = len(tensor.shards) == 1
            entries[name] = first if single else ShardedEntry(*about, tensor.shards)
    return entries
