"""A mixture-of-experts model of TeleChat's shape, trained for some steps on the ranks of a layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.align_faults.engine import Engine, Tensor, send
from benchmarks.align_faults.kernels import Array, Numerics, rounded
from benchmarks.align_faults.layouts import Layout
from benchmarks.align_faults.placement import chosen_layout, weight_layout


@dataclass(frozen=True)
class Shape:
    """Sizes.

    Attributes:
        hidden: Of the residual stream.
        heads: Of attention.
        layers: All of them with experts but the first, where ``dense`` says so.
        experts: Routed experts.
        top: Experts of a token.
        inner: Of an expert.
        vocab: Tokens known.
        sequence: Tokens of a sequence; a replica has one in a micro-batch.
        dense: Whether the first layer has no experts.
        fused: Attention, SwiGLU and rotation as one operator each.
        steps: Steps of training.
        eps: Of norms.
        rate: Of learning.
        decay: Of weights.
        clip: Largest norm of gradients.
        ties: Experts score nearly the same.
    """

    hidden: int = 16
    heads: int = 4
    layers: int = 2
    experts: int = 4
    top: int = 2
    inner: int = 16
    vocab: int = 32
    sequence: int = 8
    dense: bool = False
    fused: bool = True
    steps: int = 1
    eps: float = 1e-6
    rate: float = 1e-2
    decay: float = 0.1
    clip: float = 1.0
    ties: bool = False


ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}


@dataclass
class Weight:
    """A weight on the ranks that hold it.

    Attributes:
        name: Its name.
        model: As operators take it, in the program's type.
        master: As the optimizer keeps it, float32.
        groups: Ranks among which gradients are added.
        copies: On how many ranks each element lies.
        tensor: The dimension that ranks of ``tp`` cut.
        halves: That dimension holds two things (gate and up), each of them cut.
        sequence: Ranks among which gradients are added because each saw a piece of the sequence.
        state: Moments of Adam.
    """

    name: str
    model: Tensor
    master: Tensor
    groups: list[list[int]]
    copies: int
    tensor: int | None = None
    halves: bool = False
    sequence: list[list[int]] = field(default_factory=list)
    state: list[Tensor] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the piece that a rank computes with."""
        return next(iter(self.model.values.values())).shape


class Model:
    """The program.

    Args:
        layout: Of the ranks.
        shape: Sizes.
        numerics: How it computes.
        seed: Of weights and data.
        engine: Runs and records.
    """

    def __init__(
        self, layout: Layout, shape: Shape, numerics: Numerics, seed: int, engine: Engine
    ) -> None:
        self.layout, self.shape, self.numerics, self.engine = layout, shape, numerics, engine
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.weights: dict[str, Weight] = {}
        self.stage_of = [
            (i * layout.pp * layout.chunks // shape.layers) % layout.pp for i in range(shape.layers)
        ]
        self._make_weights()

    # ------------------------------------------------------------------ weights

    def _make_weights(self) -> None:
        s, lay = self.shape, self.layout
        t = lay.tp
        self._weight("embedding", (s.vocab, s.hidden), 0, sequence=True)
        for i in range(s.layers):
            stage, p = self.stage_of[i], f"layers.{i}."
            for norm in ("norm1", "norm2"):
                self._weight(p + norm, (s.hidden,), stage, norm=True)
            for name in ("q", "k", "v"):
                self._weight(p + name, (s.hidden, s.hidden), stage, cut=0)
            self._weight(p + "o", (s.hidden, s.hidden), stage, cut=1)
            self._weight(p + "gate_up", (2 * s.inner, s.hidden), stage, cut=0, halves=True)
            self._weight(p + "down", (s.hidden, s.inner), stage, cut=1)
            if i or not s.dense:
                self._weight(p + "router", (s.experts, s.hidden), stage, sequence=True, scale=2.0)
                self._expert(p + "w1", (s.experts, s.hidden, 2 * s.inner), stage, 2)
                self._expert(p + "w2", (s.experts, s.inner, s.hidden), stage, 1)
        last = lay.pp - 1
        self._weight("norm", (s.hidden,), last, norm=True)
        self._weight("head", (s.vocab, s.hidden), last, sequence=True)
        assert t <= s.heads

    def _weight(
        self,
        name: str,
        shape: tuple[int, ...],
        stage: int,
        cut: int | None = None,
        norm: bool = False,
        halves: bool = False,
        sequence: bool = False,
        scale: float = 1.0,
    ) -> None:
        lay = self.layout
        x = self.rng.normal(size=shape) * scale / np.sqrt(shape[-1])
        if norm:
            x = 1 + 0.2 * self.rng.normal(size=shape)
        if name == "embedding":
            x = self.rng.normal(size=shape)
        if name.endswith("router") and self.shape.ties:
            x[1:] = x[:1] * (1 + 8e-3 * self.rng.normal(size=x[1:].shape))
        values = {}
        for rank in lay.ranks(stage):
            part = x
            if cut is not None and halves:
                two = [np.split(h, lay.tp, cut)[lay.place(rank)[2]] for h in np.split(x, 2, cut)]
                part = np.concatenate(two, cut)
            elif cut is not None:
                part = np.split(x, lay.tp, cut)[lay.place(rank)[2]]
            values[rank] = part
        copies = lay.dp * lay.cp * (1 if cut is not None else lay.tp)
        self._add(name, values, lay.data(stage), copies, cut, halves)
        if lay.sp and lay.tp > 1 and (norm or sequence):
            self.weights[name].sequence = lay.tensor(stage)

    def _expert(self, name: str, shape: tuple[int, ...], stage: int, cut: int) -> None:
        lay = self.layout
        x = self.rng.normal(size=shape) / np.sqrt(shape[1])
        values = {}
        members = lay.ep * (lay.tp if lay.extend else 1)
        for rank in lay.ranks(stage):
            index, t = lay.expert_place(rank)  # type: ignore[misc]
            part = np.split(x, members, 0)[index]
            if not lay.extend and lay.tp > 1:
                pieces = (
                    [
                        np.concatenate([np.split(h, lay.tp, 2)[j] for h in np.split(part, 2, 2)], 2)
                        for j in range(lay.tp)
                    ]
                    if cut == 2
                    else np.split(part, lay.tp, 1)
                )
                part = pieces[t]
            values[rank] = part
        copies = lay.stage_size // members // (1 if lay.extend else lay.tp)
        within = None if lay.extend else cut
        self._add(name, values, lay.same_experts(stage), copies, within, cut == 2)

    def _add(
        self,
        name: str,
        values: dict[int, Any],
        groups: list[list[int]],
        copies: int,
        cut: int | None,
        halves: bool,
    ) -> None:
        kind = self.numerics.dtype
        exact = {
            # values that every type holds, so that runs in different types begin with the same
            r: rounded(np.ascontiguousarray(v, np.float32), "bfloat16")
            for r, v in values.items()
        }
        master = Tensor(exact, "float32")
        model = Tensor({r: rounded(v, kind) for r, v in exact.items()}, kind, True)
        self.weights[name] = Weight(name, model, master, groups, copies, cut, halves)

    # ------------------------------------------------------------------ data

    def batch(self, step: int, micro: int) -> tuple[Array, Array]:
        """Return tokens and labels of all replicas: ``(dp, sequence)``; every layout draws the same sequences."""
        s, dp = self.shape, self.layout.dp
        rows = [
            np.random.default_rng([self.seed, 7, step, i]).integers(0, s.vocab, s.sequence + 1)
            for i in range(micro * dp, (micro + 1) * dp)
        ]
        x = np.stack(rows)
        return x[:, :-1], x[:, 1:]

    def _local(self, x: Array, stage: int) -> Tensor:
        """Cut ``(dp, sequence)`` to the ranks of a stage by data and context."""
        lay = self.layout
        return Tensor(
            {
                r: np.ascontiguousarray(np.split(x[lay.place(r)[0]], lay.cp)[lay.place(r)[1]])
                for r in lay.ranks(stage)
            },
            "int64",
        )

    def _shard(self, x: Tensor) -> Tensor:
        """Cut rows over the ranks of ``tp`` where the layout does."""
        lay = self.layout
        if not lay.sp or lay.tp == 1:
            return x
        return Tensor(
            {r: np.split(v, lay.tp)[lay.place(r)[2]].copy() for r, v in x.values.items()},
            x.dtype,
        )

    # ------------------------------------------------------------------ collectives with gradients

    def gather(self, x: Tensor, groups: list[list[int]]) -> Tensor:
        """All-gather of rows; gradients are reduced and scattered."""
        e = self.engine
        y = e.collective("all_gather_into_tensor", x, groups, all_gather)
        y.needs = x.needs

        def back() -> None:
            if y.grad:
                g = e.collective(
                    "reduce_scatter_tensor", Tensor(y.grad, y.dtype), groups, reduce_scatter
                )
                _send(x, g)

        if x.needs:
            e.remember([x], [y], back)
        return y

    def scatter(self, x: Tensor, groups: list[list[int]]) -> Tensor:
        """Reduce-scatter of rows; gradients are gathered."""
        e = self.engine
        y = e.collective("reduce_scatter_tensor", x, groups, reduce_scatter)
        y.needs = True
        e.remember(
            [x],
            [y],
            lambda: _send(
                x,
                e.collective("all_gather_into_tensor", Tensor(y.grad, y.dtype), groups, all_gather),
            ),
        )
        return y

    def reduce(self, x: Tensor, groups: list[list[int]]) -> Tensor:
        """All-reduce; gradients pass."""
        y = self.engine.collective("all_reduce", x, groups, all_reduce)
        y.needs = True
        self.engine.remember([x], [y], lambda: _send(x, Tensor(y.grad, y.dtype)))
        return y

    def copied(self, x: Tensor, groups: list[list[int]]) -> Tensor:
        """Pass; gradients are reduced."""
        e = self.engine
        y = Tensor(x.values, x.dtype, x.needs)
        e.remember(
            [x],
            [y],
            lambda: _send(
                x, e.collective("all_reduce", Tensor(y.grad, y.dtype), groups, all_reduce)
            ),
        )
        return y

    def exchange(self, x: Tensor, groups: list[list[int]], sizes: dict[int, list[int]]) -> Tensor:
        """All-to-all of rows; gradients go the way back.

        Args:
            x: Rows of each rank, in the order of the ranks that they go to.
            groups: Ranks that exchange.
            sizes: Rows to each rank of the group.
        """
        e = self.engine
        back_sizes = {
            r: [sizes[other][i] for other in group] for group in groups for i, r in enumerate(group)
        }

        def settings(a: dict[int, list[int]], b: dict[int, list[int]]) -> dict[int, dict[str, Any]]:
            return {
                r: {"output_split_sizes": list(b[r]), "input_split_sizes": list(a[r])} for r in a
            }

        y = e.collective("all_to_all_single", x, groups, all_to_all, settings(sizes, back_sizes))
        y.needs = x.needs

        def back() -> None:
            g = e.collective(
                "all_to_all_single",
                Tensor(y.grad, y.dtype),
                groups,
                all_to_all,
                settings(back_sizes, sizes),
            )
            _send(x, g)

        if x.needs:
            e.remember([x], [y], back)
        return y

    def enter(self, x: Tensor, stage: int) -> Tensor:
        """From what norms see to what the ranks of ``tp`` share."""
        lay = self.layout
        if lay.tp == 1:
            return x
        return (self.gather if lay.sp else self.copied)(x, lay.tensor(stage))

    def leave(self, x: Tensor, stage: int) -> Tensor:
        """From terms of the ranks of ``tp`` to their sum."""
        lay = self.layout
        if lay.tp == 1:
            return x
        return (self.scatter if lay.sp else self.reduce)(x, lay.tensor(stage))

    def move(self, x: Tensor, stage: int, to: int) -> Tensor:
        """Send to another stage; gradients come back."""
        e, lay = self.engine, self.layout
        y = transfer(e, x, lay, stage, to)
        y.needs = True
        e.remember([x], [y], lambda: _send(x, transfer(e, Tensor(y.grad, y.dtype), lay, to, stage)))
        return y

    # ------------------------------------------------------------------ layers

    def loss(self, step: int, micro: int) -> Tensor:
        """Return the loss of a micro-batch on the ranks of the last stage."""
        e, lay, w = self.engine, self.layout, self.weights
        ids, labels = self.batch(step, micro)
        e.tag = "embedding"
        x = e.op("Functional.embedding", self._shard(self._local(ids, 0)), w["embedding"].model)
        stage = 0
        for i in range(self.shape.layers):
            if self.stage_of[i] != stage:
                e.tag = "pipeline"
                x, stage = self.move(x, stage, self.stage_of[i]), self.stage_of[i]
            x = self.layer(x, i, stage)
        if stage != lay.pp - 1:
            x, stage = self.move(x, stage, lay.pp - 1), lay.pp - 1
        e.tag = "head"
        x = self.norm(x, "norm")
        y = e.op("Functional.linear", x, w["head"].model)
        y = e.op("Tensor.to", y, dtype="float32")
        target = self._shard(self._local(labels, stage))
        loss = e.op("Functional.cross_entropy", y, target, reduction="sum")
        count = lay.dp * self.shape.sequence * lay.micro
        scale = 1.0 / count
        return e.op("Torch.mul", loss, other=scale)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm."""
        s = self.shape
        return self.engine.op(
            "Functional.rms_norm", x, self.weights[name].model, shape=[s.hidden], eps=s.eps
        )

    def layer(self, x: Tensor, i: int, stage: int) -> Tensor:
        """Attention and experts, each with a norm before and a sum after."""
        e, p = self.engine, f"layers.{i}."
        e.tag = "attention"
        x = e.op("Torch.add", x, self.attention(self.norm(x, p + "norm1"), p, stage))
        e.tag = "mlp"
        h = self.norm(x, p + "norm2")
        y = self.mlp(self.enter(h, stage), p)
        routed = p + "router" in self.weights
        y = self.experts(h, y, p, stage) if routed else self.leave(y, stage)
        return e.op("Torch.add", x, y)

    def attention(self, h: Tensor, p: str, stage: int) -> Tensor:
        """Causal attention with rotary positions; keys of a context group are gathered."""
        e, s, lay, w = self.engine, self.shape, self.layout, self.weights
        h = self.enter(h, stage)
        n, dim, rows = s.heads // lay.tp, s.hidden // s.heads, s.sequence // lay.cp
        parts = {}
        for name in ("q", "k", "v"):
            y = e.op("Functional.linear", h, w[p + name].model)
            if name != "q" and lay.cp > 1:
                y = self.gather(y, lay.context(stage))
            size = rows if name == "q" else s.sequence
            y = e.op("Tensor.reshape", y, shape=(size, n, dim))
            y = e.op("Tensor.transpose", y, dim0=0, dim1=1)
            if name != "v":
                y = self.rotate(y, dim, name == "q", stage)
            parts[name] = y
        keep = {}
        for rank in h.ranks:
            c = lay.place(rank)[1]
            at = np.arange(rows) + c * rows
            keep[rank] = at[:, None] >= np.arange(s.sequence)[None]
        y = self.attend(parts["q"], parts["k"], parts["v"], keep, dim)
        y = e.op("Tensor.transpose", y, dim0=0, dim1=1)
        y = e.op("Tensor.reshape", y, shape=(rows, n * dim))
        return self.leave(e.op("Functional.linear", y, w[p + "o"].model), stage)

    def rotate(self, x: Tensor, dim: int, local: bool, stage: int) -> Tensor:
        """Rotary positions."""
        e, s, lay = self.engine, self.shape, self.layout
        rate = 1e4 ** (-np.arange(0, dim, 2) / dim)
        cos, sin = {}, {}
        for rank in x.ranks:
            at = np.arange(s.sequence)
            at = np.split(at, lay.cp)[lay.place(rank)[1]] if local else at
            angle = np.concatenate([at[:, None] * rate] * 2, -1)
            for kept, f in ((cos, np.cos), (sin, np.sin)):
                kept[rank] = rounded(f(angle).astype(np.float32), self.numerics.dtype)
        c, n = Tensor(cos, self.numerics.dtype), Tensor(sin, self.numerics.dtype)
        if s.fused:
            return e.op("NPU.npu_rotary_mul", x, c, n)
        a, b = e.op("Torch.chunk", x, chunks=2, dim=-1)
        turned = e.op("Torch.cat", e.op("Torch.neg", b), a, dim=-1)
        return e.op("Torch.add", e.op("Torch.mul", x, c), e.op("Torch.mul", turned, n))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: dict[int, Array], dim: int) -> Tensor:
        """Softmax attention."""
        e, scale = self.engine, dim**-0.5
        if self.shape.fused:
            name = "Functional.scaled_dot_product_attention"
            return e.op(name, q, k, v, Tensor(keep, "bool"), scale=scale)
        score = e.op("Torch.matmul", q, e.op("Tensor.transpose", k, dim0=1, dim1=2))
        score = e.op("Torch.mul", score, other=scale)
        hidden = Tensor({r: ~x for r, x in keep.items()}, "bool")
        score = e.op("Tensor.masked_fill", score, hidden, value=float("-inf"))
        return e.op("Torch.matmul", e.op("Functional.softmax", score, dim=-1), v)

    def swiglu(self, x: Tensor) -> Tensor:
        """``silu(first half) * second half``."""
        e = self.engine
        if self.shape.fused:
            return e.op("NPU.npu_swiglu", x, dim=-1)
        gate, up = e.op("Torch.chunk", x, chunks=2, dim=-1)
        return e.op("Torch.mul", e.op("Functional.silu", gate), up)

    def mlp(self, h: Tensor, p: str) -> Tensor:
        """The expert that sees every token; terms of the ranks of ``tp``."""
        e, w = self.engine, self.weights
        y = self.swiglu(e.op("Functional.linear", h, w[p + "gate_up"].model))
        return e.op("Functional.linear", y, w[p + "down"].model)

    def route(self, h: Tensor, p: str) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of each token's experts."""
        e, s = self.engine, self.shape
        e.tag = "router"
        logits = e.op("Functional.linear", h, self.weights[p + "router"].model)
        score = e.op("Torch.sigmoid", e.op("Tensor.to", logits, dtype="float32"))
        e.said = f"choice {p}router", chosen_layout(self.layout, score.ranks)
        _, index = e.op("Torch.topk", score, k=s.top, dim=-1)
        e.said = None
        picked = e.op("Torch.gather", score, index, dim=1)
        total = e.op("Torch.sum", picked, dim=-1, keepdim=True)
        probs = e.op("Torch.div", picked, total)
        probs = e.op("Torch.mul", probs, other=1.5)
        return e.op("Tensor.to", probs, dtype=self.numerics.dtype), index

    def experts(self, h: Tensor, shared: Tensor, p: str, stage: int) -> Tensor:
        """Routed experts and the sum with the shared one."""
        e, s, lay, w = self.engine, self.shape, self.layout, self.weights
        probs, index = self.route(h, p)
        e.tag = "experts"
        if lay.tp > 1 and not lay.extend:
            h = self.enter(h, stage)
            if lay.sp:
                index = e.collective("all_gather_into_tensor", index, lay.tensor(stage), all_gather)
            probs = self.enter(probs, stage)
        rows, went = e.op("NPU.npu_moe_token_permute", h, index)
        counts = e.op("Torch.bincount", index, minlength=s.experts)
        members = lay.ep * (lay.tp if lay.extend else 1)
        if members == 1:
            y = self._ffn(rows, counts, w, p)
        else:
            y = self._far(rows, counts, w, p, stage, members)
        y = e.op("NPU.npu_moe_token_unpermute", y, went, probs)
        if lay.extend:
            return e.op("Torch.add", self.leave(shared, stage), y)
        return self.leave(e.op("Torch.add", shared, y), stage)

    def _far(
        self,
        rows: Tensor,
        counts: Tensor,
        w: dict[str, Weight],
        p: str,
        stage: int,
        members: int,
    ) -> Tensor:
        """Experts of other ranks: tokens go there and come back."""
        e, s, groups = self.engine, self.shape, self.layout.experts(stage)
        each = s.experts // members
        sizes = {
            r: [int(n) for n in c.reshape(members, each).sum(1)] for r, c in counts.values.items()
        }
        known = {r: [each] * members for r in counts.ranks}
        theirs = self.exchange(counts, groups, known)
        sent = self.exchange(rows, groups, sizes)
        table = e.op("Tensor.reshape", theirs, shape=(members, each))
        local = e.op("Torch.sum", table, dim=0)
        number = Tensor({r: np.tile(np.arange(each), members) for r in counts.ranks}, "int64")
        expert = e.op("Torch.repeat_interleave", number, theirs)
        order = e.op("Torch.argsort", expert)
        y = self._ffn(e.op("Torch.index_select", sent, order, dim=0), local, w, p)
        y = e.op("Torch.index_select", y, e.op("Torch.argsort", order), dim=0)
        back = {r: [sizes[o][i] for o in group] for group in groups for i, r in enumerate(group)}
        return self.exchange(y, groups, back)

    def _ffn(self, x: Tensor, counts: Tensor, w: dict[str, Weight], p: str) -> Tensor:
        e = self.engine
        y = e.op("NPU.grouped_matmul", x, w[p + "w1"].model, counts)
        return e.op("NPU.grouped_matmul", self.swiglu(y), w[p + "w2"].model, counts)

    # ------------------------------------------------------------------ a step

    def train(self) -> None:
        """Run the steps."""
        e, lay = self.engine, self.layout
        world = range(lay.world)
        for step in range(self.shape.steps):
            e.begin(step, world)
            e.earlier = {n: t.values for n, t in e.weights.items()}
            e.weights = {n: w.model for n, w in self.weights.items()}
            for micro in range(lay.micro):
                e.phase = "forward"
                e.backward(self.loss(step, micro))
            self.update(step)

    def update(self, step: int) -> None:
        """Reduce gradients, clip them, update weights."""
        e = self.engine
        e.phase, e.tag = "reduction", "gradient"
        grads: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            held = weight.model
            none = {r: np.zeros_like(v) for r, v in held.values.items()}
            g = Tensor({**none, **held.grad}, held.dtype)
            weight.model.grad = {}
            if weight.sequence:
                g = e.collective("all_reduce", g, weight.sequence, all_reduce)
            grads[name] = self._reduced(weight, g)
        e.phase, e.tag = "optimizer", "clip"
        grads = self._clipped(grads)
        e.tag = "update"
        for name, weight in self.weights.items():
            self._update(weight, grads[name], step)

    def _is_cut(self, weight: Weight) -> bool:
        size = len(weight.groups[0])
        return self.layout.zero and size > 1 and weight.shape[0] % size == 0

    def _reduced(self, weight: Weight, g: Tensor) -> Tensor:
        e = self.engine
        if len(weight.groups[0]) > 1:
            if self._is_cut(weight):
                g = e.collective("reduce_scatter_tensor", g, weight.groups, reduce_scatter)
            else:
                g = e.collective("all_reduce", g, weight.groups, all_reduce)
        return g

    def _clipped(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scale gradients so that the norm over all ranks is at most ``clip``."""
        e, lay, s = self.engine, self.layout, self.shape
        grads = {n: e.op("Tensor.to", g, dtype="float32") for n, g in grads.items()}
        done: dict[int, Array] = {}
        for stage in range(lay.pp):
            own = {n: g for n, g in grads.items() if g.ranks[0] // lay.stage_size == stage}
            norms = [e.op("Torch.norm", g) for g in own.values()]
            squares = e.op("Torch.square", e.op("Torch.stack", *norms, dim=0))
            share = [
                1
                / (
                    self.weights[n].copies
                    / (len(self.weights[n].groups[0]) if self._is_cut(self.weights[n]) else 1)
                )
                for n in own
            ]
            part = Tensor({r: np.array(share, np.float32) for r in squares.ranks}, "float32")
            total = e.op("Torch.sum", e.op("Torch.mul", squares, part), dim=0)
            done |= {r: v.reshape(1) for r, v in total.values.items()}
        total = Tensor(done, "float32")
        if lay.world > 1:
            total = e.collective("all_reduce", total, [list(range(lay.world))], all_reduce)
        norm = e.op("Torch.sqrt", total)
        factor = e.op("Torch.mul", e.op("Torch.reciprocal", norm), other=s.clip)
        factor = e.op("Torch.clamp", factor, max=1.0)
        return {n: e.op("Torch.mul", g, factor.on(g.ranks)) for n, g in grads.items()}

    def _update(self, weight: Weight, g: Tensor, step: int) -> None:
        e, s = self.engine, self.shape
        cut = self._is_cut(weight)
        master = weight.master
        if cut and not weight.state:
            groups = {r: group for group in weight.groups for r in group}
            weight.master = master = Tensor(
                {
                    r: np.split(v, len(groups[r]))[groups[r].index(r)].copy()
                    for r, v in master.values.items()
                },
                "float32",
            )
        if not weight.state:
            zero = {r: np.zeros_like(v) for r, v in master.values.items()}
            weight.state = [Tensor(dict(zero), "float32"), Tensor(dict(zero), "float32")]
        decay = s.decay if len(next(iter(master.values.values())).shape) > 1 else 0.0
        placed = weight.shape, weight.groups, weight.tensor, weight.halves, cut
        e.said = f"weight {weight.name}", weight_layout(self.layout, *placed)
        new = e.op(
            "Optimizer.AdamW",
            master,
            g,
            *weight.state,
            step=float(step + 1),
            lr=s.rate,
            betas=ADAM["betas"],
            eps=ADAM["eps"],
            weight_decay=decay,
        )
        e.said = None
        weight.master, weight.state = new[0], new[1:]
        model = e.op("Tensor.to", weight.master, dtype=self.numerics.dtype)
        if cut:
            model = e.collective("all_gather_into_tensor", model, weight.groups, all_gather)
        weight.model = Tensor(model.values, self.numerics.dtype, True)


def _send(x: Tensor, g: Tensor) -> None:
    for rank, value in g.values.items():
        send(x, rank, value)


# ------------------------------------------------------------------ what ranks receive

Parts = list[Array]
Given = list[dict[str, Any]]


def _total(parts: Sequence[Array], n: Numerics, dtype: str) -> Array:
    """Add up in the tensor's type, in a ring's order or from the end."""
    ordered = list(parts)[::-1] if n.order == "reversed" else list(parts)
    if n.order == "wide":
        return rounded(np.sum([p.astype(np.float64) for p in ordered], 0).astype(np.float32), dtype)
    total = ordered[0]
    for part in ordered[1:]:
        total = rounded(total + part, dtype) if dtype != "int64" else total + part
    return total


def all_reduce(parts: Parts, given: Given, n: Numerics, dtype: str) -> Parts:
    """Sum, to all."""
    total = _total(parts, n, dtype)
    return [total.copy() for _ in parts]


def all_gather(parts: Parts, given: Given, n: Numerics, dtype: str) -> Parts:
    """Rows of all, to all."""
    return [np.concatenate(parts, 0) for _ in parts]


def reduce_scatter(parts: Parts, given: Given, n: Numerics, dtype: str) -> Parts:
    """Rows of the sum."""
    return [x.copy() for x in np.split(_total(parts, n, dtype), len(parts), 0)]


def all_to_all(parts: Parts, given: Given, n: Numerics, dtype: str) -> Parts:
    """Rows by where they go."""
    cut = [
        np.split(p, np.cumsum(g["input_split_sizes"])[:-1])
        for p, g in zip(parts, given, strict=True)
    ]
    return [np.concatenate([c[i] for c in cut], 0) for i in range(len(parts))]


def transfer(e: Engine, x: Tensor, layout: Layout, stage: int, to: int) -> Tensor:
    """Send the tensors of a stage to another; each rank to that of its place."""
    shift = (to - stage) * layout.stage_size
    return e.transfer(x, {r: r + shift for r in layout.ranks(stage)})


Program = Callable[[Engine], Model]
