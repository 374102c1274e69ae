"""A mixture-of-experts model of TeleChat's shape, trained for some steps on the ranks of a layout."""

import numpy as np

from benchmarks.align_faults.communication import Communication
from benchmarks.align_faults.engine import Engine
from benchmarks.align_faults.kernels import Array, Numerics, rounded
from benchmarks.align_faults.layouts import RankLayout
from benchmarks.align_faults.placement import chosen_layout, weight_layout
from benchmarks.align_faults.tensors import Tensor
from benchmarks.align_faults.weights import Shape, Weight, WeightSource

ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}


class Model:
    """The program."""

    def __init__(
        self, layout: RankLayout, shape: Shape, numerics: Numerics, seed: int, engine: Engine
    ) -> None:
        self.layout, self.shape, self.numerics, self.engine = layout, shape, numerics, engine
        self.ranks = Communication(engine, layout)
        self.seed = seed
        self.stage_of = [
            (i * layout.pp * layout.chunks // shape.layers) % layout.pp for i in range(shape.layers)
        ]
        rng = np.random.default_rng(seed)
        self.weights = WeightSource(layout, shape, numerics, rng, self.stage_of).draw()

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
        """Divide ``(dp, sequence)`` over the ranks of a stage by data and context."""
        lay, values = self.layout, {}
        for rank in lay.ranks(stage):
            data, context, _ = lay.place(rank)
            values[rank] = np.ascontiguousarray(np.split(x[data], lay.cp)[context])
        return Tensor(values, "int64")

    def _shard(self, x: Tensor) -> Tensor:
        """Divide rows over the ranks of ``tp`` if the layout does."""
        lay = self.layout
        if not lay.sp or lay.tp == 1:
            return x
        rows = {r: np.split(v, lay.tp)[lay.place(r)[2]].copy() for r, v in x.values.items()}
        return Tensor(rows, x.dtype)

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
                x, stage = self.ranks.move(x, stage, self.stage_of[i]), self.stage_of[i]
            x = self.layer(x, i, stage)
        if stage != lay.pp - 1:
            x, stage = self.ranks.move(x, stage, lay.pp - 1), lay.pp - 1
        e.tag = "head"
        x = self.norm(x, "norm")
        y = e.op("Functional.linear", x, w["head"].model)
        y = e.op("Tensor.to", y, dtype="float32")
        target = self._shard(self._local(labels, stage))
        loss = e.op("Functional.cross_entropy", y, target, reduction="sum")
        return e.op("Torch.mul", loss, other=1.0 / (lay.dp * self.shape.sequence * lay.micro))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply RMSNorm."""
        s = self.shape
        return self.engine.op(
            "Functional.rms_norm", x, self.weights[name].model, shape=[s.hidden], eps=s.eps
        )

    def layer(self, x: Tensor, i: int, stage: int) -> Tensor:
        """Apply attention and experts, each with a norm before and a sum after it."""
        e, p = self.engine, f"layers.{i}."
        e.tag = "attention"
        x = e.op("Torch.add", x, self.attention(self.norm(x, p + "norm1"), p, stage))
        e.tag = "mlp"
        h = self.norm(x, p + "norm2")
        y = self.mlp(self.ranks.enter(h, stage), p)
        routed = p + "router" in self.weights
        y = self.experts(h, y, p, stage) if routed else self.ranks.leave(y, stage)
        return e.op("Torch.add", x, y)

    def attention(self, h: Tensor, p: str, stage: int) -> Tensor:
        """Apply causal attention with rotary positions; the keys of a context group are gathered."""
        e, s, lay, w = self.engine, self.shape, self.layout, self.weights
        h = self.ranks.enter(h, stage)
        n, dim, rows = s.heads // lay.tp, s.hidden // s.heads, s.sequence // lay.cp
        parts = {}
        for name in ("q", "k", "v"):
            y = e.op("Functional.linear", h, w[p + name].model)
            if name != "q" and lay.cp > 1:
                y = self.ranks.gather(y, lay.context(stage))
            size = rows if name == "q" else s.sequence
            y = e.op("Tensor.reshape", y, shape=(size, n, dim))
            y = e.op("Tensor.transpose", y, dim0=0, dim1=1)
            if name != "v":
                y = self.rotate(y, dim, name == "q", stage)
            parts[name] = y
        keep = {}
        for rank in h.ranks:
            at = np.arange(rows) + lay.place(rank)[1] * rows
            keep[rank] = at[:, None] >= np.arange(s.sequence)[None]
        y = self.attend(parts["q"], parts["k"], parts["v"], keep, dim)
        y = e.op("Tensor.transpose", y, dim0=0, dim1=1)
        y = e.op("Tensor.reshape", y, shape=(rows, n * dim))
        return self.ranks.leave(e.op("Functional.linear", y, w[p + "o"].model), stage)

    def rotate(self, x: Tensor, dim: int, local: bool, stage: int) -> Tensor:
        """Apply rotary positions."""
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
        """Apply softmax attention."""
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
        """Return ``silu(first half) * second half``."""
        e = self.engine
        if self.shape.fused:
            return e.op("NPU.npu_swiglu", x, dim=-1)
        gate, up = e.op("Torch.chunk", x, chunks=2, dim=-1)
        return e.op("Torch.mul", e.op("Functional.silu", gate), up)

    def mlp(self, h: Tensor, p: str) -> Tensor:
        """Apply the expert that sees every token; return the terms of the ranks of ``tp``."""
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
        """Apply the routed experts and add the shared one."""
        e, s, lay = self.engine, self.shape, self.layout
        probs, index = self.route(h, p)
        e.tag = "experts"
        if lay.tp > 1 and not lay.extend:
            h = self.ranks.enter(h, stage)
            if lay.sp:
                index = e.collective("all_gather_into_tensor", index, lay.tensor(stage))
            probs = self.ranks.enter(probs, stage)
        rows, went = e.op("NPU.npu_moe_token_permute", h, index)
        counts = e.op("Torch.bincount", index, minlength=s.experts)
        members = lay.ep * (lay.tp if lay.extend else 1)
        if members == 1:
            y = self._ffn(rows, counts, p)
        else:
            y = self._far(rows, counts, p, stage, members)
        y = e.op("NPU.npu_moe_token_unpermute", y, went, probs)
        if lay.extend:
            return e.op("Torch.add", self.ranks.leave(shared, stage), y)
        return self.ranks.leave(e.op("Torch.add", shared, y), stage)

    def _far(self, rows: Tensor, counts: Tensor, p: str, stage: int, members: int) -> Tensor:
        """Apply experts of other ranks: tokens go there and come back."""
        e, s, groups = self.engine, self.shape, self.layout.experts(stage)
        each = s.experts // members
        sizes = {
            r: [int(n) for n in c.reshape(members, each).sum(1)] for r, c in counts.values.items()
        }
        known = {r: [each] * members for r in counts.ranks}
        theirs = self.ranks.exchange(counts, groups, known)
        sent = self.ranks.exchange(rows, groups, sizes)
        table = e.op("Tensor.reshape", theirs, shape=(members, each))
        local = e.op("Torch.sum", table, dim=0)
        number = Tensor({r: np.tile(np.arange(each), members) for r in counts.ranks}, "int64")
        expert = e.op("Torch.repeat_interleave", number, theirs)
        order = e.op("Torch.argsort", expert)
        y = self._ffn(e.op("Torch.index_select", sent, order, dim=0), local, p)
        y = e.op("Torch.index_select", y, e.op("Torch.argsort", order), dim=0)
        back = {r: [sizes[o][i] for o in group] for group in groups for i, r in enumerate(group)}
        return self.ranks.exchange(y, groups, back)

    def _ffn(self, x: Tensor, counts: Tensor, p: str) -> Tensor:
        e, w = self.engine, self.weights
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
            model = weight.model
            none = {r: np.zeros_like(v) for r, v in model.values.items()}
            g = Tensor({**none, **model.grad}, model.dtype)
            model.grad = {}
            if weight.sequence:
                g = e.collective("all_reduce", g, weight.sequence)
            if len(weight.groups[0]) > 1:
                reduction = "reduce_scatter_tensor" if self._is_cut(weight) else "all_reduce"
                g = e.collective(reduction, g, weight.groups)
            grads[name] = g
        e.phase, e.tag = "optimizer", "clip"
        grads = self._clipped(grads)
        e.tag = "update"
        for name, weight in self.weights.items():
            self._update(weight, grads[name], step)

    def _is_cut(self, weight: Weight) -> bool:
        size = len(weight.groups[0])
        return self.layout.zero and size > 1 and weight.shape[0] % size == 0

    def _share(self, weight: Weight) -> float:
        """Return how much of the squares of a shard counts: other ranks hold the same."""
        return 1 / (weight.copies / (len(weight.groups[0]) if self._is_cut(weight) else 1))

    def _clipped(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scale gradients so that the norm over all ranks is at most ``clip``."""
        e, lay, s = self.engine, self.layout, self.shape
        grads = {n: e.op("Tensor.to", g, dtype="float32") for n, g in grads.items()}
        done: dict[int, Array] = {}
        for stage in range(lay.pp):
            own = {n: g for n, g in grads.items() if g.ranks[0] // lay.stage_size == stage}
            norms = [e.op("Torch.norm", g) for g in own.values()]
            squares = e.op("Torch.square", e.op("Torch.stack", *norms, dim=0))
            share = [self._share(self.weights[n]) for n in own]
            part = Tensor({r: np.array(share, np.float32) for r in squares.ranks}, "float32")
            total = e.op("Torch.sum", e.op("Torch.mul", squares, part), dim=0)
            done |= {r: v.reshape(1) for r, v in total.values.items()}
        total = Tensor(done, "float32")
        if lay.world > 1:
            total = e.collective("all_reduce", total, [list(range(lay.world))])
        norm = e.op("Torch.sqrt", total)
        factor = e.op("Torch.mul", e.op("Torch.reciprocal", norm), other=s.clip)
        factor = e.op("Torch.clamp", factor, max=1.0)
        return {n: e.op("Torch.mul", g, factor.on(g.ranks)) for n, g in grads.items()}

    def _update(self, weight: Weight, g: Tensor, step: int) -> None:
        e, s = self.engine, self.shape
        cut = self._is_cut(weight)
        master = weight.master
        if not weight.state:
            if cut:
                groups = {r: group for group in weight.groups for r in group}
                rows = {
                    r: np.split(v, len(groups[r]))[groups[r].index(r)].copy()
                    for r, v in master.values.items()
                }
                master = Tensor(rows, "float32")
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
            **ADAM,
            weight_decay=decay,
        )
        e.said = None
        weight.master, weight.state = new[0], new[1:]
        model = e.op("Tensor.to", weight.master, dtype=self.numerics.dtype)
        if cut:
            model = e.collective("all_gather_into_tensor", model, weight.groups)
        weight.model = Tensor(model.values, self.numerics.dtype, True)
