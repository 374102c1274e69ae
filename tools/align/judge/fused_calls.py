"""Judge operators that replace others: one fused operator for several, or several for one.

Calls that only one of the runs makes are no fault if they give the same result. What the reference's calls would have
made from the target's own tensors is computed, with its bound; the inputs of the target's next calls must equal that.
Where one of these calls has no formula, the other run judges what they make together.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from telechat_moe.numerics import FLOATS, is_float, round_to
from telechat_moe.tools.align.dump.records import Call, Phase, TensorRecord
from telechat_moe.tools.align.judge.collectives import is_exchange
from telechat_moe.tools.align.judge.data_flow import DataFlow, Place
from telechat_moe.tools.align.judge.other_run import OtherRun
from telechat_moe.tools.align.judge.replay import arguments_of
from telechat_moe.tools.align.judge.verdict import Verdict, judge, not_judged
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import Approx, Array
from telechat_moe.tools.align.operators.registry import UNFIT

_DEEP = 64


class FusedCallMatcher:
    """The calls that only one of two runs makes; calls that belong together have the reference's keys in both."""

    def __init__(self, reference: DataFlow, target: DataFlow) -> None:
        self.reference, self.target = reference, target
        self.lost, self.new = _only_in(reference, target), _only_in(target, reference)
        self._outputs: dict[str, list[Approx | Array] | None] = {}
        self._wrong: set[str] = set()
        self._unknown: set[str] = set()
        self.confirmed: set[str] = set()  # calls of the target, by :meth:`by_other_run`

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on the inputs of the target that the missing calls made in the reference."""
        verdicts: list[Verdict] = []
        for place in self.reference.inputs() if self.lost else ():
            tensor = self.target.tensors.get(place)
            sources = self.reference.sources_of(place)
            all_lost = bool(sources) and all(s[0] in self.lost for s in sources)
            forward = self.reference.dump.calls[place[0]].phase is Phase.FORWARD
            if not all_lost or not forward or tensor is None or tensor.read is None:
                continue
            if is_float(tensor.dtype) != is_float(self.reference.tensors[place].dtype):
                continue  # a mask of another kind: judged by its effect
            if (verdict := self._judged(place, sources, tensor)) is not None:
                verdicts.append(verdict)
        return verdicts

    def otherwise(self) -> Iterator[Verdict]:
        """Yield verdicts on the outputs of calls that take other tensors than in the reference (a mask, a bias)."""
        for key, call in self.reference.dump.calls.items():
            new = self.target.dump.calls.get(key)
            if new is None or not _counts(call) or is_exchange(call) or new.name != call.name:
                continue
            golden, tensors = (dict(c.tensors()) for c in (call, new))
            if golden.keys() == tensors.keys() or not all(t.read for t in tensors.values()):
                continue
            lacks = [*golden.keys() - tensors.keys(), *tensors.keys() - golden.keys()]
            reason = f"{', '.join(lacks[:4])}: only one of the runs has it"
            outputs = new.made()
            if len(outputs) != len(call.made()):
                yield Verdict(key, "", "diverged", np.inf, reason)
            elif (expected := self._evaluated(call, 0)) is None:
                yield not_judged(key, "takes other tensors than in the reference")
            else:
                for i, (_, tensor) in enumerate(outputs):
                    verdict = judge(key, f"output.{i}", tensor.load(), expected[i], tensor.dtype)
                    yield replace(verdict, place="", reason=f"{reason}; {verdict.reason}")

    def _judged(self, place: Place, sources: list[Place], tensor: TensorRecord) -> Verdict | None:
        expected = self._imagined(sources[-1], 0)
        if expected is None:
            self._unknown |= {s[0] for s in sources}
            reason = "is only in the reference, and no formula for its result is known"
            unknown = not_judged(place[0], f"{sources[-1][0]} {reason}", place[1])
            return None if place in self._together else unknown  # the other run may tell
        actual = tensor.load()
        if isinstance(expected, Approx) and expected.value.size == actual.size:
            expected = expected.reshape(*actual.shape)
        elif not isinstance(expected, Approx) and expected.size == actual.size:
            expected = expected.reshape(actual.shape)
        verdict = judge(*place, actual, expected, tensor.dtype)
        if verdict.status != "diverged":
            return verdict
        self._wrong |= {s[0] for s in sources}
        return None  # the missing call is the finding

    @cached_property
    def _together(self) -> dict[Place, tuple[set[str], list[Call]]]:
        """Inputs that calls of one run alone, some without formula, made in both: the target's, and each run's as one call."""
        runs = self.reference, self.target
        joined_calls: dict[Place, tuple[set[str], list[Call]]] = {}
        every = {**self.reference.dump.calls, **self.target.dump.calls}
        for place in [p for p in self.reference.tensors if p in self.target.tensors]:
            (reference_keys, reference_inputs), (target_keys, target_inputs) = (
                _before(place, *way) for way in (runs, runs[::-1])
            )
            names = sorted(every[k].name for k in reference_keys | target_keys)
            if reference_keys and target_keys and not all(map(find, names)):
                last = every[self.target.origins_of(place)[-1][0]]
                inputs = sorted(reference_inputs | target_inputs)
                common = [p for p in inputs if all(p in run.tensors for run in runs)]
                tensors = ([[r.tensors[p] for p in common], [r.tensors[place]]] for r in runs)
                call = replace(last, name=" ".join(names), kwargs={})
                pair = [replace(call, inputs=x, outputs=y) for x, y in tensors]
                joined_calls[place] = target_keys, pair
        return joined_calls

    def by_other_run(self) -> Iterator[Verdict]:
        """Yield verdicts on what calls of one run alone, some without formula, make of what both runs have before them."""
        together = reversed(self._together.values())
        first = {pair[1].key: (target_keys, pair) for target_keys, pair in together}
        sides = [{key: pair[i] for key, (_, pair) in first.items()} for i in range(2)]
        believed = replace(self.reference.dump, calls=sides[0])
        other = OtherRun(believed, replace(self.target.dump, calls=sides[1]))
        for key, (target_keys, (_, call)) in first.items():
            unknown = [n for n in call.name.split() if not find(n)]
            reason = f"no formula for {', '.join(unknown[:4])}"
            (verdict,) = other.judged(call, [not_judged(key, reason, "output.0")])
            self.confirmed |= target_keys if verdict.status == "pass" else set()
            have_formulas = all(find(self.target.dump.calls[k].name) for k in target_keys)
            if have_formulas or verdict.status != "not judged":  # else each call says so itself
                yield verdict

    @cached_property
    def right(self) -> frozenset[str]:
        """Calls of either run whose replacements in the other give the same result."""
        _ = self.verdicts  # sets what is read here
        used = {key for key in self.lost if self._outputs.get(key) is not None}
        # New calls are judged by themselves; their results must be what the missing calls would have given.
        return frozenset() if self._wrong or not used - self._unknown else self.new | self.lost

    @cached_property
    def unjudged(self) -> frozenset[str]:
        """Calls that may replace one another: each run has some, and one has no formula or no values."""
        run_keys = ((self.reference, self.lost), (self.target, self.new))
        calls = [run.dump.calls[key] for run, keys in run_keys for key in keys]
        calls = [call for call in calls if not is_exchange(call)]
        have_values = all(find(c.name) and any(t.read for _, t in c.tensors()) for c in calls)
        able = frozenset(call.key for call in calls)
        return able if not have_values and able & self.lost and able & self.new else frozenset()

    def _imagined(self, place: Place, depth: int) -> Approx | Array | None:
        """Return what an output of a missing call would be, computed from the target's tensors."""
        key = place[0]
        if depth > _DEEP:
            return None
        if key not in self._outputs:
            self._outputs[key] = None
            self._outputs[key] = self._evaluated(self.reference.dump.calls[key], depth)
        outputs, number = self._outputs[key], place[1].split(".")
        if outputs is None or len(number) != 2 or int(number[1]) >= len(outputs):
            return None
        return outputs[int(number[1])]

    def _evaluated(self, call: Call, depth: int) -> list[Approx | Array] | None:
        formula = find(call.name)
        if formula is None or is_exchange(call):
            return None
        inputs: dict[str, Approx | Array] = {}
        for place, tensor in call.given():
            value = self._counterpart((call.key, place), tensor, depth)
            if value is None:
                return None
            inputs[place] = value
        narrow = _narrowest(inputs)
        inputs = {place: _leaf(value, narrow) for place, value in inputs.items()}
        try:
            arguments, _ = arguments_of(call, formula, True, inputs)
            return list(formula.compute(arguments))
        except UNFIT:
            return None

    def _counterpart(self, place: Place, tensor: TensorRecord, depth: int) -> Approx | Array | None:
        """Return the target's counterpart of an input of the reference."""
        sources = self.reference.sources_of(place)
        for source in sources:
            record = self.target.tensors.get(source)
            if record is None or record.read is None:
                continue
            if is_float(record.dtype) == is_float(tensor.dtype):
                values = record.load()
                if values.size == np.prod(tensor.shape):
                    values = values.reshape(tensor.shape)
                return Approx(values, record.dtype) if is_float(record.dtype) else values
        for source in sources:
            output = self._imagined(source, depth + 1)
            if output is not None:
                return output
        return None if sources or tensor.read is None else tensor.load()


def _before(place: Place, flow: DataFlow, other: DataFlow) -> tuple[set[str], set[Place]]:
    """Return the calls before an input that another run does not make, and the outputs that both have before those."""
    calls, common, left = set[str](), set[Place](), [place]
    while left and not place[1].startswith("output"):
        for key, name in flow.origins_of(left.pop())[-1:]:
            if key in other.dump.calls:
                common.add((key, name))
            elif key not in calls:
                calls.add(key)
                both = {key, flow.dump.calls[key].forward_key} & flow.dump.calls.keys()
                left += [(k, p) for k in both for p, _ in flow.dump.calls[k].given()]
    return calls, common


def _narrowest(inputs: dict[str, Approx | Array]) -> str:
    """Return the type in which the target computes, judged by its outputs."""
    kinds = [v.stored for v in inputs.values() if isinstance(v, Approx)]
    return min(kinds, key=lambda kind: FLOATS[kind].bits, default="float32")


def _leaf(value: Approx | Array, dtype: str) -> Approx | Array:
    """Return an input of the target's type; one from outside equals the reference's except for rounding to it."""
    if isinstance(value, Approx):
        return Approx(value.value, dtype, sigma=value.sigma, limit=value.limit)
    if value.dtype.kind != "f":
        return value
    rounded = round_to(value, dtype)
    error = np.abs(np.where(np.isfinite(value), rounded - value, 0.0))
    return Approx(rounded, dtype, sigma=error, limit=error)


def _only_in(run: DataFlow, other: DataFlow) -> frozenset[str]:
    """Return the keys of the forward calls that only one of two runs makes."""
    calls = run.dump.calls.items()
    return frozenset(k for k, c in calls if k not in other.dump.calls and _counts(c))


def _counts(call: Call) -> bool:
    return call.kind == "api" and call.phase is Phase.FORWARD
