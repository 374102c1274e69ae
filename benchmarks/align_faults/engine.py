"""Many logical ranks in one process: operators with a tape, real collectives, every call recorded as a dump has it.

All ranks of a stage run an operator at a time. A :class:`Plan` perturbs one call; everything after it goes on with what
that call gave, as in a run.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.align_faults.kernels import KERNELS, Array, Numerics, rounded
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    TensorLayout,
    TensorRecord,
    Value,
)


class Tensor:
    """A tensor on some ranks.

    Args:
        values: Of each rank; floating-point values are float32.
        dtype: What they are rounded to; ``int64`` and ``bool`` for others.
        needs: Whether a gradient flows back to it.
    """

    __slots__ = ("dtype", "grad", "needs", "values")

    def __init__(self, values: dict[int, Array], dtype: str, needs: bool = False) -> None:
        self.values, self.dtype, self.needs = values, dtype, needs
        self.grad: dict[int, Array] = {}

    @property
    def ranks(self) -> list[int]:
        """Ranks that hold it."""
        return list(self.values)

    @property
    def is_float(self) -> bool:
        """Whether it has floating-point values."""
        return self.dtype in ("float32", "bfloat16", "float16")

    def on(self, ranks: Iterable[int]) -> "Tensor":
        """Return the same on fewer ranks, without history."""
        return Tensor({r: self.values[r] for r in ranks}, self.dtype)


@dataclass(frozen=True)
class Site:
    """One call on one rank, or a collective on its group, where a fault can be planted.

    Attributes:
        step: Step.
        key: Key of the call on its (first) rank.
        ranks: The rank; of a collective all ranks of the group.
        name: Name of the operator.
        phase: ``forward``, ``backward``, ``reduction`` or ``optimizer``.
        keys: Key on each rank.
        shape: Of the first output.
        dtype: Of the first output.
        tag: What the program uses it for: ``router``, ``attention``, ``head`` ...
        shapes: Of all tensors that went in.
    """

    step: int
    key: str
    ranks: tuple[int, ...]
    name: str
    phase: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    tag: str
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def op(self) -> str:
        """Name without its prefix."""
        return self.name.rpartition(".")[2]

    @property
    def is_backward(self) -> bool:
        """Whether it is the backward of an operator."""
        return self.key.endswith(".backward")


Change = Callable[..., Any]


@dataclass
class Plan:
    """One perturbation of one call.

    Attributes:
        site: Which call.
        rank: On which rank; of a collective the rank whose part is changed, None: all.
        stage: ``given`` (arguments, as recorded), ``hidden`` (arguments that the kernel reads), ``settings``,
            ``hidden settings``, ``numerics``, ``result``, ``skip``, ``exchange`` (of a collective: from the parts of
            all ranks to what they receive), ``send`` (a rank's part).
        change: The perturbation.
        done: Filled by the run: arguments, settings and results, right and wrong.
    """

    site: Site
    rank: int | None
    stage: str
    change: Change
    done: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Entry:
    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    settings: dict[str, Any]
    keys: dict[int, str]
    tag: str
    back: Callable[[], None] | None = None
    saved: dict[int, list[Array]] = field(
        default_factory=dict
    )  # what the calls were given, by rank


class Engine:
    """Runs operators on logical ranks and records them.

    Args:
        numerics: How values are computed.
        plan: The fault; None: a right run.
        seed: Of what a fault draws.
    """

    def __init__(self, numerics: Numerics, plan: Plan | None = None, seed: int = 0) -> None:
        self.numerics, self.plan = numerics, plan
        self.rng = np.random.default_rng(seed)
        self.step, self.phase, self.tag = 0, "forward", ""
        self.tape: list[_Entry] = []
        self.sites: list[Site] = []
        self.dumps: dict[tuple[int, int], dict[str, Call]] = {}
        self._counts: dict[int, Counter[str]] = {}
        self.past: dict[tuple[int, tuple[int, ...]], list[Array]] = {}
        """Earlier arrays by rank and shape: what a wrong pointer might hit."""
        self.weights: dict[str, Tensor] = {}
        """Weights of the step."""
        self.earlier: dict[str, dict[int, Array]] = {}
        """Weights of the step before."""
        self.applied = False
        self.said: tuple[str, TensorLayout] | None = None
        """What the next operators work on (``weight NAME``, ``choice NAME``), and how it lies over the ranks."""

    def before(self, weight: Array, rank: int) -> Array:
        """Return a weight as it was before the last update."""
        for name, now in self.weights.items():
            if rank in now.values and np.array_equal(now.values[rank], weight):
                return self.earlier[name][rank]
        return weight

    # ------------------------------------------------------------------ steps

    def begin(self, step: int, ranks: Iterable[int]) -> None:
        """Begin a step."""
        self.step, self.phase = step, "forward"
        self.tape.clear()
        for rank in ranks:
            self.dumps[step, rank] = {}
            self._counts[rank] = Counter()

    def dump(self) -> Dump:
        """Return what was recorded."""
        ranks = {
            (step, rank): RankDump(step, rank, "pytorch", "tensor", "L1", calls)
            for (step, rank), calls in sorted(self.dumps.items())
        }
        return Dump(Path("planted"), ranks)

    # ------------------------------------------------------------------ operators

    def op(self, name: str, *inputs: Tensor, dtype: str | None = None, **settings: Any) -> Any:
        """Run an operator on all ranks of its first input; return its outputs, one alone.

        Args:
            name: As in :data:`KERNELS`.
            inputs: Tensors.
            dtype: Of floating-point results; that of the program by default.
            settings: Other arguments.
        """
        ranks = inputs[0].ranks
        needs = any(t.needs and t.is_float for t in inputs)
        made: dict[int, list[Array]] = {}
        keys: dict[int, str] = {}
        saved: dict[int, list[Array]] = {}
        kind = dtype or _wider(inputs, self.numerics.dtype)
        if name == "Tensor.to":
            settings["dtype"] = dtype
        own = {r: dict(settings) for r in ranks}
        for rank in ranks:
            ins = [t.values[rank] for t in inputs]
            key = self._key(rank, name)
            if self._hit(rank, key) and self.plan and self.plan.stage == "skip":
                made[rank] = [ins[0].copy()]
                self._note(self._site(name, key, rank, made[rank], kind, ins), ins, made[rank])
                self.plan.done |= {"args": ins, "outs": made[rank]}
                continue
            keys[rank] = key
            made[rank], saved[rank] = self._run(name, key, rank, inputs, ins, own[rank], kind)
        outputs = []
        for i in range(len(made[ranks[0]])):
            first = made[ranks[0]][i]
            each = {r: made[r][i] for r in ranks}
            floating = first.dtype.kind == "f"
            outputs.append(Tensor(each, kind if floating else _integer(first), needs and floating))
        if needs and any(t.needs for t in outputs):
            entry = _Entry(name, [*inputs], outputs, own[ranks[0]], keys, self.tag, saved=saved)
            self.tape.append(entry)
        return outputs[0] if len(outputs) == 1 else outputs

    def _run(
        self,
        name: str,
        key: str,
        rank: int,
        tensors: Sequence[Tensor],
        ins: list[Array],
        settings: dict[str, Any],
        kind: str,
    ) -> tuple[list[Array], list[Array]]:
        """Return what a call gives and what it was given."""
        kernel, numerics = KERNELS[name], self.numerics
        right, shown, used, original = ins, settings, settings, dict(settings)
        hit = self._hit(rank, key)
        plan = self.plan
        if hit and plan is not None:
            if plan.stage in ("given", "hidden"):
                plan.done["before"] = ins
                changed = plan.change(ins, self, rank)
                ins, right = changed, changed if plan.stage == "given" else ins
            if plan.stage in ("settings", "hidden settings"):
                used = plan.change(dict(settings))
                if plan.stage == "settings":
                    shown = used
                    settings.update(used)
            if plan.stage == "numerics":
                numerics = plan.change(numerics)
        with np.errstate(all="ignore"):
            raw = kernel.forward(ins, used, numerics)
        outs = [rounded(np.asarray(o), kind) for o in raw]
        if hit and plan is not None:
            plan.done |= {"args": right, "settings": original, "kind": kind}
            if plan.stage == "result":
                outs = plan.change(outs, right, self, rank)
            plan.done["outs"] = outs
        site = self._site(name, key, rank, outs, kind, right)
        self._note(site, right, outs)
        self._record(site, tensors, right, shown, outs, kind)
        return outs, right

    def _hit(self, rank: int, key: str) -> bool:
        plan = self.plan
        if plan is None or plan.site.step != self.step:
            return False
        hit = plan.site.key == key and rank == plan.site.ranks[0]
        self.applied |= hit
        return hit

    def _key(self, rank: int, name: str) -> str:
        count = self._counts[rank]
        key = f"{name}.{count[name]}.forward"
        count[name] += 1
        return key

    def _site(
        self, name: str, key: str, rank: int, outs: list[Array], kind: str, ins: Sequence[Array]
    ) -> Site:
        dtype = kind if outs[0].dtype.kind == "f" else _integer(outs[0])
        shapes = tuple(x.shape for x in ins)
        return Site(
            self.step,
            key,
            (rank,),
            name,
            self.phase,
            (key,),
            outs[0].shape,
            dtype,
            self.tag,
            shapes,
        )

    def _note(self, site: Site, ins: Sequence[Array], outs: Sequence[Array]) -> None:
        if self.plan is None:
            self.sites.append(site)
        for x in outs:
            if x.dtype.kind == "f" and x.size >= 8:
                self.past.setdefault((site.ranks[0], x.shape), []).append(x)

    def _record(
        self,
        site: Site,
        tensors: Sequence[Tensor],
        ins: list[Array],
        settings: dict[str, Any],
        outs: list[Array],
        kind: str,
    ) -> None:
        name, layout = self.said or ("", None)
        records = [record(x, t.dtype, t.needs, layout) for t, x in zip(tensors, ins, strict=True)]
        inputs, kwargs = arguments(site.name, records, settings)
        made = [
            record(o, kind if o.dtype.kind == "f" else _integer(o), layout=layout) for o in outs
        ]
        phase = Phase.OPTIMIZER if site.name.startswith("Optimizer.") else Phase.FORWARD
        number = int(site.key.split(".")[-2])
        self.dumps[site.step, site.ranks[0]][site.key] = Call(
            *(site.key, "api", site.name, number, phase, inputs, kwargs, made),
            stack=(name,) if name else (),
        )

    # ------------------------------------------------------------------ backward

    def backward(self, loss: Tensor) -> None:
        """Send gradients back from a loss, whose own gradient is 1."""
        if not loss.grad:
            loss.grad = {r: np.ones_like(v) for r, v in loss.values.items()}
        self.phase = "backward"
        for entry in reversed(self.tape):
            if not any(t.grad for t in entry.outputs):
                continue
            self.tag = entry.tag
            if entry.back is not None:
                entry.back()
            else:
                self._back(entry)
            for t in entry.outputs:
                t.grad = {}
        self.tape.clear()

    def _back(self, entry: _Entry) -> None:
        wanted = [t for t in entry.inputs if t.is_float and t.needs]
        for rank in entry.outputs[0].ranks:
            if rank not in entry.keys:  # skipped
                send(wanted[0], rank, entry.outputs[0].grad[rank])
                continue
            key = entry.keys[rank].removesuffix("forward") + "backward"
            floats = [t for t in entry.outputs if t.is_float]
            grads = [t.grad[rank] if t.grad else np.zeros_like(t.values[rank]) for t in floats]
            for tensor, grad in zip(wanted, self._gradient(entry, key, rank, grads), strict=True):
                send(tensor, rank, grad)

    def _gradient(self, entry: _Entry, key: str, rank: int, grads: list[Array]) -> list[Array]:
        kernel, numerics, plan = KERNELS[entry.name], self.numerics, self.plan
        assert kernel.backward is not None, entry.name
        hit = self._hit(rank, key)
        ins = entry.saved[rank]
        outs = [t.values[rank] for t in entry.outputs]
        used, settings = ins, entry.settings
        if hit and plan is not None:
            if plan.stage == "given":
                plan.done["before"] = grads
                grads = plan.change(grads, self, rank)
            if plan.stage == "hidden":
                used = plan.change(ins, self, rank)
            if plan.stage == "hidden settings":
                settings = plan.change(dict(settings))
            if plan.stage == "numerics":
                numerics = plan.change(numerics)
        with np.errstate(all="ignore"):
            raw = kernel.backward(used, settings, outs, grads, numerics)
        mine = [(g, t) for g, t in zip(raw, entry.inputs, strict=True) if t.is_float and t.needs]
        made = [rounded(np.asarray(g), t.dtype) for g, t in mine]
        if hit and plan is not None:
            places = [i for i, t in enumerate(entry.inputs) if t.is_float and t.needs]
            plan.done |= {"args": ins, "outs_forward": outs, "grads": grads, "places": places}
            plan.done |= {"settings": entry.settings, "kind": mine[0][1].dtype}
            if plan.stage == "result":
                made = plan.change(made, grads, self, rank)
            plan.done["outs"] = made
        site = self._site(entry.name, key, rank, made, mine[0][1].dtype, grads)
        self._note(site, grads, made)
        floats = [t for t in entry.outputs if t.is_float]
        came = [record(g, t.dtype) for g, t in zip(grads, floats, strict=True)]
        went: list[Value] = [record(g, t.dtype) for g, (_, t) in zip(made, mine, strict=True)]
        number = int(key.split(".")[-2])
        self.dumps[self.step, rank][key] = Call(
            key, "api", entry.name, number, Phase.BACKWARD, [*came], {}, went
        )
        return made

    # ------------------------------------------------------------------ collectives

    def collective(
        self,
        name: str,
        x: Tensor,
        groups: Sequence[Sequence[int]],
        exchange: Callable[..., list[Array]],
        settings: dict[int, dict[str, Any]] | None = None,
    ) -> Tensor:
        """Run a collective in each group; no gradient.

        Args:
            name: Such as ``all_reduce``.
            x: What each rank gives.
            groups: Ranks that belong together; those without are left alone.
            exchange: From the parts of a group (and their settings) to what each receives.
            settings: Further arguments of each rank.
        """
        full = f"Distributed.{name}"
        values: dict[int, Array] = {}
        for group in groups:
            keys = [self._key(rank, full) for rank in group]
            given = [settings[r] if settings else {} for r in group]
            parts = [x.values[r] for r in group]
            plan = self.plan
            hit = (
                plan is not None
                and plan.site.step == self.step
                and (plan.site.key, plan.site.ranks) == (keys[0], tuple(group))
            )
            if hit and plan is not None:
                self.applied = True
                if plan.stage == "send":
                    plan.done["before"] = parts
                    parts = plan.change(parts, self, list(group))
                plan.done |= {"parts": parts, "exchange": exchange, "given": given, "all": x}
            got = exchange(parts, given, self.numerics, x.dtype)
            if hit and plan is not None and plan.stage == "exchange":
                got = plan.change(got, parts, x, list(group), exchange, given, self)
            if hit and plan is not None:
                plan.done["outs"] = got
            ins = parts
            site = Site(
                self.step,
                keys[0],
                tuple(group),
                full,
                self.phase,
                tuple(keys),
                got[0].shape,
                x.dtype,
                self.tag,
                tuple(p.shape for p in ins),
            )
            if self.plan is None:
                self.sites.append(site)
            for rank, key, part, mine, extra in zip(group, keys, parts, got, given, strict=True):
                values[rank] = mine
                self._exchanged(full, key, rank, part, mine, x, extra, group)
        return Tensor(values, x.dtype)

    def _exchanged(
        self,
        name: str,
        key: str,
        rank: int,
        part: Array,
        got: Array,
        x: Tensor,
        extra: dict[str, Any],
        group: Sequence[int],
    ) -> None:
        kwargs: dict[str, Value] = {k: Scalar(type(v).__name__, v) for k, v in extra.items()}
        kwargs["group"] = Scalar(
            "torch.distributed.ProcessGroup", {"group_ranks": list(group), "group_id": ""}
        )
        sent, received = record(part, x.dtype), record(got, x.dtype)
        self.dumps[self.step, rank][key] = Call(
            key,
            "api",
            name,
            int(key.split(".")[-2]),
            Phase.FORWARD,
            [],
            {("tensor" if "reduce" in name else "input"): sent, **kwargs},
            [received],
        )

    def transfer(self, x: Tensor, to: dict[int, int]) -> Tensor:
        """Send the tensor of each rank to another rank.

        Args:
            x: What is sent.
            to: Receiver by sender.
        """
        values: dict[int, Array] = {}
        plan = self.plan
        for rank, other in to.items():
            sent, got = self._key(rank, "Distributed.send"), self._key(other, "Distributed.recv")
            value = x.values[rank]
            site = Site(
                self.step,
                got,
                (other,),
                "Distributed.recv",
                self.phase,
                (got,),
                value.shape,
                x.dtype,
                self.tag,
                (value.shape,),
            )
            if plan is None:
                self.sites.append(site)
            elif self._hit(other, got):
                plan.done |= {"parts": [value], "kind": x.dtype}
                value = plan.change([value], self, [rank, other])[0]
                plan.done["outs"] = [value]
            values[other] = value
            send_, receive = record(x.values[rank], x.dtype), record(value, x.dtype)
            self.dumps[self.step, rank][sent] = Call(
                sent,
                "api",
                "Distributed.send",
                int(sent.split(".")[-2]),
                Phase.FORWARD,
                [send_],
                {"dst": Scalar("int", other)},
                [],
            )
            self.dumps[self.step, other][got] = Call(
                got,
                "api",
                "Distributed.recv",
                int(got.split(".")[-2]),
                Phase.FORWARD,
                [],
                {"src": Scalar("int", rank)},
                [receive],
            )
        return Tensor(values, x.dtype)

    def remember(
        self, inputs: list[Tensor], outputs: list[Tensor], back: Callable[[], None]
    ) -> None:
        """Put on the tape how gradients go back through what was no operator."""
        self.tape.append(_Entry("", inputs, outputs, {}, {}, self.tag, back))


def send(tensor: Tensor, rank: int, grad: Array) -> None:
    """Add a gradient to those that a tensor has; each addition is rounded to its type."""
    if rank in tensor.grad:
        tensor.grad[rank] = rounded(tensor.grad[rank] + grad, tensor.dtype)
    else:
        tensor.grad[rank] = grad


def record(
    x: Array, dtype: str, needs: bool | None = None, layout: TensorLayout | None = None
) -> TensorRecord:
    """Return an array as a reader of dumps gives it."""
    return TensorRecord(dtype, x.shape, layout=layout, requires_grad=needs, read=lambda: x)


def arguments(
    name: str, tensors: Sequence[Value], settings: dict[str, Any]
) -> tuple[list[Value], dict[str, Value]]:
    """Return positional and named arguments as torch programs give them."""
    s = {k: _scalar(v) for k, v in settings.items()}
    op = name.rpartition(".")[2]
    t = list(tensors)
    if op == "rms_norm":
        return [t[0], [_scalar(v) for v in settings["shape"]], t[1], s["eps"]], {}
    if op in ("cat", "stack"):
        return [t], s
    if op in ("gather", "index_select"):
        return [t[0], s.get("dim", Scalar("int", 0)), t[1]], {}
    if op in ("mul", "masked_fill"):
        return [*t, *s.values()], {}
    if op == "reshape":
        return [t[0], *(_scalar(v) for v in settings["shape"])], {}
    if op == "transpose":
        return [t[0], s["dim0"], s["dim1"]], {}
    if op == "to":
        return [t[0], Scalar("torch.dtype", f"torch.{settings['dtype']}")], {}
    if op == "grouped_matmul":
        return [[t[0]], [t[1]]], {"group_list": t[2]}
    if op == "scaled_dot_product_attention":
        return t[:3], {"attn_mask": t[3], **s}
    if op == "AdamW":
        names = ("weight", "grad", "exp_avg", "exp_avg_sq")
        return [], {**dict(zip(names, t, strict=True)), **s}
    return t, s


def _scalar(value: Any) -> Value:
    if isinstance(value, tuple | list):
        return [_scalar(v) for v in value]
    return Scalar(type(value).__name__, value)


def _integer(x: Array) -> str:
    return "bool" if x.dtype.kind == "b" else "int64"


def _wider(inputs: Sequence[Tensor], dtype: str) -> str:
    kinds = {t.dtype for t in inputs if t.is_float}
    return "float32" if "float32" in kinds else dtype
