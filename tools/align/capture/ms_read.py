"""Assemble the calls of a rank from what taps have written: ``calls(plan, folder)``."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.graph.tap_plan import (
    FUSED_UPDATE,
    Argument,
    Number,
    TappedOperator,
    TappedTensor,
    TapPlan,
    update_of,
    weights_of,
)
from telechat_moe.narrowing import is_list, is_sequence
from telechat_moe.numerics import Array, from_bytes
from telechat_moe.ops.tap import STATISTICS, VALUES, TapRecord, index
from telechat_moe.tools.align.dump.msprobe import canonical
from telechat_moe.tools.align.dump.records import (
    Call,
    Phase,
    Scalar,
    Stats,
    TensorLayout,
    TensorRecord,
    Value,
)

_LONG = 32  # numbers in a list, from which it is written as one text

GRADIENTS, REDUCTION = "Gradients", "Reduction"
"""In names: marks of operators of the backward pass, and of collectives that sum a weight's gradient."""

UPDATES: Mapping[str, tuple[str, ...]] = {
    "AdamWeightDecay": (
        *("weight", "exp_avg", "exp_avg_sq", "lr", "beta1", "beta2", "eps", "weight_decay"),
        "grad",
    ),
    "ApplyMomentum": ("weight", "momentum_buffer", "lr", "grad", "momentum"),
}
"""Operators that update one weight, and their arguments in order."""


@dataclass
class Reader:
    """The records of one rank in one step."""

    plan: TapPlan  # of its graph
    folder: Path  # with `values.bin` and `index.txt`
    mode: str  # what was written of each tensor
    layouts: Mapping[int, TensorLayout] = field(default_factory=dict[int, TensorLayout])  # by `id`
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict[str, list[int]])  # by name

    def __post_init__(self) -> None:
        self.index = index(self.folder)
        self._records: dict[tuple[int, int], TensorRecord] = {}

    def calls(self) -> dict[str, Call]:
        """Return the operators that ran, in order."""
        calls: dict[str, Call] = {}
        cells = edges(self.plan.nodes)
        for i, node in enumerate(self.plan.nodes):
            for run in range(self._runs(node)):
                for call in self._calls(node, run):
                    calls[call.key] = call
            for name, outputs in cells.get(i, ()) if self._runs(node) else ():
                values = [self._value(t, node.graph, 0) for t in outputs]
                key = f"{name}.forward.0"
                calls[key] = Call(key, "module", name, 0, Phase.FORWARD, [], {}, values)
        return calls

    def _runs(self, node: TappedOperator) -> int:
        taps = [tap for out in node.outputs for t in tensors(out) for tap in _taps(t, node.graph)]
        return max((len(self.index.get(tap, ())) for tap in taps), default=0)

    def _calls(self, node: TappedOperator, run: int) -> Iterator[Call]:
        inputs = [self._value(v, node.graph, run) for v in node.inputs]
        outputs = [self._value(v, node.graph, run) for v in node.outputs]
        named = {name: _scalar(value) for name, value in node.attributes.items()}
        if node.kind == FUSED_UPDATE:
            yield from self._fused_update(node, inputs, outputs, named)
            return
        name, phase = name_of(node), Phase.FORWARD
        if node.weight:
            phase = Phase.REDUCTION
        if node.kind in UPDATES:
            named |= dict(zip(UPDATES[node.kind], inputs, strict=False))
            inputs, phase = [], Phase.OPTIMIZER
        if "group" in node.attributes:
            group = str(node.attributes["group"])
            about = {"group_ranks": list(self.groups.get(group, ())), "group_id": group}
            named["group"] = Scalar("ProcessGroup", about)
        number = node.index + run if node.kind not in UPDATES and not node.weight else run
        yield _call(name, number, phase, inputs, named, outputs)

    def _fused_update(
        self,
        node: TappedOperator,
        inputs: list[Value],
        outputs: list[Value],
        named: dict[str, Value],
    ) -> Iterator[Call]:
        """Return one operator that updates all weights as one call for each weight."""
        n = weights_of(node)
        decayed: Sequence[Any] = node.attributes.get("decayed") or []
        weights, m, v, grads = (inputs[i * n : (i + 1) * n] for i in range(4))
        rate, eps, decay, clip = inputs[4 * n : 4 * n + 4]
        for i in range(n):
            arguments: dict[str, Value] = {
                "weight": weights[i], "exp_avg": m[i], "exp_avg_sq": v[i], "lr": rate, "beta1": named["beta1"],
                "beta2": named["beta2"], "eps": eps, "weight_decay": decay if decayed[i] else Scalar("float", 0.0),
                "grad": grads[i], "clip": clip, "new1": named["new1"], "new2": named["new2"],
            }  # fmt: skip
            states = [outputs[j * n + i] for j in range(3)] if len(outputs) == 3 * n else []
            yield _call(name_of(update_of(node, [i])), 0, Phase.OPTIMIZER, [], arguments, states)

    def _value(self, value: Argument, graph: str, run: int) -> Value:
        if isinstance(value, list):
            return [self._value(v, graph, run) for v in value]
        if isinstance(value, Number):
            return _scalar(value.value)
        if value.constant is not None:
            values = np.asarray(value.constant)
            return TensorRecord(value.dtype, values.shape, read=lambda: values)
        return self._record(value, graph, run)

    def _record(self, tensor: TappedTensor, graph: str, run: int) -> TensorRecord:
        """Return a tensor's record, the same one wherever the tensor is used."""
        tap = next((tap for tap in _taps(tensor, graph) if tap in self.index), None)
        layout = self.layouts.get(id(tensor))
        if tap is None:
            return TensorRecord(tensor.dtype, tensor.shape, layout=layout)
        runs = self.index[tap]
        site = tap, min(run, len(runs) - 1)
        if site not in self._records:
            self._records[site] = self._written(runs[site[1]], layout)
        return self._records[site]

    def _written(self, entry: TapRecord, layout: TensorLayout | None) -> TensorRecord:
        dtype = canonical(entry.dtype)
        if self.mode == VALUES:
            return TensorRecord(dtype, entry.shape, layout=layout, read=partial(_load, entry))
        content = entry.read()
        if self.mode == STATISTICS:
            numbers = np.frombuffer(content, np.float64).tolist()
            if dtype == "bool":
                numbers[2:] = None, None
            stats = Stats(*([None] * 4 if 0 in entry.shape else numbers))
            return TensorRecord(dtype, entry.shape, stats, layout=layout)
        return TensorRecord(dtype, entry.shape, layout=layout, fingerprint=content)


def _taps(tensor: TappedTensor, graph: str) -> list[int]:
    """Return the taps of a tensor in a graph (a branch may not run), or else in others."""
    return [tensor.taps[graph]] if graph in tensor.taps else list(tensor.taps.values())


def edges(nodes: Sequence[TappedOperator]) -> dict[int, list[tuple[str, list[TappedTensor]]]]:
    """Return the cells that end with each operator, with the tensors that they hand to others in the forward pass."""
    takers: dict[int, list[tuple[str, ...]]] = {}
    for node in nodes:
        if not node.backward:
            for tensor in tensors(node.inputs):
                takers.setdefault(id(tensor), []).append(node.path)
    last: dict[tuple[str, ...], int] = {}
    kinds: dict[tuple[str, ...], str] = {}
    by_cell: dict[tuple[str, ...], list[TappedTensor]] = {}
    for i, node in enumerate(nodes):
        if node.backward or node.writes or node.weight:
            continue
        for depth in range(1, len(node.path) + 1):
            cell = node.path[:depth]
            last[cell], kinds[cell] = i, node.classes[depth - 1]
            for tensor in tensors(node.outputs):
                users = takers.get(id(tensor), [])
                if any(user[:depth] != cell for user in users):
                    by_cell.setdefault(cell, []).append(tensor)
    ends: dict[int, list[tuple[str, list[TappedTensor]]]] = {}
    for cell, outputs in by_cell.items():
        name = ".".join(["Cell", *cell, kinds[cell]])
        ends.setdefault(last[cell], []).append((name, outputs))
    return ends


def name_of(node: TappedOperator) -> str:
    """Return the name of an operator's calls: ``Primitive.Gradients.model.layers.0.attention.MatMul``.

    That of an update has the name of its weight: ``Optimizer.layers.0.norm.weight.AdamWeightDecay``.
    """
    if node.kind in UPDATES or node.kind == FUSED_UPDATE:
        weight = next(iter(tensors(node.inputs[0])), None) if node.inputs else None
        kind = "AdamWeightDecay" if node.kind == FUSED_UPDATE else node.kind
        return f"Optimizer.{weight.parameter if weight else ''}.{kind}"
    if node.weight:
        return f"Primitive.{REDUCTION}.{node.weight}.{node.kind}"
    way = [GRADIENTS] if node.backward else []
    return ".".join(["Primitive", *way, *node.path, node.kind])


def _call(name: str, number: int, phase: Phase, *values: Any) -> Call:
    return Call(f"{name}.{number}.forward", "api", name, number, phase, *values)


def tensors(value: Argument) -> Iterator[TappedTensor]:
    """Yield the tensors in an argument, however deep its lists are."""
    if isinstance(value, TappedTensor):
        yield value
    elif is_list(value):
        for item in value:
            yield from tensors(item)


def _scalar(value: Any) -> Value:
    if is_sequence(value):
        if len(value) > _LONG and all(isinstance(v, int) for v in value):
            return Scalar("ints", " ".join(map(str, value)))
        return [_scalar(v) for v in value]
    return Scalar(type(value).__name__, value) if value is not None else None


def _load(entry: TapRecord) -> Array:
    return from_bytes(entry.read(), canonical(entry.dtype)).reshape(entry.shape)
