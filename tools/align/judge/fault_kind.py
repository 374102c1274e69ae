"""Find the kind of fault of a wrong tensor from what it holds and what it should hold.

Each kind is a hypothesis that must explain the whole tensor: under it, the difference is within the bound. The first
hypothesis that does is the answer; one that merely comes close is not.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from typing import TYPE_CHECKING

import numpy as np

from telechat_moe.numerics import FLOATS, is_float, round_to, spacing
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.collectives import Received
from telechat_moe.tools.align.judge.data_flow import digest
from telechat_moe.tools.align.judge.fault_arguments import (
    Answer,
    close,
    leaves,
    other_arguments,
    other_mask,
    wrong_backward,
)
from telechat_moe.tools.align.judge.replay import replay_call
from telechat_moe.tools.align.judge.verdict import values_of
from telechat_moe.tools.align.operators.approx import Approx, Array

if TYPE_CHECKING:
    from telechat_moe.tools.align.judge.divergent_call import Wrong


@dataclass(frozen=True)
class _Difference:
    """A wrong floating-point tensor: what it holds, what it should hold, and how far it may be from that."""

    x: Array  # what it holds
    value: Array  # what it should hold
    bound: Array  # how far each element may be from it
    call: Call  # the call that made it or was given it
    tensor: TensorRecord  # its record in the call
    finding: "Wrong | None" = None  # the divergent call; None: a collective

    @cached_property
    def wrong(self) -> Array:
        """Where it is wrong."""
        return np.abs(self.x - self.value) > self.bound

    def fits(self, explained: Array, room: Array | float = 0.0) -> bool:
        """Return whether an explanation holds for all elements, and leaves far less of the error than there was."""
        room = 2 * self.bound + spacing(self.x, self.tensor.dtype) + room
        return close(self.x, explained, room) and _better(self.x, explained, self.value)

    def explained(self) -> Answer | None:
        """Return the first hypothesis that explains the whole tensor."""
        return next(filter(None, (hypothesis(self) for hypothesis in _HYPOTHESES)), None)


def family_of(finding: "Wrong") -> Answer:
    """Return the kind of fault of a divergent call and the evidence for it."""
    verdict, call = finding.verdict, finding.call
    setting = _wrong_setting(call, finding)
    if setting is not None:
        return setting
    difference = _difference(finding)
    if difference is None:
        return "unknown", ""
    x, value, tensor = difference.x, difference.value, difference.tensor
    if value.shape != x.shape:
        return "shape", f"shape {list(x.shape)}, expected {list(value.shape)}"
    if not is_float(tensor.dtype):
        return finding.elsewhere(tensor.load()) or _of_integers(x, value)
    # A mask explains best why values pass; several wrong outputs share one cause, which is an argument.
    answer = other_mask(x, finding)
    masked = any(t.dtype == "bool" for _, t in call.tensors())
    if finding.wrong_outputs > 1 or (masked and not np.all(np.isfinite(x))):
        answer = answer or other_arguments(x, finding)
    answer = answer or difference.explained() or wrong_backward(x, finding)
    answer = answer or finding.elsewhere(tensor.load()) or other_arguments(x, finding)
    answer = answer or _row_sum(difference) or _precision(difference) or _region(difference)
    if answer is None and finding.comes_from_outside:
        size = float(np.linalg.norm(value)) or 1.0
        apart = float(np.linalg.norm(x - value)) / size
        return "other input", f"no recorded call made it; it is {apart:.2g} of its size off"
    return answer or ("unknown", f"{verdict.wrong} of {verdict.elements} elements")


def of_received(received: Received, dumps: Mapping[int, RankDump]) -> Answer:
    """Return the kind of fault of what a rank received, where it is no wrong reduction; ``dumps`` has all ranks."""
    verdict, call = received.verdict, received.call
    tensor = dict(call.tensors()).get(verdict.place)
    if tensor is None or tensor.read is None or not received.expected:
        return "wrong exchange", verdict.reason
    expected = received.expected[received.meeting.group.index(received.rank)]
    found, value = tensor.load(), values_of(expected)
    if value.shape != found.shape:
        return "shape", f"shape {list(found.shape)}, expected {list(value.shape)}"
    if not isinstance(expected, Approx):
        return _of_integers(found, value)
    bound = expected.bound(tensor.dtype)
    difference = _Difference(found.astype(np.float64), value, bound, call, tensor)
    answer = difference.explained() or _elsewhere(found, received, dumps)
    answer = answer or _precision(difference) or _region(difference)
    return answer or ("wrong exchange", verdict.reason)


def _elsewhere(found: Array, received: Received, dumps: Mapping[int, RankDump]) -> Answer | None:
    """Return which earlier tensor was received instead of the right one."""
    content = digest(found)
    for rank, dump in dumps.items():
        for key, call in dump.calls.items():
            if key == received.meeting.keys.get(rank, received.call.key):
                break
            for place, tensor in call.made():
                same = tensor.shape == found.shape and tensor.read is not None
                if same and digest(tensor.load()) == content:
                    return "wrong tensor", f"it is {place} of {key} of rank {rank}"
    return None


def _difference(finding: "Wrong") -> _Difference | None:
    """Return a wrong tensor and the right one, in its shape if sizes are equal; None: either is unknown."""
    tensor = dict(finding.call.tensors()).get(finding.verdict.place)
    right = finding.wanted() if tensor is not None and tensor.read is not None else None
    if tensor is None or right is None:
        return None
    x = tensor.load().astype(np.float64)
    value, bound = (y.reshape(x.shape) if y.size == x.size else y for y in right)
    return _Difference(x, value, bound, finding.call, tensor, finding)


def residual(finding: "Wrong") -> Array | None:
    """Return the difference of a wrong tensor from the right one, over its bound; None: the right one is unknown."""
    d = _difference(finding)
    if d is None or d.value.shape != d.x.shape:
        return None
    with np.errstate(all="ignore"):
        return (d.x - d.value) / np.where(d.bound > 0, d.bound, 1.0)


def _wrong_setting(call: Call, finding: "Wrong") -> Answer | None:
    """Test whether another value of a number or flag makes the result right."""
    if call.phase is Phase.BACKWARD or finding.settings is None:
        return None
    theirs, ours = _settings(finding.settings), _settings(call)
    changed = {k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k)}
    if changed and all(v.status == "pass" for v in replay_call(call, call)):
        names = ", ".join(
            f"{k} {ours.get(k)} (reference: {theirs.get(k)})" for k in sorted(changed)
        )
        return "wrong setting", names
    return None


def _settings(call: Call) -> dict[str, str]:
    """Return the arguments of a call that are no tensors, as text."""
    return {
        place.removeprefix("input."): repr(repr(getattr(value, "value", value)))
        for place, value in leaves(call)
        if not isinstance(value, TensorRecord)
    }


def _of_integers(found: Array, value: Array) -> Answer:
    a, b = found.reshape(-1), value.reshape(-1)
    if a.size == b.size and np.array_equal(np.sort(a), np.sort(b)):
        return "permutation", "the same numbers in another order"
    wrong = int((a != b).sum())
    if wrong == 1:
        return "single element", "one number differs"
    return "wrong index", f"{wrong} of {a.size} numbers differ"


_MOST_TERMS = 4096  # of a product's sums, whose weights are solved for
_MOST_ROUNDINGS = 64  # of a narrow accumulator, in units of the largest value


def _not_finite(d: _Difference) -> Answer | None:
    bad = ~np.isfinite(d.x) & np.isfinite(d.value)
    if not bad.any():
        return None
    kind = "NaN" if np.isnan(d.x[bad]).any() else "infinity"
    return "not finite", f"{kind} in {int(bad.sum())} of {d.x.size} elements"


def _single(d: _Difference) -> Answer | None:
    if d.wrong.sum() != 1 or d.x.size < 4:
        return None
    at = tuple(np.argwhere(d.wrong)[0].tolist())
    return "single element", f"{list(at)} only: {d.x[at]:.6g} for {d.value[at]:.6g}"


def _zero(d: _Difference) -> Answer | None:
    zero = not np.any(d.x) and np.any(np.abs(d.value) > d.bound)
    return ("zero", "every element is 0") if zero else None


def _scale(d: _Difference) -> Answer | None:
    finite = np.isfinite(d.value)
    if not np.array_equal(d.x[~finite], d.value[~finite], equal_nan=True):
        return None
    x, value, bound = (y[finite] for y in (d.x, d.value, d.bound))
    square = float((value * value).sum())
    if not square:
        return None
    k = float((x * value).sum()) / square
    room = 2 * (1 + abs(k)) * bound + 1e-6 * np.abs(k * value) + spacing(x, d.tensor.dtype)
    if abs(k - 1) < 1e-9 or not (close(x, k * value, room) and _better(x, k * value, value)):
        return None
    if abs(k + 1) < 1e-3:
        return "sign", "every element has the other sign"
    whole = next((n for n in range(2, 65) if abs(k - n) < 1e-3 * n), None)
    part = next((n for n in range(2, 65) if abs(k * n - 1) < 1e-3), None)
    if x.size < 2 and not (whole or part):
        return None  # any single number is a multiple of another
    if whole:
        return "scale", f"every element is {whole} times what it should be"
    if part:
        return "scale", f"every element is 1/{part} of what it should be"
    return "scale", f"every element is {k:.6g} times what it should be"


def _better(x: Array, explained: Array, value: Array) -> bool:
    """Return whether an explanation leaves far less of the difference than there was."""
    return bool(np.square(x - explained).sum() <= 0.1 * np.square(x - value).sum())


def _offset(d: _Difference) -> Answer | None:
    x, value = d.x, d.value
    places: list[tuple[str, int | None]] = [("element", None)]
    places += [(f"place of dimension {i}", i) for i in range(x.ndim) if x.shape[i] >= 4]
    for word, axis in places if x.size >= 4 and np.all(np.isfinite(x)) else ():
        c = np.median(x - value, axis, keepdims=axis is not None)
        if d.fits(value + c, 1e-7 * np.abs(c)):
            by = f"{float(c):.6g}" if axis is None else "the same"
            return "offset", f"every {word} is off by {by}"
    return None


def _clipped(d: _Difference) -> Answer | None:
    """Test whether some elements are at a limit and the others right, or all have lost their sign."""
    x, value, bound, wrong = d.x, d.value, d.bound, d.wrong
    if wrong.sum() < 2 or not np.all(np.isfinite(x)):
        return None
    if np.any(x[wrong]) and close(x, np.abs(value), bound):
        return "sign", "every element is the absolute value"
    low, high = float(x.min()), float(x.max())
    at_limit = np.all((x[wrong] == low) | (x[wrong] == high))
    if at_limit and low < high and close(x, np.clip(value, low, high), bound):
        return "clipped", f"nothing is beyond {low:.6g} and {high:.6g}"
    return None


def _skipped(d: _Difference) -> Answer | None:
    own = any(t is d.tensor for _, t in d.call.made())
    for place, other in d.call.given() if own else ():
        here = place.startswith("input") and other.shape == d.x.shape and other.read is not None
        if here and np.array_equal(other.load().astype(np.float64), d.x):
            return "skipped", f"the result is {place}, unchanged"
    return None


def _moved(d: _Difference) -> Answer | None:
    x, value, bound = d.x, d.value, d.bound
    square = x.ndim >= 2 and x.shape[-1] == x.shape[-2]
    if square and close(x, np.swapaxes(value, -1, -2), np.swapaxes(bound, -1, -2)):
        return "transpose", "the last two dimensions are exchanged"
    for axis in range(x.ndim):
        order = _order(*(np.moveaxis(y, axis, 0) for y in (x, value, bound)))
        if order is None or np.array_equal(order, np.arange(len(order))):
            continue
        kind = "permutation" if len(set(order.tolist())) == len(order) else "duplicated"
        off = np.flatnonzero(order != np.arange(len(order)))
        said = f"{len(off)} of {len(order)} places of dimension {axis} hold another's values, {off[0]} those of {order[off[0]]}"
        return kind, said
    flat_x, flat_v = np.sort(x, None), np.sort(value, None)
    if x.size > 1 and close(flat_x, flat_v, np.max(bound) + np.zeros(x.size)):
        return "permutation", "the same values in another order"
    return None


def _order(x: Array, value: Array, bound: Array) -> Array | None:
    """Return which row of ``value`` each row of ``x`` equals; None: some equal no row."""
    rows, a, b = len(x), x.reshape(len(x), -1), value.reshape(len(x), -1)
    if not 2 <= rows <= 4096 or a.shape[1] < 2:
        return None
    limit = bound.reshape(rows, -1)
    right = (np.abs(a - b) <= limit).all(1)
    order = np.arange(rows)
    free = ~right  # rows that are not matched by a right row
    for i in np.flatnonzero(~right):
        off = np.abs(b - a[i])
        fits = np.flatnonzero((off <= limit + np.abs(b) * 1e-6).all(1))
        if not len(fits):
            return None
        own = fits[free[fits]] if free[fits].any() else fits
        order[i] = own[np.argmin(off[own].sum(1))]
        free[order[i]] = False
    return order


def _dropped(d: _Difference) -> Answer | None:
    x, wrong = d.x, d.wrong
    if x.ndim >= 2 and np.any(wrong) and np.all(x[wrong] == 0):
        rows = np.flatnonzero(wrong.reshape(len(x), -1).any(1))
        whole = not np.any(x[rows])
        return "dropped", f"rows {rows[:6].tolist()} are 0" if whole else "some elements are 0"
    return None


def _dropout(d: _Difference) -> Answer | None:
    """Test whether some elements are 0 and the rest scaled by 1 / (1 - p), p being their share."""
    gone, kept = (d.x == 0) & d.wrong, d.x != 0
    square = float(np.square(d.value[kept]).sum())
    if not gone.any() or kept.sum() < 4 or not square:
        return None
    k = float((d.x[kept] * d.value[kept]).sum()) / square
    p, share = 1 - 1 / k if k else 0.0, float(gone.mean())
    likely = p > 0.001 and abs(share - p) < 5 * (p * (1 - p) / d.x.size) ** 0.5
    if not likely or not d.fits(np.where(gone, 0.0, k * d.value), 2 * abs(k) * d.bound):
        return None
    return "dropout", f"p {p:.4g}: {share:.2g} of the elements are 0, the rest are scaled"


def _added_twice(d: _Difference) -> Answer | None:
    for place, term in d.call.given() if d.finding is not None else ():
        like = term.shape and term.shape == d.x.shape[d.x.ndim - len(term.shape) :]
        if not like or not is_float(term.dtype) or term.read is None:
            continue
        if d.fits(d.value + term.load()):
            return "added twice", f"{place} is added once more than it should be"
    return None


def _lost_part(d: _Difference) -> Answer | None:
    """Test whether a product lacks terms of its sums, such as one part of split-K, by a weight for each term."""
    for p, q in _factors(d):
        missing = (d.value - d.x).reshape(len(p), p.shape[1], q.shape[2])
        gram = (np.swapaxes(p, 1, 2) @ p * (q @ np.swapaxes(q, 1, 2))).sum(0)
        weights = (np.swapaxes(p, 1, 2) @ missing * q).sum((0, 2))
        gram += np.eye(len(gram)) * 1e-12 * np.trace(gram)
        if not np.any(np.diag(gram)) or not np.all(np.isfinite(weights)):
            continue
        lost = np.flatnonzero(np.linalg.solve(gram, weights) > 0.5)  # pyright: ignore
        explained = d.value - (p[..., lost] @ q[:, lost]).reshape(d.x.shape)
        if 0 < len(lost) < len(gram) and d.fits(explained):
            whole = lost[-1] - lost[0] + 1 == len(lost)
            said = f"{lost[0]} to {lost[-1]}" if whole else ", ".join(map(str, lost[:6]))
            return "lost part of K", f"{len(lost)} of {len(gram)} terms are not added: {said}"
    return None


def _factors(d: _Difference) -> Iterator[tuple[Array, Array]]:
    """Yield arguments as stacks of matrices whose product has the size of the result and more elements than terms."""
    forward = d.finding.forward if d.finding is not None else None
    calls = {c.key: c for c in (d.call, forward) if c is not None}.values()
    given = [t for c in calls for _, t in c.given() if is_float(t.dtype) and t.read is not None]
    forms: list[list[Array]] = []
    for x in (t.load().astype(np.float64) for t in given if len(t.shape) > 1):
        stacks = [x.reshape(1, -1, x.shape[-1]), x.reshape(-1, *x.shape[-2:])]
        forms.append([y for s in stacks[: x.ndim - 1] for y in (s, np.swapaxes(s, 1, 2))])
    for a, b in permutations(forms, 2):
        for p, q in product(a, b):
            fit = len(p) == len(q) and p.shape[2] == q.shape[1] <= _MOST_TERMS
            if fit and q.shape[1] < len(p) * p.shape[1] * q.shape[2] == d.x.size:
                yield p, q


def _row_sum(d: _Difference) -> Answer | None:
    """Test whether each row is off by its own multiple of the result or of an argument."""
    rows = d.wrong.reshape(-1, d.x.shape[-1]).any(1) if d.x.ndim > 1 else np.zeros(0)
    if len(rows) < 2 or rows.mean() < 0.5 or d.x.shape[-1] < 4 or d.finding is None:
        return None
    forward = d.finding.forward
    given = [*d.call.given(), *([*forward.given(), *forward.made()] if forward else ())]
    known = [(p, t.load()) for p, t in given if t.shape == d.x.shape and t.read is not None]
    for name, y in [("the result", d.value), *known]:
        square = np.square(y.astype(np.float64)).sum(-1, keepdims=True)
        k = ((d.x - d.value) * y).sum(-1, keepdims=True) / np.where(square > 0, square, 1.0)
        if d.fits(d.value + k * y, 2 * np.abs(k) * d.bound):
            return "missing row sum", f"each row is off by its own multiple of {name}"
    return None


def _precision(d: _Difference) -> Answer | None:
    """Test whether the result was rounded to, or accumulated in, a narrower type."""
    x, size = d.x, np.abs(d.value)
    for narrow in ("float16", "bfloat16", "float8_e4m3", "float8_e5m2"):
        if FLOATS[narrow].bits >= FLOATS[d.tensor.dtype].bits or np.any(round_to(x, narrow) != x):
            continue
        if close(x, d.value, d.bound + 2 * FLOATS[narrow].unit * size + 1e-30):
            return "wrong dtype", f"every value is one of {narrow}"
    # Rounded more often than it should have been: relative to the largest, an error like a sum in a narrow type.
    error, scale = np.abs(x - d.value), size.max() or 1.0
    made = d.finding is None or d.finding.verdict.place.startswith("output")
    for narrow in ("float16", "bfloat16") if made else ():
        unit = FLOATS[narrow].unit * scale
        small = error.max() <= _MOST_ROUNDINGS * unit
        if small and np.median(error) >= unit / 256 and _narrow(x, narrow, d.finding):
            share = f"{error.max() / scale:.2g} of the largest value"
            return "accumulator", f"the error is that of sums in {narrow} ({share})"
    return None


def _narrow(x: Array, dtype: str, finding: "Wrong | None") -> bool:
    """Return whether a program that stores everything in a narrow type could have made a result; unknown: True."""
    found = finding.in_narrow(dtype) if finding is not None else None
    if found is None or found[0].size != x.size:
        return True
    return close(x, found[0].reshape(x.shape), found[1].reshape(x.shape))


def _region(d: _Difference) -> Answer | None:
    """Test whether one region is wrong and the rest right."""
    x, wrong = d.x, d.wrong
    for axis in () if wrong.mean() > 0.9 else range(x.ndim):
        hit = np.flatnonzero(wrong.any(tuple(i for i in range(x.ndim) if i != axis)))
        if len(hit) < 0.5 * x.shape[axis] or len(hit) == 1:
            return "part", f"dimension {axis}: only {hit[:6].tolist()} of {x.shape[axis]} wrong"
    return None


_HYPOTHESES: tuple[Callable[[_Difference], Answer | None], ...] = (
    _not_finite,
    _zero,
    _single,
    _skipped,
    _scale,
    _moved,
    _clipped,
    _dropped,
    _dropout,
    _added_twice,
    _offset,
    _lost_part,
)
