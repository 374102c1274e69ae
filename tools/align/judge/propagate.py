"""Derive how far apart the tensors of two correct runs may be: carry one run's roundings along its data flow.

Each operator is recomputed as in ``replay``, but its inputs are only as exact as the calls that made them: standard
deviations of rounding errors pass from outputs to the inputs that equal them, and through each operator's own
derivatives (to first order, errors of different elements independent). The other run rounds as often, but at other
points, so the squared difference of two runs is twice the sum of squares. Weights and data are exact.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.collectives import group_of, kind_of
from telechat_moe.tools.align.judge.data_flow import DataFlow, Place, digest
from telechat_moe.tools.align.judge.points import factor_of
from telechat_moe.tools.align.judge.replay import arguments_of, exactly
from telechat_moe.tools.align.numerics import FLOATS, is_float
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import SIGMAS, Approx, Array
from telechat_moe.tools.align.operators.gradients import gradients
from telechat_moe.tools.align.operators.registry import UNFIT

MOST = 1 << 26
"""The most elements in a rank's step for which distances are derived: the deviations need four bytes each."""

_SUMMED = ("allreduce", "reducescatter")


class Deviations:
    """Standard deviations of the rounding errors of a rank's tensors, whose dump must have values."""

    def __init__(self, dump: RankDump) -> None:
        self.dump, self.flow = dump, DataFlow(dump)
        self.made: dict[Place, Array] = {}
        """Deviations of outputs; one is missing where its call, or a call before it, cannot be recomputed."""
        self._holding: dict[bytes, Array | None] = {}  # by the content of a tensor; None: not known
        for call in dump.calls.values():
            if call.kind == "api":
                self._run(call)

    def of(self, place: Place) -> Array | None:
        """Return the deviation of a tensor, 0 for one from outside; None: not known."""
        if place in self.made:
            return self.made[place]
        values = self.flow.tensors[place].load()
        content = digest(values)
        if content in self._holding:
            known = self._holding[content]
            return None if known is None else known.reshape(values.shape)
        if not self._comes_back(place) or values.min() == values.max():
            return np.zeros(values.shape)
        parts = [self.made.get(p) for p in self.flow.summed_from(place)]
        if not parts or any(p is None for p in parts):
            return None
        squares = [np.square(p).reshape(values.shape) for p in parts if p is not None]
        return np.sqrt(np.sum(squares, 0))

    def applied(self, place: Place) -> Array | None:
        """Return the deviation of a tensor; of a gradient as its update applies it."""
        factor = factor_of(self.dump.calls[place[0]], place[1])
        own, other = self.of(place), self.of((place[0], "input.clip")) if factor else None
        if factor is None or own is None or other is None:
            return own if factor is None else None
        return np.hypot(own * factor.load(), self.flow.tensors[place].load() * other)

    def _comes_back(self, place: Place) -> bool:
        """Return whether a tensor is a gradient, which some call must have made."""
        phase = self.dump.calls[place[0]].phase
        return phase is Phase.BACKWARD or place[1] == "input.grad"

    def _run(self, call: Call) -> None:
        try:
            found = self._collective(call) if kind_of(call) is not None else self._operator(call)
        except UNFIT:
            found = {}
        for place, record in call.made():
            if not is_float(record.dtype):
                continue
            deviation, content = found.get(place), digest(record.load())
            if deviation is not None and deviation.size == _size(record):
                kept = deviation.astype(np.float32).reshape(record.shape)
                self.made[call.key, place] = self._holding[content] = kept
            else:
                self._holding.setdefault(content, None)

    def _carry(self, call: Call, tensors: Iterable[Approx]) -> None:
        """Add the deviations of the sources of a call's floating-point arguments to those of its tensors."""
        places = [place for place, t in call.given() if is_float(t.dtype)]
        for place, x in zip(places, tensors, strict=False):
            deviation = self.of((call.key, place))
            if deviation is None:
                raise ValueError("what goes in is not known")
            x.sigma = np.hypot(x.sigma, deviation)
            x.limit = x.limit + 8 * deviation

    def _operator(self, call: Call) -> dict[str, Array]:
        back = call.phase is Phase.BACKWARD
        forward = self.dump.calls.get(call.forward_key)
        formula = find(forward.name) if forward is not None else None
        if formula is None or forward is None:
            return {}
        arguments, tensors = arguments_of(forward, formula, None, back)
        self._carry(forward, tensors)
        if not back:
            arguments.made = [t for _, t in call.made()]
            results = iter(formula.compute(arguments))
        else:
            outputs = [x for x in formula.compute(arguments) if isinstance(x, Approx)]
            coming = [t for _, t in call.given() if is_float(t.dtype)]
            seeds = [
                (output, exactly(record.load(), record.dtype, True))
                for output, record in zip(outputs, coming, strict=False)
            ]
            self._carry(call, [gradient for _, gradient in seeds])
            results = iter([g for g in gradients(seeds, tensors) if g is not None])
        found: dict[str, Array] = {}
        for place, record in call.made():
            x = next((r for r in results if not back or r.shape == record.shape), None)
            if isinstance(x, Approx):
                found[place] = _stored(x, record.dtype, formula.exact)
        return found

    def _collective(self, call: Call) -> dict[str, Array]:
        """Return the deviation of what a collective gives: other ranks' terms deviate as much as this rank's."""
        own = [self.of((call.key, place)) for place, t in call.given() if is_float(t.dtype)]
        if not own or any(d is None for d in own):
            return {}
        size = np.sqrt(np.mean([np.mean(np.square(d)) for d in own if d is not None]))
        terms = len(group_of(call) or [0]) if kind_of(call) in _SUMMED else 1
        found: dict[str, Array] = {}
        for place, record in call.made():
            if is_float(record.dtype):
                own_rounding = _unit(record.dtype) * np.abs(record.load()) * (terms - 1) ** 0.5
                found[place] = np.hypot(size * terms**0.5, own_rounding)
        return found


def _unit(dtype: str) -> float:
    """Return the relative standard deviation of a rounding: errors are uniform within 1 unit roundoff."""
    return FLOATS[dtype].unit * 3**-0.5


def _stored(x: Approx, dtype: str, exact: bool) -> Array:
    """Return the deviation of a result after it is stored in its tensor."""
    if exact or FLOATS[dtype].unit <= x.unit:
        return np.broadcast_to(x.sigma, x.shape).astype(np.float64)
    return np.hypot(x.sigma, _unit(dtype) * np.abs(x.value))


class Allowed:
    """How far apart whole tensors of two correct runs may be, by the deviations of one run, one step at a time."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Deviations] = {}

    def limit(
        self, ranks: Sequence[RankDump], owners: Sequence[int], place: Place, whole: Array
    ) -> float | None:
        """Return the largest relative L2 distance; None: it cannot be derived.

        As in all bounds, eight standard deviations are allowed: a tensor's errors may have one cause, so their norm is
        as uncertain as one error.

        Args:
            owners: The ranks that have shards of the tensor.
            place: The call and position of the tensor in their dumps.
        """
        if len(set(owners)) < len(ranks):
            return None  # a pipeline stage: its dump lacks the roundings of other stages
        norm = float(np.linalg.norm(whole.astype(np.float64)))
        squares: list[float] = []
        for dump in ranks:
            if dump.rank not in owners or place[0] not in dump.calls:
                continue
            deviations = self._of(dump)
            found = deviations and deviations.applied(place)
            if found is None:
                return None
            squares.append(float(np.mean(np.square(found, dtype=np.float64))))
        if not squares or not norm:
            return None
        return SIGMAS * (2 * float(np.mean(squares)) * whole.size) ** 0.5 / norm

    def _of(self, dump: RankDump) -> Deviations | None:
        key = dump.step, dump.rank
        if key not in self._known:
            self._known = {k: v for k, v in self._known.items() if k[0] == dump.step}
            records = [t for call in dump.calls.values() for _, t in call.tensors()]
            if any(t.read is None for t in records) or sum(map(_size, records)) > MOST:
                return None
            self._known[key] = Deviations(dump)
        return self._known[key]


def _size(record: TensorRecord) -> int:
    return int(np.prod(record.shape))
