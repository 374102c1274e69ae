"""Merge a dump of many ranks into one of whole tensors, as a run on one device would have written it.

A tensor's layout is the one in its records, else the one that the caller gives (:class:`LayoutDescription`); without either, tensors
whose bits are equal on all their ranks are copies. A tensor whose shards contradict its layout is not merged, but reported.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.numerics import WIDENED, is_float
from telechat_moe.reading import MALFORMED, parse_json
from telechat_moe.tools.align.dump.infer_layout import infer
from telechat_moe.tools.align.dump.layout_dict import from_dict
from telechat_moe.tools.align.dump.logical import (
    CopiesDifferError,
    CopyBound,
    Logical,
    Shard,
    logical,
)
from telechat_moe.tools.align.dump.ranges import LayoutError
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorLayout, TensorRecord

MICRO = "micro-batch"
_LATER = [Phase.REDUCTION, Phase.OPTIMIZER]
_KEYS = {"tensors", "stages", "layers", "micro_batches", "batch_axes", "mesh"}
_LAYER = re.compile(r"(?P<head>(?:^|\.)(?:layers|layer|h|blocks))\.(?P<number>\d+)(?=\.|$)")
_CHUNK = re.compile(r"^(Cell|Module)\.(\d+)\.")


class MergedTensor(NamedTuple):
    """The result of merging one tensor."""

    key: str  # key of the call in the merged dump
    place: str  # position of the tensor in the call, such as `output.0`
    ranks: tuple[int, ...]  # ranks that hold a shard
    how: str  # source of the layout: `dump`, `said`, `inferred`, `copies`, `one rank`, `none`
    copies: str = "none"  # `none`, `bitwise`, `within bound`, `differ`
    # Why it was not merged, or where copies differ; None: it was merged and they do not
    problem: str | None = None
    merged: bool = True  # whether it is in the merged dump


@dataclass(frozen=True)
class LayerNumbers:
    """Which layers each stage and chunk holds, in order.

    Megatron numbers the layers of each stage and chunk from 0; MindSpore uses the numbers of the whole model.

    Raises:
        LayoutError: A layer is on two stages or on none.
    """

    # Global numbers of the layers by (stage, chunk)
    layers: Mapping[tuple[int, int], Sequence[int]]

    def __post_init__(self) -> None:
        owner: dict[int, tuple[int, int]] = {}
        for stage, numbers in self.layers.items():
            for n in numbers:
                if n in owner:
                    raise LayoutError(f"layer {n} is on {_name(owner[n])} and on {_name(stage)}")
                owner[n] = stage
        for n in range(len(owner)):
            if n not in owner:
                raise LayoutError(f"layer {n} of {len(owner)} is on no stage")

    def rename(self, name: str, stage: int, chunk: int = 0) -> str:
        """Return a name with the number of its layer in the whole model; a name without a layer stays as it is.

        ``layers.1.attention`` of chunk 1 on stage 0 is ``layers.5.attention`` with 8 layers on 2 x 2 chunks.

        Raises:
            LayoutError: The stage and chunk hold fewer layers.
        """
        match = _LAYER.search(name)
        if match is None:
            return name
        local, numbers = int(match["number"]), self.layers.get((stage, chunk), ())
        if local >= len(numbers):
            raise LayoutError(
                f"layer {local} of {_name((stage, chunk))}, which hold {len(numbers)} layers"
            )
        return f"{name[: match.start()]}{match['head']}.{numbers[local]}{name[match.end() :]}"


def _name(stage: tuple[int, int]) -> str:
    return f"stage {stage[0]}, chunk {stage[1]}"


@dataclass(frozen=True)
class LayoutDescription:
    """Information that a dump lacks."""

    # TensorLayout and whole shape by a pattern for `KEY PLACE`; the first match counts
    tensors: Mapping[str, tuple[TensorLayout, tuple[int, ...] | None]] = field(
        default_factory=dict[str, tuple[TensorLayout, tuple[int, ...] | None]]
    )
    stages: Mapping[int, int] = field(default_factory=dict[int, int])  # pipeline stage of each rank
    # The layers of each stage, where a stage counts its own from 0
    layers: LayerNumbers | None = None
    # Number of calls of one name and direction on one rank that are micro-batches of one step; 1: none are
    calls: int = 1
    # Axes that shard the batch; a dimension that they shard is also divided into micro-batches within a rank
    batch: tuple[str, ...] = ("dp", "dp_outer", "dp_inner")
    # A run on one device: layouts that are not given are inferred from its shapes and verified
    reference: RankDump | None = None
    # Axes and their lengths for that inference, outermost first; None: unknown
    mesh: Mapping[str, int] | None = None

    @staticmethod
    def read(path: Path) -> "LayoutDescription":
        """Read a JSON file.

        ``tensors``: {pattern: layout, with ``Shape`` where filler hides it}, ``stages``: {rank: stage}, ``layers``:
        {"stage,chunk": [numbers]}, ``micro_batches``: number, ``batch_axes``: [names], ``mesh``: {axis: length}.

        Raises:
            BadInputError: The file does not have that form.
        """
        try:
            content = parse_json(path.read_bytes())
            if unknown := set(content) - _KEYS:
                raise ValueError(f"unknown key {min(unknown)!r}")
            tensors: dict[str, tuple[TensorLayout, tuple[int, ...] | None]] = {}
            for pattern, layout in content.get("tensors", {}).items():
                shape = layout.get("Shape")
                tensors[pattern] = from_dict(layout), None if shape is None else _ints(shape)
            layers: dict[tuple[int, int], tuple[int, ...]] = {}
            for key, numbers in content.get("layers", {}).items():
                stage, chunk = key.split(",")
                layers[int(stage), int(chunk)] = _ints(numbers)
            mesh = {str(a): int(n) for a, n in content.get("mesh", {}).items()}
            return LayoutDescription(
                tensors,
                {int(rank): int(stage) for rank, stage in content.get("stages", {}).items()},
                LayerNumbers(layers) if layers else None,
                int(content.get("micro_batches", 1)),
                tuple(map(str, content.get("batch_axes", LayoutDescription.batch))),
                mesh=mesh if "mesh" in content else None,
            )
        except (LayoutError, OSError, *MALFORMED) as error:
            raise BadInputError(f"{path}: not a description of layouts ({error})") from None

    def of(self, key: str, place: str) -> tuple[TensorLayout, tuple[int, ...] | None] | None:
        """Return the layout and whole shape of a tensor; None: they are not given."""
        return next((x for p, x in self.tensors.items() if fnmatchcase(f"{key} {place}", p)), None)

    def name(self, text: str, rank: int) -> str:
        """Return a name with the global number of its layer, without the number of its chunk."""
        if self.layers is None:
            return text
        chunk = _CHUNK.match(text)
        plain = f"{chunk[1]}.{text[chunk.end() :]}" if chunk else text
        return self.layers.rename(plain, self.stages.get(rank, 0), int(chunk[2]) if chunk else 0)


def _ints(numbers: Any) -> tuple[int, ...]:
    return tuple(map(int, numbers))


class _Part(NamedTuple):
    rank: int
    micro: int
    call: Call


Write = Callable[[str, str, Logical], TensorRecord]
"""Takes a call's key, a position and the tensor; reads the tensor to its end and returns a record of it."""


def merge_ranks(
    ranks: Sequence[RankDump],
    description: LayoutDescription,
    write: Write,
    bound: CopyBound | None = None,
    keep: bool = False,
) -> tuple[RankDump, list[MergedTensor]]:
    """Return the ranks of a step as one, rank 0, without tensors that could not be merged, and what came of each tensor.

    Args:
        keep: Whether to write tensors whose copies differ, too, with the first copy.

    Raises:
        BadInputError: The dump is broken.
    """
    if not ranks:
        raise BadInputError("this step has no ranks")
    outcomes: list[MergedTensor] = []
    calls: dict[str, Call] = {}
    for key, parts in _grouped(ranks, description).items():
        calls[key] = _Merger(key, parts, description, write, bound, keep, outcomes).call()
    first = ranks[0]
    return RankDump(first.step, 0, first.framework, first.task, first.level, calls), outcomes


def into(folder: Path) -> Write:
    """Return a function that writes merged tensors as files of a folder, in the types that dumps have."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0

    def write(key: str, place: str, tensor: Logical) -> TensorRecord:
        nonlocal count
        del key, place
        path = folder / f"{count}.npy"
        count += 1
        dtype = "float64" if tensor.mean and not is_float(tensor.dtype) else tensor.dtype
        tensor.write(path, _stored(dtype))
        return TensorRecord(dtype, tensor.shape, read=lambda: np.load(path, mmap_mode="r"))

    return write


def _stored(dtype: str) -> str | None:
    """Return the NumPy type in which a dump stores a type; None: the type that was read."""
    try:
        return "float32" if dtype in WIDENED else np.dtype(dtype).name
    except TypeError:
        return None


def _grouped(ranks: Sequence[RankDump], description: LayoutDescription) -> dict[str, list[_Part]]:
    """Group calls by name, in the order of one device: forward by stage, backward in reverse."""
    groups_by_key: dict[str, list[_Part]] = {}
    backward_order = sorted(ranks, key=lambda r: (-description.stages.get(r.rank, 0), r.rank))
    orders = (ranks, [Phase.FORWARD]), (backward_order, [Phase.BACKWARD]), (ranks, _LATER)
    for order, phases in orders:
        groups: dict[str, list[_Part]] = {}
        for rank in order:
            for name, part in _parts(rank, description, phases):
                groups.setdefault(name, []).append(part)
        groups_by_key |= groups
    return groups_by_key


def _parts(
    rank: RankDump, description: LayoutDescription, phases: Sequence[Phase]
) -> Iterator[tuple[str, _Part]]:
    totals = Counter((call.name, call.phase) for call in rank.calls.values())
    for key, call in rank.calls.items():
        if call.phase not in phases:
            continue
        micro, name = 0, description.name(key, rank.rank)
        total, calls = totals[call.name, call.phase], description.calls
        if calls > 1 and call.kind != "parameters_grad" and total % calls == 0:
            micro, index = divmod(call.index, total // calls)
            name = _numbered(name, call, index)
        yield name, _Part(rank.rank, micro, call)


def _numbered(key: str, call: Call, index: int) -> str:
    way = call.phase.value
    for form in (".{}." + way, f".{way}." + "{}"):
        if key.endswith(old := form.format(call.index)):
            return key.removesuffix(old) + form.format(index)
    return key


@dataclass
class _Merger:
    key: str
    parts: list[_Part]
    description: LayoutDescription
    write: Write
    bound: CopyBound | None
    keep: bool
    outcomes: list[MergedTensor]

    def call(self) -> Call:
        """Return the call with merged tensors; None replaces tensors that could not be merged."""
        shards: dict[str, list[tuple[_Part, TensorRecord]]] = {}
        for part in self.parts:
            for place, record in part.call.tensors():
                shards.setdefault(place, []).append((part, record))
        merged = {place: self._tensor(place, x) for place, x in shards.items()}
        model = max((p.call for p in self.parts), key=lambda c: len(c.tensors()))
        rank = self.parts[0].rank
        name = self.description.name(model.name, rank)
        parent = None if model.parent is None else self.description.name(model.parent, rank)
        call = model.changed(
            lambda place, value: merged[place] if isinstance(value, TensorRecord) else value,
            results=True,
        )
        return replace(call, key=self.key, name=name, parent=parent)

    def _tensor(self, place: str, records: list[tuple[_Part, TensorRecord]]) -> TensorRecord | None:
        ranks = tuple(sorted({part.rank for part, _ in records}))
        how, copies, problem = "none", "none", "ranks do not agree how it is laid out: no layout"
        layouts: Iterator[tuple[str, TensorLayout, tuple[int, ...] | None]] = iter(())
        if any(record.read is None for _, record in records):
            problem = "values were not dumped, only statistics"
        elif isinstance(told := self._inferred(place, records), str):
            how, problem = "inferred", told
        else:
            layouts = self._layouts(place, records, told)
        shards = [Shard(part.rank, record, part.micro) for part, record in records]
        for how, layout, shape in layouts:
            try:
                tensor = logical(shards, layout, shape, bound=self.bound, keep=self.keep)
                record = self.write(self.key, place, tensor)
            except CopiesDifferError as error:
                unsaid = "no layout is said, and " if how == "copies" else ""
                copies, problem = "differ", unsaid + str(error)
            except LayoutError as error:
                copies, problem = "none", str(error)
            else:
                verdict, differing = tensor.copies.verdict, str(tensor.copies) or None
                self.outcomes.append(MergedTensor(self.key, place, ranks, how, verdict, differing))
                return record
        lost = MergedTensor(self.key, place, ranks, how, copies, problem, merged=False)
        self.outcomes.append(lost)
        return None

    def _inferred(
        self, place: str, records: list[tuple[_Part, TensorRecord]]
    ) -> TensorLayout | str | None:
        """Return a layout inferred from the reference's shape, or why there is none; None: inference is not wanted."""
        reference = self.description.reference
        call = reference.calls.get(self.key) if reference is not None else None
        model = None if call is None else dict(call.tensors()).get(place)
        alone = len({part.rank for part, _ in records}) < len(records) or len(records) < 2
        if model is None or alone or self.description.of(self.key, place) is not None:
            return None
        if any(record.layout is not None for _, record in records):
            return None
        try:
            shards = [Shard(part.rank, record) for part, record in records]
            answer = infer(shards, model.shape, self.description.mesh)
        except LayoutError as error:
            return str(error)
        return answer.reason if answer.layout is None else answer.layout

    def _layouts(
        self, place: str, records: list[tuple[_Part, TensorRecord]], inferred: TensorLayout | None
    ) -> Iterator[tuple[str, TensorLayout, tuple[int, ...] | None]]:
        """Yield the layouts to try, each with its source."""
        told = self.description.of(self.key, place)
        how, layout, shape = "dump", records[0][1].layout, None
        if told is not None:
            how, (layout, shape) = "said", told
        elif inferred is not None:
            how, layout = "inferred", inferred
        elif any(record.layout != layout for _, record in records):
            return
        elif layout is None:
            ranks = tuple(sorted({part.rank for part, _ in records}))
            dims = ((),) * len(records[0][1].shape)
            how = "one rank" if len(ranks) == 1 else "copies"
            layout = TensorLayout((len(ranks),), ("rank",), ranks, dims)
        single = max(p.micro for p, _ in records) == 0
        if self.description.calls == 1 or layout.calls is not None or single:
            yield how, layout, shape
            return
        for with_calls in _with_calls(layout, self.description, [r for _, r in records]):
            yield how, with_calls, shape


def _with_calls(
    layout: TensorLayout, description: LayoutDescription, records: Sequence[TensorRecord]
) -> Iterator[TensorLayout]:
    """Yield a layout with an axis of micro-batches, which shard the batch or hold copies."""
    mesh, axes = (*layout.mesh, description.calls), (*layout.axes, MICRO)
    with_axis = replace(layout, mesh=mesh, axes=axes, calls=MICRO)
    cut = [d for d, axes in enumerate(layout.dims) if set(axes) & set(description.batch)]
    if not cut:
        yield with_axis
        cut = [0] if records[0].shape else []
    for d in cut[:1]:
        dims = (*layout.dims[:d], (*layout.dims[d], MICRO), *layout.dims[d + 1 :])
        yield replace(with_axis, dims=dims)
