"""Pins: what another run determines where a program is followed on its weights and with its choices.

A choice is a call that gives indices of the highest of some scores, recognised by its tensors, whatever operator it is.
A row of scores is that row of the other run which has nearly the same scores, so neither layouts nor the order of
tokens, micro-batches or layers matter. How nearly is derived: eight standard deviations of the rounding errors of both
runs. Within that the other run's choice is legal here, whatever this run chose; beyond it the scores are wrong.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.numerics import FLOATS, is_float, round_to
from telechat_moe.tools.align.dump.ranges import LayoutError, ShardKey, locate
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.data_flow import Place, content_of
from telechat_moe.tools.align.judge.points import STATES, named, put_together, weight_of
from telechat_moe.tools.align.operators.approx import Approx, Array
from telechat_moe.tools.align.thresholds import KERNEL_ROUNDINGS, SIGMAS, VAGUE

_ROWS = 1 << 12  # of a table
_AT_ONCE = 1 << 22  # elements that are compared at once


class TrackedValue(NamedTuple):
    """What a tensor holds where a program is followed, and the standard deviations of its errors (an array, or 0)."""

    value: Array
    sigma: Array


_MOSTLY = 0.5
"""Share of rows whose indices are those of the highest scores; the rest may be limited to groups."""


class TopChoice(NamedTuple):
    """How a call chooses."""

    chosen: str  # place of the indices [..., slot]
    scores: str  # place of the scores [..., candidate]
    bias: str  # place of what is added to the scores [candidate]; empty: nothing
    sign: float  # -1 where the smallest are chosen
    axis: int = -1  # dimension of the candidates, which the indices may lack

    def of(self, call: Call) -> tuple[Array, Array]:
        """Return the scores [row, candidate] that a call has in its dump, and its indices [row, slot]."""
        records, axis = dict(call.tensors()), self.axis
        scores, index = (np.asarray(records[p].load()) for p in (self.scores, self.chosen))
        if index.ndim != scores.ndim:
            index = np.expand_dims(index, axis)
        arrays = scores, index
        scores, index = (np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]) for x in arrays)
        if self.bias:
            scores = scores + records[self.bias].load()
        return self.sign * scores.astype(np.float64), index.astype(np.int64)

    def made(self, call: Call, scores: Array, index: Array) -> list[TensorRecord]:
        """Return the outputs of a call that has chosen certain indices, for formulas that follow its own scores."""
        raised = scores.copy()
        far = 4 * (1 + np.abs(raised).max(initial=0.0)) * np.arange(index.shape[1], 0, -1)
        np.put_along_axis(raised, index, np.broadcast_to(far, index.shape), 1)
        values_by_place = {self.chosen: index, self.scores: self.sign * raised}

        def with_values(place: str, record: TensorRecord) -> TensorRecord:
            chosen = values_by_place.get(place)
            values = record.load() if chosen is None else chosen.reshape(record.shape)
            return replace(record, read=lambda: values)

        return [with_values(place, record) for place, record in call.made()]

    def pinned(self, scores: Array, index: Array, results: list[Any]) -> list[Any]:
        """Return a call's results with certain indices, and of a plain choice the scores at them."""
        number = int(self.chosen.split(".")[1])
        shape = np.shape(results[number])
        if self.scores.startswith("input"):
            values = self.sign * np.take_along_axis(scores, index, 1)
            for i, x in enumerate(results):
                if isinstance(x, Approx) and x.shape == shape and not self.bias:
                    results[i] = x.like(values.reshape(shape), x.sigma, x.limit)
        results[number] = index.reshape(shape)
        return results


def choice_of(call: Call) -> TopChoice | None:
    """Return how a forward call chooses; None: it does not."""
    if call.phase is not Phase.FORWARD:
        return None
    best, largest = None, _MOSTLY
    for choice in _candidates(call):
        scores, index = choice.of(call)
        wide = scores.shape[1]
        if len(scores) != len(index) or index.min() < 0 or index.max() >= wide:
            continue
        share = float(np.mean(explained(scores, index)))
        if share == 1.0:
            return choice
        if share > largest:
            best, largest = choice, share
    return best


def _candidates(call: Call) -> Iterator[TopChoice]:
    """Yield what the scores of a choice may be: what the call makes before what it takes, biased before plain."""
    tensors = [(place, t) for place, t in call.tensors() if t.read is not None and t.shape]
    floats = [(p, t) for p, t in tensors if is_float(t.dtype)]
    floats.sort(key=lambda item: item[0].startswith("input"))
    for place, index in call.made():
        if not index.dtype.startswith(("int", "uint")) or not index.shape or index.read is None:
            continue
        for name, scores in floats:
            wide, slots = scores.shape[-1], index.shape[-1]
            if scores.shape[:-1] != index.shape[:-1] or not 0 < slots < wide:
                continue
            biases = [p for p, t in floats if t.shape == (wide,) and p.startswith("input")]
            for bias in (*biases, ""):
                if name != bias:
                    yield from (TopChoice(place, name, bias, sign) for sign in (1.0, -1.0))


class ChoiceComparison(NamedTuple):
    """The scores of a call that chooses, against those of the other run."""

    rank: int  # rank of the call
    call: Call
    choice: TopChoice  # how it chooses
    ratio: Array  # largest difference of a score over what is allowed, by row
    apart: Array  # largest difference of a score, by row
    flipped: Array  # whether this run chose otherwise, by row
    margin: Array  # by how much the other run preferred its choice to this run's, by row

    @property
    def comparable(self) -> bool:
        """Whether any of the scores are like the other run's: they may be other numbers altogether."""
        return bool(np.median(self.apart) < VAGUE)


@dataclass(eq=False)
class ReferenceChoices:
    """What a step of a trusted run determines."""

    ranks: Sequence[RankDump]  # all ranks of its step
    kind: str  # the narrowest type that it computes in
    factor: float = 1.0  # how much coarser that is than the other run's; at least 1

    def __post_init__(self) -> None:
        self.seen: list[ChoiceComparison] = []
        self._updates = named(self.ranks, weight_of)
        self._merged_weight = cache(self._merged)
        self.outside = cache(self._from_outside)

    @cached_property
    def _choices(self) -> Mapping[tuple[int, int], tuple[Array, Array]]:
        """The scores and indices of all choices, by the number of candidates and of slots."""
        choices: dict[tuple[int, int], list[tuple[Array, Array]]] = {}
        for dump in self.ranks:
            for call in dump.calls.values():
                if (choice := choice_of(call)) is not None:
                    scores, index = choice.of(call)
                    key = scores.shape[1], index.shape[1]
                    choices.setdefault(key, []).append((scores, index))
        return {
            key: (np.concatenate([s for s, _ in pairs]), np.concatenate([i for _, i in pairs]))
            for key, pairs in choices.items()
        }

    def weights(self, dump: RankDump) -> dict[Place, Array]:
        """Return the weights and states before the step, for a rank's inputs of updates."""
        values: dict[Place, Array] = {}
        for key, call in dump.calls.items():
            weight = weight_of(call)
            for place, record in call.given() if weight is not None else ():
                state = place.removeprefix("input.")
                if state not in STATES or record.read is None or weight is None:
                    continue
                tensor = self._merged_weight(weight, place)
                index = None if tensor is None else _index(tensor.shape, record, dump.rank)
                if tensor is not None and index is not None:
                    values[key, place] = tensor.reshape(-1)[index].reshape(record.shape)
        return values

    def _from_outside(self, dtype: str) -> dict[bytes, Array]:
        """Return the tensors that no call made (tables, constants), and the rows of tables.

        They are found by their content, rounded to a type.
        """
        by_content: dict[bytes, Array] = {}
        for dump in self.ranks:
            calls = dump.calls.values()
            outputs = {content_of(t.load()) for c in calls for _, t in c.made() if t.read}
            forward = [c for c in calls if c.phase is Phase.FORWARD]
            for record in (t for c in forward for _, t in c.given() if is_float(t.dtype)):
                values = record.load() if record.read is not None else None
                if values is not None and content_of(values) not in outputs:
                    rows = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values[:0]
                    for part in (values, *rows[:_ROWS]):
                        by_content[content_of(round_to(part, dtype))] = part
        return by_content

    def exact(self, values: Array, dtype: str) -> Array | None:
        """Return a tensor from outside as the trusted run has it, before it is rounded to a type; None: not known."""
        by_content = self.outside(dtype)
        exact = by_content.get(content_of(values))
        if exact is None and values.ndim > 1 and values.size:
            rows = [by_content.get(content_of(row)) for row in values.reshape(-1, values.shape[-1])]
            exact_rows = [row for row in rows if row is not None]
            exact = np.stack(exact_rows) if len(exact_rows) == len(rows) else None
        return None if exact is None or exact.size != values.size else exact.reshape(values.shape)

    def _merged(self, weight: str, place: str) -> Array | None:
        """Return a tensor of a weight's update, merged over all ranks; None: not known."""
        merged = put_together(self._updates.get(weight, ()), place)
        return merged and merged.values

    def chosen(
        self, dump: RankDump, call: Call, choice: TopChoice, scores: TrackedValue
    ) -> Array | None:
        """Return the indices that the trusted run chose from such scores; None: not known."""
        _, target_indices = choice.of(call)
        reference_choices = self._choices.get((scores.value.shape[1], target_indices.shape[1]))
        if reference_choices is None:
            return None
        reference_scores, indices = reference_choices
        nearest = _nearest(_finite(scores.value), _finite(reference_scores))
        right, index = reference_scores[nearest], indices[nearest]
        with np.errstate(invalid="ignore"):
            apart = np.nan_to_num(np.abs(scores.value - right), nan=0.0)
        unit = max((FLOATS[narrowest(rank)].unit for rank in (*self.ranks, dump)), default=0.0)
        sigma = SIGMAS * 2**0.5 * self.factor * scores.sigma
        limit = sigma + 2 * unit * np.abs(_finite(right))
        ratio = np.max(apart / np.maximum(limit, np.finfo(np.float64).tiny), 1)
        flipped = (np.sort(index, 1) != np.sort(target_indices, 1)).any(1)
        picked = [np.take_along_axis(_finite(right), i, 1).sum(1) for i in (index, target_indices)]
        margin = picked[0] - picked[1]
        comparison = ChoiceComparison(dump.rank, call, choice, ratio, apart.max(1), flipped, margin)
        self.seen.append(comparison)
        return index if comparison.comparable else None


def _nearest(rows: Array, candidates: Array) -> Array:
    """Return for each row the number of the known row that differs least in its largest difference."""
    some = max(1, _AT_ONCE // max(1, candidates.size))
    parts = [rows[i : i + some, None] for i in range(0, len(rows), some)]
    return np.concatenate([np.abs(candidates - part).max(2).argmin(1) for part in parts])


def _finite(scores: Array) -> Array:
    """Return scores without the infinities that mask candidates."""
    return np.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0)


def set_part(tensor: Array, record: TensorRecord, rank: int, part: Array) -> bool:
    """Set a rank's shard of a whole tensor; return whether its layout fits."""
    index = _index(tensor.shape, record, rank)
    if index is not None:
        tensor.reshape(-1)[index] = part.reshape(-1)
    return index is not None


def _index(whole_shape: tuple[int, ...], record: TensorRecord, rank: int) -> Array | None:
    """Return which elements of a flattened tensor a rank has, in its order; None: the layout does not fit."""
    number = np.arange(math.prod(whole_shape)).reshape(whole_shape)
    layout, shape = record.layout, record.shape
    if layout is None or number.size == math.prod(shape):
        return number.reshape(-1) if number.size == math.prod(shape) else None
    keys = {ShardKey(r): shape for r in layout.ranks}
    try:
        shard_map = locate(layout, keys, whole_shape if layout.flat else None)
        positions = shard_map.places[ShardKey(rank)]
        part = number[np.ix_(*map(np.asarray, positions.dims))].reshape(-1)
    except (LayoutError, LookupError, ValueError):
        return None
    return part if positions.flat is None else part[slice(*positions.flat)]


def chose_otherwise(reference: Sequence[RankDump], target: Sequence[RankDump]) -> int:
    """Return how many rows chose differently in a step of two runs, by the scores in their dumps."""
    choices = ReferenceChoices(reference, "float32")
    for dump in target:
        for call in dump.calls.values():
            if (choice := choice_of(call)) is not None:
                scores, _ = choice.of(call)
                choices.chosen(dump, call, choice, TrackedValue(scores, np.zeros(())))
    return sum(int(chosen.flipped.sum()) for chosen in choices.seen)


# ------------------------------------------------------------------ choices of one call in two runs


def by_own_scores(reference: Call, target: Call, place: str) -> bool | None:
    """Return whether the target's indices at a place are those of its own largest (or smallest) scores.

    In order, if the reference's are. The reference shows which input holds the scores, and along which dimension they
    are chosen from, so fused routers need no list of names. None: its indices are no choice by an input, or the
    target's are off by no more than roundings within the operator explain.
    """
    reference_tensors, target_tensors = (dict(call.tensors()) for call in (reference, target))
    index = reference_tensors.get(place)
    if index is None or place not in target_tensors:
        return None
    for name, record in reference.given():
        other = target_tensors.get(name, index)
        records = index, target_tensors[place], record, other
        alike = is_float(record.dtype) and is_float(other.dtype) and record.shape == other.shape
        if not alike or any(r.read is None for r in records):
            continue
        for axis, sign in product(_axes(record.shape, index.shape), (1.0, -1.0)):
            choice = TopChoice(place, name, "", sign, axis)
            scores, right = choice.of(reference)
            wide = scores.shape[1]
            if right.size and not 0 <= right.min() <= right.max() < wide:
                continue
            ranked = _in_order(scores, right)
            if explained(scores, right).all() and (ranked or wide > right.shape[1]):
                return _chosen_by(*choice.of(target), ranked, FLOATS[other.dtype].unit)
    return None


def _chosen_by(scores: Array, chosen: Array, ranked: bool, unit: float) -> bool | None:
    if np.isnan(scores).any():
        return None
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < scores.shape[1]:
        return False
    short = _short(scores, chosen)
    if np.all(short <= 0):
        return not ranked or _in_order(scores, chosen)
    within_rounding = np.all(short <= KERNEL_ROUNDINGS * unit * np.abs(_finite(scores)).max(1))
    return None if within_rounding else False


def _in_order(scores: Array, chosen: Array) -> bool:
    """Return whether the chosen candidates of each row are in the order of their scores, highest first."""
    return bool(np.all(np.diff(np.take_along_axis(scores, chosen, 1), axis=1) <= 0))


def _axes(scores: tuple[int, ...], indices: tuple[int, ...]) -> list[int]:
    """Return the dimensions along which indices of that shape may have been chosen, the last first."""
    axes: list[int] = []
    for d in reversed(range(len(scores))):
        remaining = scores[:d] + scores[d + 1 :]
        alike = len(indices) == len(scores) and indices[:d] + indices[d + 1 :] == remaining
        if (alike and indices[d] <= scores[d]) or indices == remaining:
            axes.append(d)
    return axes


def explained(scores: Array, chosen: Array) -> Array:
    """Return for each row whether the chosen candidates are its highest scores, each chosen once."""
    return _short(scores, chosen) <= 0


def _short(scores: Array, chosen: Array) -> Array:
    """Return by how much each row's lowest chosen score is below one not chosen; infinite where one is chosen twice."""
    picked = np.take_along_axis(scores, chosen, 1)
    unchosen = scores.copy()
    np.put_along_axis(unchosen, chosen, -np.inf, 1)
    distinct = np.ones(len(chosen), np.bool_)
    if chosen.shape[1] > 1:
        distinct = (np.diff(np.sort(chosen, 1), axis=1) > 0).all(1)
    with np.errstate(invalid="ignore"):  # infinity less infinity: nothing is left, or all is masked
        gap = unchosen.max(1) - picked.min(1)
    short = np.nan_to_num(gap, nan=0.0, posinf=np.inf, neginf=-np.inf)
    return np.where(distinct, short, np.inf)


def narrowest(dump: RankDump) -> str:
    """Return the floating-point type with the fewest bits among the tensors of a dump."""
    kinds = filter(is_float, dump.dtypes)
    return min(kinds, key=lambda k: FLOATS[k].bits, default="float32")
