"""A divergent call and its surroundings: what it should have made, and where its values come from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from telechat_moe.numerics import is_float
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.data_flow import DataFlow, Place, digest
from telechat_moe.tools.align.judge.edges import wanted
from telechat_moe.tools.align.judge.replay import arguments_of, believed, expected_gradient
from telechat_moe.tools.align.judge.verdict import Explanation, Verdict
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import Approx, Array
from telechat_moe.tools.align.operators.registry import UNFIT


@dataclass(frozen=True)
class DivergentCall:
    """A divergent call."""

    verdict: Verdict  # what is wrong
    call: Call
    reference: DataFlow  # data flow of its rank in the trusted run
    target: DataFlow  # data flow of its rank in the judged run
    # The other ranks of the judged run
    others: Mapping[int, RankDump] = field(default_factory=dict[int, RankDump])
    wrong_outputs: int = 1  # how many of its outputs are wrong

    @property
    def forward(self) -> Call | None:
        """The forward call that belongs to it; a call that is not backward is its own."""
        return self.target.dump.calls.get(self.call.forward_key)

    @property
    def settings(self) -> Call | None:
        """The reference's call, with its numbers and flags."""
        return self.reference.dump.calls.get(self.call.forward_key)

    @property
    def believed(self) -> Call | None:
        """The forward call with its own tensors and the reference's numbers and flags."""
        return self.forward and believed(self.forward, self.settings)

    @property
    def comes_from_outside(self) -> bool:
        """Whether the wrong tensor is an input that no call of the reference made: data, or a weight."""
        place = self.call.key, self.verdict.place
        return place[1].startswith("input") and not self.reference.sources_of(place)

    @property
    def dtype(self) -> str:
        """Type of the wrong tensor."""
        return dict(self.call.tensors())[self.verdict.place].dtype

    @property
    def number(self) -> int | None:
        """The number of the wrong output; None: it is inside of a list, or an input."""
        word, _, number = self.verdict.place.partition(".")
        return int(number) if word == "output" and number.isdigit() else None

    def expected(self, forward: Call | None = None) -> Approx | Array | None:
        """Return what the wrong output should be, by its own forward call or by another."""
        forward = forward or self.believed
        if self.number is None or forward is None:
            return None
        if self.call.phase is Phase.BACKWARD:
            return expected_gradient(self.call, forward, self.number)
        outputs = self.all_expected(forward)
        return outputs[self.number] if outputs else None

    def all_expected(self, call: Call, narrow: str = "") -> list[Approx | Array]:
        """Return what all outputs of a forward call should be; empty: no formula gives them.

        Everything is stored and summed in the ``narrow`` type, if any.
        """
        formula = find(call.formula_name)
        if formula is None:
            return []
        try:
            arguments, tensors = arguments_of(call, formula, bool(narrow))
            for tensor in tensors if narrow else ():
                tensor.stored = tensor.accumulated = narrow
            outputs = list(formula.compute(arguments))
        except (*UNFIT, ArithmeticError):
            return []
        return outputs if len(outputs) >= len(self.call.outputs) else []

    def in_narrow(self, dtype: str) -> tuple[Array, Array] | None:
        """Return what a forward call should make, and the bound for a program that computes in a narrow type."""
        if self.number is None or self.believed is None or self.call.phase is not Phase.FORWARD:
            return None
        outputs = self.all_expected(self.believed, dtype)
        output = outputs[self.number] if outputs else None
        return (output.value, output.bound(dtype)) if isinstance(output, Approx) else None

    def wanted(self) -> tuple[Array, Array] | None:
        """Return what the wrong tensor should hold, and the bound."""
        if not self.verdict.place.startswith("output"):
            return wanted((self.call.key, self.verdict.place), self.reference, self.target)
        output = self.expected()
        if output is None:
            return None
        if not isinstance(output, Approx):
            return np.asarray(output, np.float64), np.zeros(np.shape(output))
        return output.value, output.bound(self.dtype if is_float(self.dtype) else output.stored)

    def tensors(self) -> Iterator[tuple[str, TensorRecord]]:
        """Yield the tensors that an operator might have been given, with their names, those of near calls first.

        Of its own rank: outputs of earlier calls, and inputs from outside, as in the reference. Then the other ranks.
        """
        position = self.target.order.get(self.call.key, 0)
        for dump in (self.target.dump, *self.others.values()):
            same_rank = dump is self.target.dump
            rank = "" if same_rank else f" of rank {dump.rank}"
            nearest = sorted(enumerate(dump.calls.values()), key=lambda c: abs(c[0] - position))
            for i, call in nearest:
                for place, tensor in call.tensors():
                    same_input = i == position and not same_rank and not place.startswith("output")
                    outside = same_rank and self._from_outside((call.key, place))
                    if (i < position or same_input or outside) and tensor.read is not None:
                        yield f"{place} of {call.key}{rank}", tensor

    def _from_outside(self, place: Place) -> bool:
        """Return whether an input equals the reference's and comes from outside: no call has made it."""
        content = self.target.content.get(place)
        equal = content is not None and self.reference.content.get(place) == content
        return equal and not place[1].startswith("output") and not self.reference.sources_of(place)

    def kind(self, place: str, name: str) -> str:
        """Return the kind of fault if an input of the forward call is the tensor of this name, see :meth:`tensors`."""
        if " of rank " in name:
            return "wrong shard"
        forward = self.forward
        step, mark, key = forward.key.partition("|") if forward is not None else ("", "", "")
        other, _, other_key = name.removeprefix(f"{place} of ").partition("|")
        if mark and other_key == key and other.isdigit() and int(other) < int(step):
            return "stale weight"  # the input of the same call in an earlier step
        return "wrong tensor"

    def elsewhere(self, values: Array) -> Explanation | None:
        """Return the kind of fault and the name of the tensor that an input equals to the last bit; None: no other."""
        if self.verdict.place.startswith("output") or values.size < 2:
            return None
        content = digest(values)
        if stale := self._older(content):
            return stale
        wrong_name = f"{self.verdict.place} of {self.call.key}"
        for name, tensor in self.tensors():
            alike = tensor.dtype == self.dtype and int(np.prod(tensor.shape)) == values.size
            if alike and name != wrong_name and digest(tensor.load()) == content:
                return self.kind(self.verdict.place, name), f"it is {name}"
        return None

    def _older(self, content: bytes) -> Explanation | None:
        """Return a stale weight if an input is a weight or moment as it was before its last updates."""
        if not is_float(self.dtype):
            return None
        sources = self.reference.sources_of((self.call.key, self.verdict.place))
        source, visited = sources[-1] if sources else None, set[str]()
        while source is not None and source[0] not in visited:
            visited.add(source[0])
            source = self._before(source)
            tensor = self.target.tensors.get(source) if source else None
            if source and tensor and tensor.read and digest(tensor.load()) == content:
                return "stale weight", f"it is {source[1]} of {source[0]}: before an update"
        return None

    def _before(self, output: tuple[str, str]) -> tuple[str, str] | None:
        """Return the tensor from which an update, a cast or a gather made a weight."""
        call = self.reference.dump.calls[output[0]]
        if call.phase is Phase.OPTIMIZER:
            names = ("input.weight", "input.exp_avg", "input.exp_avg_sq")
            return call.key, names[min(int(output[1].split(".")[1]), 2)]
        places = [p for p, _ in call.tensors() if p.startswith("input")]
        sources = self.reference.sources_of((call.key, places[0])) if len(places) == 1 else []
        return sources[-1] if sources else None
