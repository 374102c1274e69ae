"""Judge the edges of a run's data flow: is each input what an earlier call made, as in the reference?

An edge of the reference must also hold in the target. A tensor that changed on the way (dropped, permuted, stale, from
another rank) is found even though every operator computes correctly. Only what holds in the reference is demanded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from telechat_moe.numerics import FLOATS, is_float, round_to
from telechat_moe.tools.align.dump.records import Phase, TensorRecord
from telechat_moe.tools.align.judge.data_flow import (
    DataFlow,
    Place,
    backward_key,
    digest,
    is_weight,
    sum_verdict,
    total_of,
)
from telechat_moe.tools.align.judge.distance import (
    Distance,
    distance,
    extremes_apart,
)
from telechat_moe.tools.align.judge.replay import input_gradients
from telechat_moe.tools.align.judge.selections import common_selection
from telechat_moe.tools.align.judge.verdict import Verdict, judge, not_judged
from telechat_moe.tools.align.operators.approx import Approx, Array
from telechat_moe.tools.align.thresholds import (
    BEYOND,
    CONVERTED,
    EARLIER,
    KERNEL_ROUNDINGS,
    OMITTED,
    VAGUE,
)

_SUMS = {"__add__", "__sub__", "__mul__", "add", "sub", "mul", "matmul", "linear"}
_STATES = {f"input.{name}" for name in ("weight", "exp_avg", "exp_avg_sq", "momentum_buffer")}


def origin(place: Place, reference: DataFlow, target: DataFlow) -> tuple[str, list[TensorRecord]]:
    """Return in words where an input should come from by the data flow, and the tensors whose sum it should be.

    These are what the same call made in the target, the gradients that were sent back, or the reference's own value.
    """
    sources = [s for s in reference.origins_of(place) if s in target.tensors]
    if sources:
        key, name = sources[-1]
        return f"what {key} made ({name})", [target.tensors[sources[-1]]]
    terms = reference.terms_of(place) or reference.summed_from(place)
    if terms and all(term in target.tensors for term in terms):
        text = f"the sum of the gradients from {', '.join(key for key, _ in terms)}"
        return text, [target.tensors[term] for term in terms]
    record = reference.tensors.get(place)
    return "what the reference has", [record] if record is not None else []


def wanted(place: Place, reference: DataFlow, target: DataFlow) -> tuple[Array, Array] | None:
    """Return what an input should hold by the data flow, with a bound; None: the reference does not show it."""
    tensor = target.tensors.get(place)
    _, parts = origin(place, reference, target) if tensor is not None else ("", [])
    if tensor is None or not parts or any(part.read is None for part in parts):
        return None
    dtype = tensor.dtype if is_float(tensor.dtype) else "float64"
    if len(parts) == 1:
        value = parts[0].load().astype(np.float64)
        return value, Approx(value, dtype).bound(dtype)
    total = total_of([part.load().reshape(tensor.shape) for part in parts], dtype)
    return total.value, total.bound(dtype)


def broken_edges(reference: DataFlow, target: DataFlow) -> Iterator[Verdict]:
    """Yield inputs of the target that are not what they should be.

    What calls of the reference made must equal what they made in the target; what comes from outside the reference's.
    """
    weights = _WeightGradients(reference, target)
    for place in reference.inputs():
        tensor = target.tensors.get(place)
        if tensor is None:
            continue
        if tensor.read is None or reference.tensors[place].read is None:
            verdict = _by_statistics(place, reference, target)
        elif place in reference.plain:
            verdict = _as_plain(place, reference, target)
        elif sources := reference.sources_of(place):
            makers = [source for source in sources if source in target.tensors]
            same_kind = is_float(reference.tensors[place].dtype) == is_float(tensor.dtype)
            # A mask of another kind is judged by its effect.
            verdict = _as_made(place, makers, target) if makers and same_kind else None
        elif gradient := weights.verdict(place):
            verdict = gradient
        elif slices := reference.stacked_from(place):
            verdict = _as_stacked(place, slices, target)
        else:
            verdict = _as_outside(place, reference, target)
        if verdict is not None:
            yield verdict


class _WeightGradients:
    """Judges gradients that updates take and no call of the dump made, as msprobe leaves those of ``linear`` out.

    Such a gradient is what the formula gives for the weight or bias of one call, in the reference; then it must be so in the target.
    """

    def __init__(self, *runs: DataFlow) -> None:
        self.runs = runs
        self.calls: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        for key, call in runs[0].dump.calls.items():
            if call.name == "Functional.linear" and all(
                backward_key(key) in run.dump.calls for run in runs
            ):
                for number, (_, tensor) in enumerate(call.given()):
                    if number:
                        self.calls.setdefault(tensor.shape, []).append((key, number))
        self._expected = cache(self._expected_of)

    def verdict(self, place: Place) -> Verdict | None:
        """Return the verdict on an input that is a weight's gradient in the reference; None: it is none."""
        records = [run.tensors[place] for run in self.runs]
        if place[0] not in self.runs[0].late or records[0].shape != records[1].shape:
            return None
        for key, number in self.calls.get(records[0].shape, []):
            right = self._judged(0, place, key, number)
            if right is not None and right.status == "pass":
                verdict = self._judged(1, place, key, number)
                if verdict is None or verdict.status == "pass":
                    return verdict
                reason = (
                    f"{place[1]} is not the gradient of input.{number} of {key}: {verdict.reason}"
                )
                return replace(verdict, reason=reason)
        return None

    def _judged(self, side: int, place: Place, key: str, number: int) -> Verdict | None:
        record, gradients = self.runs[side].tensors[place], self._expected(side, key)
        expected = gradients[number] if number < len(gradients) else None
        if expected is None or not is_float(record.dtype):
            return None
        return judge(*place, record.load(), expected, record.dtype)

    def _expected_of(self, side: int, key: str) -> Sequence[Approx | None]:
        calls = self.runs[side].dump.calls
        return input_gradients(calls[backward_key(key)], calls[key])


def _by_statistics(place: Place, reference: DataFlow, target: DataFlow) -> Verdict | None:
    """Judge a weight before the first update by its extremes, and what updates take by what noise there was; both show only a fault."""
    record, tensor = reference.tensors[place], target.tensors[place]
    call = reference.dump.calls[place[0]]
    if reference.is_late_step(place[0]) or not is_float(record.dtype):
        return None
    if place[0] in reference.late:
        return _gradient_by_statistics(place, reference, target)
    if call.phase is not Phase.FORWARD or not is_weight(call, place[1]):
        return None
    far = extremes_apart(record, tensor)
    kinds = [d for run in (reference, target) for d in run.dump.dtypes if is_float(d)]
    allowed = max(CONVERTED, KERNEL_ROUNDINGS * max(FLOATS[d].unit for d in kinds))
    if far is None or far <= allowed:
        return None
    text = f"{place[1]} comes from outside and is not the reference's: its extremes differ by {far:.2g} of their size"
    return Verdict(*place, "diverged", far / allowed, text, basis="other run")


def _gradient_by_statistics(place: Place, reference: DataFlow, target: DataFlow) -> Verdict | None:
    """Judge what an update takes from outside by how far all that was computed before is from the reference's."""
    far = distance(reference.tensors[place], target.tensors[place])
    if far is None or not is_float(target.tensors[place].dtype):
        return None
    noise = max(target.noise(reference, place[0]), _rounded(place, reference, target))
    allowed = BEYOND * noise
    if far.whole <= allowed or target.chose_otherwise(reference, place[0]):
        return None
    text = (
        f"{place[1]} comes from outside and is not the reference's: by its statistics it differs by "
        f"{far.whole:.2g} of its size, {allowed:.2g} allowed"
    )
    return Verdict(*place, "diverged", far.whole / allowed, text, basis="other run")


def _as_outside(place: Place, reference: DataFlow, target: DataFlow) -> Verdict | None:
    """Judge an input that no call of the reference made: data, weights, optimizer states; gradients are sums."""
    phase = reference.dump.calls[place[0]].phase
    state = phase is Phase.OPTIMIZER and place[1] in _STATES
    if not state and phase is not Phase.FORWARD:
        return None
    verdict = _as_given(place, reference.tensors[place], target.tensors[place])
    if verdict is None:
        return None
    if not state and not (target.is_used(place) or reference.is_used(place)):
        return None  # uninitialised memory, perhaps: nothing follows from it
    if not state and place[0] in reference.late:
        parts = reference.summed_from(place)
        if parts and all(part in target.tensors for part in parts):
            total = sum_verdict(target, place, parts)
            return total if total.status == "diverged" else None
        verdict = _unknown(place)  # perhaps a gradient that no call returns
    if is_float(reference.tensors[place].dtype) != is_float(target.tensors[place].dtype):
        return _unknown(place)  # a mask of another kind: judged by its effect
    if _rounded_in_passing(place, reference, target):
        return None
    if not state and not reference.is_weight(place):
        return _as_unrecorded(place, reference, target, verdict)
    return _as_updated(place, reference, target) if reference.is_late_step(place[0]) else verdict


def _as_unrecorded(
    place: Place, reference: DataFlow, target: DataFlow, verdict: Verdict
) -> Verdict | None:
    """Return the verdict on what calls missing in the dumps may have made; ``verdict``: if they have not."""
    far = distance(reference.tensors[place], target.tensors[place])
    if far is not None and is_float(target.tensors[place].dtype):
        noise = target.noise(reference, place[0])
        allowed = max(EARLIER * noise, _rounded(place, reference, target))
        if (close := _within(place, far, allowed)) is not None and close.status == "pass":
            return close
        verdict = close or verdict
    chose = target.chose_otherwise(reference, place[0])
    unsure = chose or verdict.status == "not judged"
    if unsure and common_selection(place, reference, target, chose) is not None:
        return None  # lines of the same output
    return _unknown(place) if chose else verdict


def _within(place: Place, far: Distance, allowed: float) -> Verdict | None:
    """Return the verdict on a tensor that calls missing in the dump may have made, by the other run; None: too far from it.

    It passes if it is about as far from the reference's as earlier outputs are, in the whole and in every row.
    """
    if far.whole > allowed:
        return None
    if allowed < VAGUE and far.largest < VAGUE:
        return Verdict(*place, "pass", far.whole / allowed, basis="other run")
    return _unknown(place)


def is_close(place: Place, reference: DataFlow, target: DataFlow, strict: bool) -> bool:
    """Return whether a tensor is about as far from the reference's as earlier outputs are; after other choices, most rows.

    If ``strict``, all rows; and choices and masks, which else what is computed with them must show, are the same.
    """
    record, tensor = reference.tensors[place], target.tensors[place]
    if not is_float(record.dtype) or not is_float(tensor.dtype):
        have_values = record.read is not None and tensor.read is not None
        return not strict or (have_values and digest(record.load()) == digest(tensor.load()))
    far, chose = distance(record, tensor), target.chose_otherwise(reference, place[0])
    if far is None:
        return chose  # other tokens, perhaps
    noise = max(EARLIER * target.noise(reference, place[0]), _rounded(place, reference, target))
    usual = float(np.median(far.rows)) if chose and far.rows.size else far.whole
    usual = far.largest if strict else usual
    return usual <= min(noise, VAGUE)


def _rounded(place: Place, *runs: DataFlow) -> float:
    """Return how far a call that is missing in the dumps may move a tensor by rounding alone."""
    return KERNEL_ROUNDINGS * max(FLOATS[run.tensors[place].dtype].unit for run in runs)


def _as_updated(place: Place, reference: DataFlow, target: DataFlow) -> Verdict | None:
    """Judge a weight or state after updates that the dumps lack: it is about as far from the reference's as others are."""
    record, tensor = reference.tensors[place], target.tensors[place]
    far = distance(record, tensor) if is_float(record.dtype) and is_float(tensor.dtype) else None
    if far is None or far.whole > VAGUE:
        return _wrong(place, tensor, record.load(), "comes from outside and is not the reference's")
    usual = max(EARLIER * target.usual_update(reference), _rounded(place, reference, target))
    reason = f"{place[1]}: differs, and the steps before are not in the dumps"
    return _within(place, far, usual) or not_judged(place[0], reason, place[1])


def _unknown(place: Place) -> Verdict:
    reason = "nothing in the dump says where an input comes from"
    return not_judged(place[0], reason, place[1])


def _rounded_in_passing(place: Place, reference: DataFlow, target: DataFlow) -> bool:
    """Return whether one run's tensor is the other's, rounded to a type that only the first computes in."""
    tensors = reference.tensors[place], target.tensors[place]
    if not all(is_float(t.dtype) for t in tensors) or tensors[0].shape != tensors[1].shape:
        return False
    values = [t.load() for t in tensors]
    ways = (values, only_in(target, reference)), (values[::-1], only_in(reference, target))
    return any(np.array_equal(round_to(a, d), b, equal_nan=True) for (a, b), n in ways for d in n)


def only_in(run: DataFlow, other: DataFlow) -> list[str]:
    """Return the floating-point types that only one of two runs computes in."""
    return [d for d in run.dump.dtypes - other.dump.dtypes if is_float(d)]


def _as_plain(place: Place, reference: DataFlow, target: DataFlow) -> Verdict | None:
    """Judge a tensor of few bits, which may equal the outputs of unrelated calls.

    The reference's value is right, and so is the output of any call that may have made it. Of gradients from outside
    only the ones with which a loss begins are known; zeros may be anything but an optimizer's first state or, as an expert
    bias, what a sum or product takes.
    """
    record, tensor = reference.tensors[place], target.tensors[place]
    values, actual = record.load(), tensor.load()
    phase, makers = reference.dump.calls[place[0]].phase, reference.plain[place]
    state = phase is Phase.OPTIMIZER and place[1] in _STATES
    call = reference.dump.calls[place[0]]
    operand = phase is Phase.FORWARD and call.name.rpartition(".")[2] in _SUMS
    if not (state or operand or np.any(values)) or (
        is_float(record.dtype) and values.shape != actual.shape
    ):
        return None
    verdict = _as_given(place, record, tensor)
    if verdict is None:
        return None
    if makers and not state:
        sources = [source for source in makers if source in target.tensors]
        return _as_made(place, sources, target) if sources else None
    lone = values.size == 1 and not is_float(record.dtype)  # a count, perhaps
    if lone or target.has_made(place):
        return None
    if phase is Phase.BACKWARD:
        return verdict if np.all(values == 1) else None
    return _as_outside(place, reference, target)


def _as_made(place: Place, sources: list[Place], target: DataFlow) -> Verdict | None:
    tensor = target.tensors[place]
    actual = expected = tensor.load()
    for source in sources:
        record = target.tensors[source]
        if record.read is None:
            return None
        expected = record.load()
        if expected.size == actual.size:
            expected = expected.reshape(actual.shape)
            if _equal_rounded(expected, actual, tensor.dtype):
                return None
    key, name = sources[-1]
    return _wrong(place, tensor, expected, f"is not what {key} made ({name})")


def _as_stacked(place: Place, slices: list[Place | None], target: DataFlow) -> Verdict | None:
    tensor = target.tensors[place]
    actual = tensor.load()
    expected = np.array(actual)
    for i, source in enumerate(slices[: len(actual)]):
        record = target.tensors.get(source) if source is not None else None
        if (
            record is not None
            and record.read is not None
            and record.load().size == expected[i].size
        ):
            expected[i] = record.load().reshape(expected[i].shape)
    if _equal_rounded(expected, actual, tensor.dtype):
        return None
    makers = ", ".join(sorted({source[0] for source in slices if source is not None}))
    return _wrong(place, tensor, expected, f"is not what {makers} made, side by side")


def _as_given(place: Place, reference: TensorRecord, tensor: TensorRecord) -> Verdict | None:
    if reference.read is None:
        return None
    expected, actual = reference.load(), tensor.load()
    if expected.size == actual.size:
        expected = expected.reshape(actual.shape)
    narrow = tensor.dtype
    if is_float(reference.dtype) and is_float(narrow):
        narrow = min(narrow, reference.dtype, key=lambda kind: FLOATS[kind].bits)
    if _equal_rounded(expected, actual, narrow) or _equal_rounded(actual, expected, narrow):
        return None
    return _wrong(place, tensor, expected, "comes from outside and is not the reference's")


def _wrong(place: Place, tensor: TensorRecord, expected: Array, problem: str) -> Verdict:
    actual = tensor.load()
    right = Approx(expected, tensor.dtype) if is_float(tensor.dtype) else expected
    if expected.shape != actual.shape:
        shapes = f"shape {list(actual.shape)}, expected {list(expected.shape)}"
        reason = f"{place[1]} {problem}: {shapes}"
        return Verdict(*place, "diverged", np.inf, reason, (), actual.size, actual.size)
    verdict = judge(*place, actual, right, tensor.dtype)
    reason = f"{place[1]} {problem}: {verdict.reason}"
    return replace(verdict, place=place[1], status="diverged", ratio=np.inf, reason=reason)


def _equal_rounded(values: Array, actual: Array, dtype: str) -> bool:
    """Return whether a tensor holds the values, perhaps rounded to its type."""
    if values.shape != actual.shape:
        return False
    if np.array_equal(values, actual, equal_nan=values.dtype.kind == "f"):
        return True
    return is_float(dtype) and np.array_equal(round_to(values, dtype), actual, equal_nan=True)


def wrong_sums(reference: DataFlow, target: DataFlow) -> Iterator[Verdict]:
    """Yield incoming gradients that are not the sum of what the users of the output or weight sent back."""
    for key, call in reference.dump.calls.items():
        if call.phase is Phase.BACKWARD:
            places = [(key, f"input.{i}") for i in range(len(call.inputs))]
        else:
            places = [(key, "input.grad")] if call.phase is Phase.OPTIMIZER else []
        for came in places:
            if came not in reference.tensors or came not in target.tensors:
                continue
            terms = reference.terms_of(came)
            if terms and all(term in target.tensors for term in terms):
                verdict = sum_verdict(target, came, terms)
                if verdict.status == "diverged" and not _narrow_sum(came, terms, reference, target):
                    yield verdict
                continue
            sources = reference.sources_of(came)
            lost = came in reference.content and not any(s in target.tensors for s in sources)
            if lost and not target.sent_back(came) and not _as_other_run(came, reference, target):
                reason = f"{came[1]}: in the target others sent it back"
                yield not_judged(key, reason, came[1]) if terms or sources else _unknown(came)


def _as_other_run(came: Place, reference: DataFlow, target: DataFlow) -> bool:
    """Return whether a gradient that other calls sent back in the target is close to the reference's in every row.

    After other choices, in all but the few rows that a pass may leave out.
    """
    difference = distance(reference.tensors[came], target.tensors[came])
    if difference is None or difference.basis != "values":
        return False
    if target.chose_otherwise(reference, came[0]):
        return float(np.mean(difference.rows >= VAGUE)) <= OMITTED
    return difference.largest < VAGUE


def _narrow_sum(came: Place, terms: list[Place], reference: DataFlow, target: DataFlow) -> bool:
    """Return whether a gradient is a sum that was rounded, outside the dump, to a type that only the target uses."""
    record, actual = target.tensors[came], target.tensors[came].load()
    for kind in only_in(target, reference) if is_float(record.dtype) else ():
        if np.array_equal(round_to(actual, kind), actual):
            parts = [target.tensors[t].load().reshape(record.shape) for t in terms]
            total = total_of([round_to(p, kind) for p in parts], kind)
            if judge(*came, actual, total, kind).status == "pass":
                return True
    return False
