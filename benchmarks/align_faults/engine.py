"""Run many logical ranks in one process, with a tape and real collectives, and record every call as a dump does.

All ranks of a stage run an operator at the same time. A :class:`Planted` perturbs one call; everything after it
continues with that call's result, as in a real run.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.align_faults.exchanges import EXCHANGES
from benchmarks.align_faults.kernels import KERNELS, Array, Numerics, rounded
from benchmarks.align_faults.tensors import Tensor, arguments, integer_type, record, send, widest
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    TensorLayout,
    Value,
)


@dataclass(frozen=True)
class Site:
    """One call on one rank, or a collective on its group, where a fault can be planted.

    Attributes:
        key: Key of the call on its (first) rank.
        ranks: The rank; of a collective all ranks of the group.
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
class Planted:
    """One perturbation of one call.

    Attributes:
        stage: ``given`` (arguments, as recorded), ``hidden`` (arguments that the kernel reads), ``settings``,
            ``hidden settings``, ``numerics``, ``result``, ``skip``, ``exchange`` (of a collective: from all ranks'
            contributions to what they receive), ``send`` (a rank's contribution).
        done: Right and wrong arguments, settings and results, which the run fills in.
    """

    site: Site
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
    saved: dict[int, list[Array]] = field(default_factory=dict)  # arguments of the calls, by rank


class Engine:
    """An engine that runs operators on logical ranks and records them.

    Args:
        numerics: Types and orders of summation.
        planted: The fault; None: a right run.
        seed: Of what a fault draws.
    """

    def __init__(self, numerics: Numerics, planted: Planted | None = None, seed: int = 0) -> None:
        self.numerics, self.planted = numerics, planted
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
        """Weights of the previous step."""
        self.applied = False
        self.said: tuple[str, TensorLayout] | None = None
        """What the next operators work on (``weight NAME``, ``choice NAME``), and how it is sharded over the ranks."""

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
        """Run an operator on all ranks of its first input; return its outputs, a single one without a list.

        Args:
            name: As in :data:`KERNELS`.
            dtype: Type of floating-point results; that of the program by default.
        """
        ranks = inputs[0].ranks
        needs = any(t.needs and t.is_float for t in inputs)
        made: dict[int, list[Array]] = {}
        keys: dict[int, str] = {}
        saved: dict[int, list[Array]] = {}
        kind = dtype or widest(inputs, self.numerics.dtype)
        if name == "Tensor.to":
            settings["dtype"] = dtype
        own = {r: dict(settings) for r in ranks}
        for rank in ranks:
            ins = [t.values[rank] for t in inputs]
            key = self._key(rank, name)
            planted = self._hit(rank, key)
            if planted and planted.stage == "skip":
                made[rank] = [ins[0].copy()]
                self._note(self._site(name, [key], [rank], ins[0], kind, ins), made[rank])
                planted.done |= {"args": ins, "outs": made[rank]}
                continue
            keys[rank] = key
            made[rank], saved[rank] = self._run(name, key, rank, inputs, ins, own[rank], kind)
        outputs = []
        for i in range(len(made[ranks[0]])):
            first = made[ranks[0]][i]
            each = {r: made[r][i] for r in ranks}
            floating = first.dtype.kind == "f"
            outputs.append(
                Tensor(each, kind if floating else integer_type(first), needs and floating)
            )
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
        """Return the results of a call and the arguments that it was given."""
        kernel, numerics = KERNELS[name], self.numerics
        right, used, original = ins, settings, dict(settings)
        planted = self._hit(rank, key)
        if planted:
            if planted.stage in ("given", "hidden"):
                planted.done["before"] = ins
                ins = planted.change(ins, self, rank)
                right = ins if planted.stage == "given" else right
            if planted.stage in ("settings", "hidden settings"):
                used = planted.change(original)
                if planted.stage == "settings":
                    settings.update(used)
            if planted.stage == "numerics":
                numerics = planted.change(numerics)
        with np.errstate(all="ignore"):
            raw = kernel.forward(ins, used, numerics)
        outs = [rounded(np.asarray(o), kind) for o in raw]
        if planted:
            planted.done |= {"args": right, "settings": original, "kind": kind}
            if planted.stage == "result":
                outs = planted.change(outs, right, self, rank)
            planted.done["outs"] = outs
        site = self._site(name, [key], [rank], outs[0], kind, right)
        self._note(site, outs)
        weight, layout = self.said or ("", None)
        records = [record(x, t.dtype, t.needs, layout) for t, x in zip(tensors, right, strict=True)]
        inputs, kwargs = arguments(name, records, settings)
        made: list[Value] = [
            record(o, kind if o.dtype.kind == "f" else integer_type(o), layout=layout) for o in outs
        ]
        phase = Phase.OPTIMIZER if name.startswith("Optimizer.") else Phase.FORWARD
        self._save(rank, key, name, phase, inputs, kwargs, made, (weight,) if weight else ())
        return outs, right

    def _hit(self, rank: int, key: str) -> Planted | None:
        """Return the fault if it belongs into a call."""
        planted = self.planted
        if planted is None or (self.step, key) != (planted.site.step, planted.site.key):
            return None
        if rank != planted.site.ranks[0]:
            return None
        self.applied = True
        return planted

    def _key(self, rank: int, name: str) -> str:
        count = self._counts[rank]
        key = f"{name}.{count[name]}.forward"
        count[name] += 1
        return key

    def _site(
        self,
        name: str,
        keys: Sequence[str],
        ranks: Sequence[int],
        out: Array,
        kind: str,
        ins: Iterable[Array],
    ) -> Site:
        dtype = kind if out.dtype.kind == "f" else integer_type(out)
        shapes = tuple(x.shape for x in ins)
        where = self.step, keys[0], tuple(ranks), name, self.phase, tuple(keys)
        return Site(*where, out.shape, dtype, self.tag, shapes)

    def _note(self, site: Site, outs: Sequence[Array] = ()) -> None:
        if self.planted is None:
            self.sites.append(site)
        for x in outs:
            if x.dtype.kind == "f" and x.size >= 8:
                self.past.setdefault((site.ranks[0], x.shape), []).append(x)

    def _save(
        self,
        rank: int,
        key: str,
        name: str,
        phase: Phase,
        inputs: list[Value],
        kwargs: dict[str, Value],
        outputs: list[Value],
        stack: tuple[str, ...] = (),
    ) -> None:
        number = int(key.split(".")[-2])
        call = Call(key, "api", name, number, phase, inputs, kwargs, outputs, stack=stack)
        self.dumps[self.step, rank][key] = call

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
        kernel, numerics, planted = KERNELS[entry.name], self.numerics, self._hit(rank, key)
        assert kernel.backward is not None, entry.name
        ins = entry.saved[rank]
        outs = [t.values[rank] for t in entry.outputs]
        used, settings = ins, entry.settings
        if planted:
            if planted.stage == "given":
                planted.done["before"] = grads
                grads = planted.change(grads, self, rank)
            if planted.stage == "hidden":
                used = planted.change(ins, self, rank)
            if planted.stage == "hidden settings":
                settings = planted.change(dict(settings))
            if planted.stage == "numerics":
                numerics = planted.change(numerics)
        with np.errstate(all="ignore"):
            raw = kernel.backward(used, settings, outs, grads, numerics)
        mine = [(g, t) for g, t in zip(raw, entry.inputs, strict=True) if t.is_float and t.needs]
        made = [rounded(np.asarray(g), t.dtype) for g, t in mine]
        if planted:
            places = [i for i, t in enumerate(entry.inputs) if t.is_float and t.needs]
            planted.done |= {"args": ins, "outs_forward": outs, "grads": grads, "places": places}
            planted.done |= {"settings": entry.settings, "kind": mine[0][1].dtype}
            if planted.stage == "result":
                made = planted.change(made, grads, self, rank)
            planted.done["outs"] = made
        self._note(self._site(entry.name, [key], [rank], made[0], mine[0][1].dtype, grads), made)
        floats = [t for t in entry.outputs if t.is_float]
        came = [record(g, t.dtype) for g, t in zip(grads, floats, strict=True)]
        went: list[Value] = [record(g, t.dtype) for g, (_, t) in zip(made, mine, strict=True)]
        self._save(rank, key, entry.name, Phase.BACKWARD, [*came], {}, went)
        return made

    # ------------------------------------------------------------------ collectives

    def collective(
        self,
        name: str,
        x: Tensor,
        groups: Sequence[Sequence[int]],
        settings: dict[int, dict[str, Any]] | None = None,
    ) -> Tensor:
        """Run a collective in each group; no gradient.

        Args:
            x: What each rank gives.
            groups: Ranks that belong together; those without are left alone.
            settings: Further arguments of each rank.
        """
        full, exchange = f"Distributed.{name}", EXCHANGES[name]
        values: dict[int, Array] = {}
        for group in groups:
            keys = [self._key(rank, full) for rank in group]
            given = [settings[r] if settings else {} for r in group]
            parts = [x.values[r] for r in group]
            planted = self._hit(group[0], keys[0])
            if planted:
                if planted.stage == "send":
                    planted.done["before"] = parts
                    parts = planted.change(parts, self, list(group))
                planted.done |= {"parts": parts, "exchange": exchange, "given": given, "all": x}
            got = exchange(parts, given, self.numerics, x.dtype)
            if planted:
                if planted.stage == "exchange":
                    got = planted.change(got, parts, x, list(group), exchange, given, self)
                planted.done["outs"] = got
            self._note(self._site(full, keys, group, got[0], x.dtype, parts))
            about = {"group_ranks": list(group), "group_id": ""}
            for rank, key, part, mine, extra in zip(group, keys, parts, got, given, strict=True):
                values[rank] = mine
                kwargs = {
                    "tensor" if "reduce" in name else "input": record(part, x.dtype),
                    **{k: Scalar(type(v).__name__, v) for k, v in extra.items()},
                    "group": Scalar("torch.distributed.ProcessGroup", about),
                }
                self._save(rank, key, full, Phase.FORWARD, [], kwargs, [record(mine, x.dtype)])
        return Tensor(values, x.dtype)

    def transfer(self, x: Tensor, to: dict[int, int]) -> Tensor:
        """Send the tensor of each rank to another rank.

        Args:
            to: Receiver by sender.
        """
        values: dict[int, Array] = {}
        for rank, other in to.items():
            sent, got = self._key(rank, "Distributed.send"), self._key(other, "Distributed.recv")
            value = x.values[rank]
            self._note(self._site("Distributed.recv", [got], [other], value, x.dtype, [value]))
            planted = self._hit(other, got)
            if planted:
                planted.done |= {"parts": [value], "kind": x.dtype}
                value = planted.change([value], self, [rank, other])[0]
                planted.done["outs"] = [value]
            values[other] = value
            given, made = record(x.values[rank], x.dtype), record(value, x.dtype)
            to_other, from_rank = {"dst": Scalar("int", other)}, {"src": Scalar("int", rank)}
            self._save(rank, sent, "Distributed.send", Phase.FORWARD, [given], to_other, [])
            self._save(other, got, "Distributed.recv", Phase.FORWARD, [], from_rank, [made])
        return Tensor(values, x.dtype)

    def remember(
        self, inputs: list[Tensor], outputs: list[Tensor], back: Callable[[], None]
    ) -> None:
        """Record on the tape how gradients flow back through a step that is no operator."""
        self.tape.append(_Entry("", inputs, outputs, {}, {}, self.tag, back))
