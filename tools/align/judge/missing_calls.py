"""Judge calls that only one of two runs makes: are they a fault, or another way to the same result?

They are a fault unless what both runs compute from their results agrees. What takes a result is known from the data
flow or, where the dump lacks the calls between (views, indexing), assumed to be the next call that both runs make.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from telechat_moe.numerics import is_float, round_to
from telechat_moe.tools.align.dump.records import Call, Phase
from telechat_moe.tools.align.judge.collectives import is_exchange, kind_of
from telechat_moe.tools.align.judge.data_flow import DataFlow, Place, digest
from telechat_moe.tools.align.judge.edges import is_close, only_in
from telechat_moe.tools.align.judge.verdict import Verdict, not_judged


class LoneCall(NamedTuple):
    """A call that only one run makes, as a finding."""

    order: float  # position in the order of the run
    verdict: Verdict
    call: Call
    kind: str  # of fault


def missing_calls(
    reference: DataFlow,
    target: DataFlow,
    begins: Mapping[str, int],
    right: frozenset[str],
    strict: bool,
) -> Iterator[LoneCall]:
    """Yield the calls that only one run makes, except those that change nothing.

    Args:
        begins: For each call of the target the position of the first one of its step.
        right: Calls that others replace with the same result, by formulas or the other run.
        strict: Whether all rows of what is computed from its results must agree, not only most, after other choices.
    """
    runs = (reference, target, "target", "missing"), (target, reference, "reference", "extra")
    last = -1.0
    for run, other, name, word in runs:
        without_effect = _WithoutEffect(run, other, reference, target, strict)
        for key, call in run.dump.calls.items():
            if key in other.dump.calls:
                last = target.order[key] - begins[key] + 0.5
                continue
            if run is target:
                order = float(target.order[key] - begins[key])
            else:  # after the calls that the target makes in its place
                following = without_effect.next[key]
                end = target.order[following] - begins[following] - 0.5 if following else last
                order = max(last, end)
            replaced = not right.isdisjoint((key, call.forward_key))
            if call.kind != "api" or replaced or without_effect(call):
                continue
            if without_effect.is_after_dump(call):
                verdict = not_judged(key, f"the {name}'s dump ends before it")
            else:
                reason = f"the {name} does not run {key}"
                verdict = Verdict(key, "", "diverged", float("inf"), reason)
            yield LoneCall(order, verdict, call, _kind(call, word))


def _kind(call: Call, word: str) -> str:
    """Return the kind of fault of a call that only one run makes."""
    if "reduce" in (kind_of(call) or ""):
        return f"{'doubled' if word == 'extra' else word} reduction"
    return f"{word} call"


class _WithoutEffect:
    """Tells whether a call that only one run makes changes nothing."""

    def __init__(
        self, run: DataFlow, other: DataFlow, reference: DataFlow, target: DataFlow, strict: bool
    ) -> None:
        self.run, self.other, self.flows = run, other, (reference, target)
        self.strict = strict
        self.next: dict[str, str | None] = {}
        common: str | None = None
        self.last = max(
            (i for i, key in enumerate(run.dump.calls) if key in other.dump.calls), default=-1
        )
        for key, call in reversed([*run.dump.calls.items()]):
            self.next[key] = common
            if key in other.dump.calls and call.kind == "api" and not is_exchange(call):
                common = key
        self.agrees: dict[str, bool] = {}

    def __call__(self, call: Call) -> bool:
        if _gave_back(call, self.run, self.other) or not call.outputs:
            return True  # without results: a recomputation that ended early
        if is_exchange(call):
            return False
        users = self._users(call.key)
        following = self.next[call.key]
        if users and not self._replaces and self._only_lost(users):
            return False
        if not users and call.key in self.run.late and not self._updates_otherwise:
            return False  # the next step takes its result
        return bool(users or following) and all(map(self._agrees, users or [following or ""]))

    @cached_property
    def _replaces(self) -> bool:
        """Whether the other run makes calls of its own, which may replace some of this run."""
        return bool(self.other.dump.calls.keys() - self.run.dump.calls.keys())

    @cached_property
    def _updates_otherwise(self) -> bool:
        """Whether the other run updates weights by calls of its own."""
        return bool(self.other.late - self.run.dump.calls.keys())

    def _only_lost(self, users: set[str]) -> bool:
        """Return whether calls take the same to the last bit, so that a call between is only lost from the dump."""
        places = [(key, p) for key in users for p, _ in self.run.dump.calls[key].given()]
        return all(self.run.content.get(p) == self.other.content.get(p) for p in places)

    def _users(self, key: str) -> set[str]:
        """Return the calls of both runs that take what a call makes, maybe through calls of one run alone."""
        users, left, visited = set[str](), [key], {key}
        kind = self.run.dump.calls[key].kind  # what a module takes, its calls take
        for name in left:
            places = [
                p for output in self.run.makers_of(name) for p in self.run.taken.get(output, [])
            ]
            calls = self.run.dump.calls
            takers = {taker for taker, _ in places if calls[taker].kind == kind} - visited
            visited |= takers
            users |= {taker for taker in takers if taker in self.other.dump.calls}
            left += sorted(takers - users)
        return users

    def _agrees(self, key: str) -> bool:
        """Return whether a call takes about the same in both runs, by what noise there was before."""
        if key not in self.agrees:
            reference, target = self.flows
            names = [p for p, _ in target.dump.calls[key].given()]
            places: list[Place] = [(key, p) for p in names if (key, p) in reference.tensors]
            self.agrees[key] = bool(places) and all(
                is_close(p, reference, target, self.strict) for p in places
            )
        return self.agrees[key]

    @cached_property
    def _lacks_micro_batch(self) -> bool:
        """Whether calls after the last common one go forward and back: msprobe loses what follows an early end of recomputation."""
        calls = self.run.dump.calls
        after = [calls[key] for key, following in self.next.items() if following is None]
        lone = {call.key for call in after} - self.other.dump.calls.keys()
        return any(c.phase is Phase.BACKWARD and {c.key, c.forward_key} <= lone for c in after)

    def is_after_dump(self, call: Call) -> bool:
        """Return whether the other run's dump has nothing at all of what follows the backward pass, as of a fused optimizer."""
        if self.next[call.key] is None and self._lacks_micro_batch:
            return True
        if call.phase is not Phase.FORWARD or call.key not in self.run.late:
            return False
        if self.run.order[call.key] < self.last:
            return False
        return not any(self.run.late & self.other.dump.calls.keys())


def _gave_back(call: Call, *runs: DataFlow) -> bool:
    """Return whether a call, or its forward call, returned its own argument in one of the runs.

    Such as a copy or a cast to a type that is wider or that only its run computes in: another run may omit it, and torch
    has no backward call for it.
    """
    for run, other in (runs, runs[::-1]):
        forward = run.dump.calls.get(call.forward_key)
        if forward is None or not forward.given() or len(forward.made()) != 1:
            continue
        (_, argument), (_, result) = forward.given()[0], forward.made()[0]
        floats = is_float(argument.dtype) and is_float(result.dtype)
        comparable = argument.read and result.read and (floats or argument.dtype == result.dtype)
        if not comparable:
            continue
        values = argument.load()
        if result.dtype in only_in(run, other):
            values = round_to(values, result.dtype)
        if digest(values) == digest(result.load()):
            return True
    return False
