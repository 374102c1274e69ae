"""What the data flow shows of a call beside its verdict: its phase in the step, its layer, the values of both runs."""

import re
from collections.abc import Iterator

from telechat_moe.tools.align.dump.records import Call, Phase, TensorRecord
from telechat_moe.tools.align.judge.collectives import kind_of
from telechat_moe.tools.align.judge.data_flow import DataFlow, Place, walk
from telechat_moe.tools.align.judge.pairing import STEP
from telechat_moe.tools.align.judge.points import weight_of
from telechat_moe.tools.align.judge.verdict import Verdict

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d+)(?:\.|$)")
_GRADIENT = re.compile(r"(Grad|Backward)(V\d)?$")


def phase_of(call: Call, flow: DataFlow) -> Phase:
    """Return the phase of a call.

    The data flow shows the phase of a call with a forward key in the backward pass (a collective, the clipping of
    gradients): what a backward call takes is backward, a collective over gradients that no backward call takes is a
    reduction, and what follows is the optimizer's. The flow is that of a trusted run with the same keys.
    """
    if call.stage is not Phase.FORWARD or call.key not in flow.order:
        return call.stage
    step = call.key.partition(STEP)[0] if STEP in call.key else ""
    position = flow.order[call.key]
    backward_positions = [
        flow.order[key]
        for key, other in flow.dump.calls.items()
        if other.phase is Phase.BACKWARD and (not step or key.startswith(step + STEP))
    ]
    if not backward_positions:
        return _in_graph(call.key, flow)
    if _goes_back(call.key, flow):
        return Phase.BACKWARD
    if position < min(backward_positions) or call.key not in flow.late:
        return Phase.FORWARD
    if _is_gradient(call, flow):
        return Phase.REDUCTION if kind_of(call) is not None else Phase.OPTIMIZER
    return Phase.OPTIMIZER if position > max(backward_positions) else Phase.FORWARD


def _in_graph(key: str, flow: DataFlow) -> Phase:
    """Return the phase of a call of a compiled graph, whose gradient operators have names that show it.

    A call between two of them is backward, too (such as a fused operator); calls after all of them are the optimizer's.
    """
    step = key.partition(STEP)[0] + STEP if STEP in key else ""
    calls = {k: c for k, c in flow.dump.calls.items() if k.startswith(step)}
    backward = {
        k for k, c in calls.items() if c.stage is Phase.BACKWARD or _GRADIENT.search(c.name)
    }
    if key in backward:
        return Phase.BACKWARD

    def after(k: str) -> set[str]:
        takers = (p for source in flow.makers_of(k) for p in flow.taken.get(source, []))
        return {k for k, _ in takers if k in calls}

    def before(k: str) -> set[str]:
        return {source for source in flow.before(k) if source in calls}

    if backward.isdisjoint(walk(key, before)):
        return Phase.FORWARD
    return Phase.OPTIMIZER if backward.isdisjoint(walk(key, after)) else Phase.BACKWARD


def _goes_back(key: str, flow: DataFlow) -> bool:
    """Return whether a backward call takes what a call made, alone or as a term of a sum."""
    outputs = flow.makers_of(key)
    takers = (place[0] for source in outputs for place in flow.taken.get(source, []))
    into_backward = any(flow.dump.calls[taker].phase is Phase.BACKWARD for taker in takers)
    return into_backward or not flow.summands.isdisjoint(outputs)


def _is_gradient(call: Call, flow: DataFlow) -> bool:
    """Return whether the inputs of a call come from backward calls, or from reductions over their outputs."""
    for place in _inputs(call, flow):
        for key, _ in flow.sources_of(place) or flow.summed_from(place):
            maker = flow.dump.calls[key]
            reduced = kind_of(maker) is not None and _is_gradient(maker, flow)
            if reduced or maker.phase is Phase.BACKWARD:
                return True
    return False


def _inputs(call: Call, flow: DataFlow) -> list[Place]:
    places = [(call.key, place) for place, _ in call.given()]
    return [place for place in places if place in flow.tensors]


def layer_of(call: Call, flow: DataFlow | None = None) -> int | None:
    """Return the number of a call's layer; None: it belongs to no layer.

    It is in the name of the call or its module. If not, the data flow of the call's rank shows it: the nearest weight
    before the call that an optimizer updates under a name with a layer.
    """
    match = _LAYER.search(call.parent or "") or _LAYER.search(call.key)
    if match is None and flow is not None:
        layers = _layers_of_weights(flow)
        numbers = (layers[c] for c in _weights_before(call, flow) if c in layers)
        return next(numbers, None)
    return int(match[1]) if match else None


def _layers_of_weights(flow: DataFlow) -> dict[bytes, int]:
    layers: dict[bytes, int] = {}
    for key, call in flow.dump.calls.items():
        match = _LAYER.search(weight_of(call) or "")
        content = flow.content.get((key, "input.weight"))
        if match and content is not None:
            layers[content] = int(match[1])
    return layers


def _weights_before(call: Call, flow: DataFlow) -> Iterator[bytes]:
    """Yield the contents of the inputs of a call's forward call, then of the calls before it, nearest first."""
    begin = call.forward_key
    for key in walk(begin, flow.before) if begin in flow.dump.calls else ():
        contents = (flow.content.get((key, place)) for place, _ in flow.dump.calls[key].given())
        yield from (content for content in contents if content is not None)


def values_at(
    verdict: Verdict, reference_call: Call | None, target_call: Call | None
) -> dict[str, float]:
    """Return the values of the reference and of the target at the worst element, as far as they are known."""
    values: dict[str, float] = {}
    for side, call in (("reference", reference_call), ("target", target_call)):
        record = dict(call.tensors()).get(verdict.place) if call is not None else None
        value = _value(record, verdict.element)
        if value is not None:
            values[side] = value
    return values


def _value(record: TensorRecord | None, element: tuple[int, ...]) -> float | None:
    if record is None or record.read is None:
        return None
    values = record.load()
    inside = all(i < n for i, n in zip(element, values.shape, strict=False))
    return float(values[element].real) if inside and len(element) == values.ndim else None
