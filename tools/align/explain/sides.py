"""Say more about the first tensor in which two programs differ: where each made it, and which of them is wrong.

Upstream of it, back to tensors that agree, the calls of both runs are taken together. If the reference's are not what
their inputs give, the reference is wrong. Else both compute correctly, but with other settings or another formula.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord, Value
from telechat_moe.tools.align.judge.collectives import is_exchange
from telechat_moe.tools.align.judge.data_flow import DataFlow, Place, walk
from telechat_moe.tools.align.judge.points import SharedTensor, weight_of
from telechat_moe.tools.align.judge.replay import replay_call
from telechat_moe.tools.align.judge.verdict import worst

_MOST = 200  # calls between tensors that agree and one that does not
_NEAR = 100  # calls of one module, whose settings are compared
_PROGRAM = 2**52  # larger integers in a program of the virtual machine are the bits of numbers
_ALIKE = 1e-4  # settings may be stored in float32, and divided
_SMALL = 1e-15  # smaller numbers, and larger than its inverse, keep a division or a mask from overflowing


class ProgramPart(NamedTuple):
    """What a run did to make a tensor."""

    module: str  # module, or weight, that it belongs to
    calls: list[Call]  # the calls since tensors that agree, the last one first
    line: str  # line of the source of the last one

    def text(self) -> str:
        """Return it in words."""
        name = self.module or (self.calls[0].key if self.calls else "no call in the dump")
        return f"{name} ({self.line})" if self.line else name


class ComparedPrograms:
    """Both runs in one step, and the tensors that were compared."""

    def __init__(self, reference: Sequence[RankDump], target: Sequence[RankDump]) -> None:
        self.reference, self.target = ([DataFlow(r) for r in run] for run in (reference, target))
        self.agreed: list[tuple[SharedTensor, SharedTensor]] = []

    def position(self, point: SharedTensor) -> float:
        """Return where a tensor of the target stands in the data flow: at the call that made it, or that uses it first."""
        flow = _flow(self.target, point)
        return 0.0 if flow is None else flow.position((point.key, point.place))

    def rejoins(self, point: SharedTensor) -> bool:
        """Return whether all that the target computes from a tensor of the forward pass agrees with the reference.

        Then the programs compute it differently (router's weights before or after an expert's last product), legally.
        """
        flow = _flow(self.target, point)
        content = flow and flow.content.get((point.key, point.place))
        if flow is None or content is None:
            return False
        agreed = _contents(self.target, (other for _, other in self.agreed))
        waiting, visited, reached = [content], {content}, False
        while waiting and len(visited) < _MOST:
            takers = {key for key, _ in flow.given.get(waiting.pop(), [])}
            users = {key for key in takers if flow.dump.calls[key].stage is Phase.FORWARD}
            outputs = {flow.content.get(place) for key in users for place in flow.makers_of(key)}
            if not users or None in outputs:
                return False
            reached |= bool(outputs & agreed)
            waiting += [c for c in outputs - agreed - visited if c is not None]
            visited |= {c for c in outputs if c is not None}
        return reached and not waiting

    def unmade(self, point: SharedTensor) -> tuple[int, Call, str] | None:
        """Return rank, collective and place of what is sent on the way to a tensor although no call made it; None: nothing.

        Most of what is sent late must have been made, or the dump lacks the calls that make it.
        """
        for flow in self.target:
            calls = flow.dump.calls
            late = [c for k, c in calls.items() if k in flow.late and is_exchange(c)]
            sent = [(c.key, place) for c in late for place, _ in c.given()]
            explained = [p for p in sent if p not in flow.content]
            explained += [p for p in sent if flow.sources_of(p) or flow.terms_of(p)]
            lone = dict(p for p in sent if p not in explained)
            if point.key in calls and 2 * len(lone) < len(sent):
                for call in _upstream(flow, (point.key, point.place), set()):
                    if call.key in lone:
                        return flow.dump.rank, call, lone[call.key]
        return None

    def explained(
        self, reference_tensor: SharedTensor, target_tensor: SharedTensor
    ) -> tuple[str, str, tuple[str, str]]:
        """Return the kind of a difference, why, and the modules of both runs in which it begins."""
        agreed = [*zip(*self.agreed, strict=True)] or [(), ()]
        reference_part = self._side(self.reference, reference_tensor, agreed[0])
        target_part = self._side(self.target, target_tensor, agreed[1])
        modules = reference_part.module, target_part.module
        places = f"reference: {reference_part.text()}; target: {target_part.text()}"
        wrong = next((k for k in map(self._wrong, reference_part.calls) if k), "")
        if wrong:
            return "reference is wrong", f"{wrong} of the reference; {places}", modules
        updates = target_part.calls if target_tensor.place.startswith("input") else []
        weight = weight_of(updates[0]) if updates else ""
        settings = "" if weight else differing(reference_part.calls, target_part.calls)
        if settings:
            return "settings differ", f"{settings}; {places}", modules
        return "programs differ", f"every call of both is right; {places}", modules

    def settings(self, wrong: Sequence[tuple[SharedTensor, SharedTensor]]) -> list[str]:
        """Return in words which settings differ in the calls that make each tensor from those compared before it."""
        modules_by_text: dict[str, list[str]] = {}
        pairs = [*self.agreed, *wrong]
        for first, other in pairs:
            if first.key.startswith("Optimizer") and first.place.startswith("input"):
                continue
            others = [p for p in pairs if p[1] is not other]
            reference_part = self._side(self.reference, first, [p for p, _ in others])
            target_part = self._side(self.target, other, [p for _, p in others])
            text = differing(reference_part.calls, target_part.calls)
            if text and max(len(reference_part.calls), len(target_part.calls)) <= _NEAR:
                module = reference_part.module or target_part.module
                modules_by_text.setdefault(text, []).append(module)
        several = {text: sorted(set(modules)) for text, modules in modules_by_text.items()}
        return [
            f"{modules[0]}{f' and {len(modules) - 1} more' if modules[1:] else ''}: {text}"
            for text, modules in several.items()
        ]

    def _wrong(self, call: Call) -> str:
        dump = next(f.dump for f in self.reference if f.dump.calls.get(call.key) is call)
        verdict = worst(replay_call(call, dump.calls.get(call.forward_key)))
        return f"{call.key}: {verdict.reason}" if verdict.status == "diverged" else ""

    def _side(
        self, run: Sequence[DataFlow], point: SharedTensor, agreed: Iterable[SharedTensor]
    ) -> ProgramPart:
        flow = _flow(run, point)
        if flow is None:
            return ProgramPart("", [], "")
        contents = _contents(run, agreed)
        calls = [*_upstream(flow, (point.key, point.place), contents)]
        last = calls[0] if calls else flow.dump.calls[point.key]
        line = next((s for s in last.stack if s.startswith("File ")), "")
        path = (last.parent or "").partition(".")[2].partition(".forward.")[0].rpartition(".")[0]
        weight = weight_of(flow.dump.calls[point.key])
        if weight is not None and (point.place != "input.grad" or not path):
            return ProgramPart(weight.removesuffix(".weight"), [flow.dump.calls[point.key]], "")
        # Names in a graph have the module.
        graph_module = last.name.partition(".")[2].rpartition(".")[0]
        return ProgramPart(path or graph_module, calls, line)


def _flow(run: Sequence[DataFlow], point: SharedTensor) -> DataFlow | None:
    return next((f for f in run if f.dump.rank == point.rank and point.key in f.dump.calls), None)


def _contents(run: Sequence[DataFlow], points: Iterable[SharedTensor]) -> set[bytes]:
    """Return the contents of tensors, or of the parts that they were put together from."""
    flows = ((_flow(run, p), p.parts or ((p.key, p.place),)) for p in points)
    contents = (flow.content.get(place) for flow, places in flows if flow for place in places)
    return {content for content in contents if content is not None}


def _upstream(flow: DataFlow, place: Place, contents: set[bytes]) -> Iterator[Call]:
    """Yield the calls between a tensor and those with known contents, the nearest first."""
    calls = flow.dump.calls
    content = flow.content.get(place)
    makers = flow.makers.get(content, []) if content is not None else []
    key, name = next((p for p in makers if calls[p[0]].kind == "api"), place)
    if not name.startswith("output") or calls[key].kind != "api":
        return

    def near(key: str) -> Iterator[str]:
        places = ((key, input_name) for input_name, _ in calls[key].given())
        for input_place in (p for p in places if flow.content.get(p) not in contents):
            yield from (k for k, _ in flow.sources_of(input_place)[-1:] if calls[k].kind == "api")

    yield from (calls[k] for k in islice(walk(key, near), _MOST))


def differing(reference: Sequence[Call], target: Sequence[Call]) -> str:
    """Return in words which numbers only the calls of one run have, if both have some; empty: none."""
    sides = [dict(n for c in calls for n in _numbers(c)) for calls in (reference, target)]
    unmatched = [
        [text for v, text in side_numbers.items() if not any(_alike(v, w) for w in other)]
        for side_numbers, other in (sides, sides[::-1])
    ]
    if not all(unmatched):
        dropped = [s for s in chain(*unmatched) if "dropout" in s]
        return f"only one of the runs has {dropped[0]}" if dropped else ""
    side_numbers, other = (", ".join(text[:6]) for text in unmatched)
    return f"the reference has {side_numbers}, the target {other}"


def _numbers(call: Call) -> Iterator[tuple[float, str]]:
    """Yield the numbers among the arguments of a call, with words for them."""
    operator = call.name.rsplit(".", 1)[-1]
    plain = {place.removeprefix("input."): _plain(value) for place, value in call.leaves()}
    if call.phase is Phase.OPTIMIZER:
        yield from _rule({name: value for name, value in plain.items() if value is not None})
        return
    for place, value in plain.items():
        name = place.partition(".")[0]
        title = operator if name.isdigit() else f"{name} of {operator}"
        if name == "prog":
            bits = [int(b) for b in str(value).split() if b.isdigit() and int(b) > _PROGRAM]
            sizes = {n for _, t in call.tensors() for n in t.shape}
            for number in np.array(bits, np.int64).view(np.float64).tolist():
                if not any(n and _alike(number * n, 1.0) for n in sizes):  # not of a mean
                    yield number, f"{number:.6g} ({operator})"
        elif isinstance(value, float) and _SMALL < abs(value) < 1 / _SMALL and abs(value) != 1:
            yield value, f"{value:.6g} ({title})"


def _plain(value: Value) -> Any:
    """Return an argument as Python has it; None for a tensor of several elements."""
    if isinstance(value, TensorRecord):
        return None if value.shape or value.read is None else value.load().item()
    return getattr(value, "value", None)


def _rule(plain: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Yield the settings of an update that do not depend on how it is written."""
    plain |= {n: plain[b] for n, b in (("beta1", "betas.0"), ("beta2", "betas.1")) if b in plain}
    if "lr" in plain and "weight_decay" in plain:
        plain["weight_decay x lr"] = float(plain["weight_decay"]) * float(plain["lr"])
    if "eps" in plain and "beta2" in plain:  # without a step, it was corrected for bias already
        step = float(plain.get("step", np.inf))
        scale = (1 - float(plain["beta2"]) ** step) ** 0.5
        plain["eps, corrected for bias,"] = float(plain["eps"]) * scale
    for name in ("beta1", "beta2", "momentum", "weight_decay x lr", "eps, corrected for bias,"):
        if name in plain:
            yield float(plain[name]), f"{name} {float(plain[name]):.6g}"


def _alike(a: float, b: float) -> bool:
    return abs(a - b) <= _ALIKE * max(abs(a), abs(b))
