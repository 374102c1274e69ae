"""Predict the collectives of a compiled graph's step from a recipe's numbers alone.

`telechat_moe.sharding` lays out the operators and MindSpore derives the collectives. These formulas give the same
collectives, so that the two can be compared. Where the graph does more than is necessary, so do the formulas:

* The batch's columns are gathered over dp once a step, because micro-batches divide the dimension that dp divides.
* The stream crosses stages in its own type, float32 with `fp32_residual_connection`; the balance loss crosses with it.
* Embedding rows are summed in float32, the table's type.
* A backward pass sums the balance losses' gradient over the stage once, however many routers it has.
* Where MTP's layers are recomputed, the head's inputs are gathered once more, too.

Symbols as in `saved`: W, T, R, D rows; P pairs; H width. Element sizes: 2 bytes (`WIDTH`) in products, 4 in norms, router, losses.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from telechat_moe.recipe.weights import Weight
from telechat_moe.sharding.shards import WeightShards
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import stage_of_chunk
from telechat_moe.tools.plan.cost.layout import Layout


class ExpectedCall(NamedTuple):
    """A collective of a step."""

    phase: str
    """`forward`, `recompute`, `backward` or `optimizer`."""
    kind: str
    """MindSpore's name."""
    ranks: tuple[int, ...]
    """Both ends of a Send or Receive."""
    bytes: int
    """Bytes of the larger of input and output; for AlltoAllV, those of evenly spread tokens."""


WIDTH = 2
"""Bytes of an element in products."""

REVERSE = {"AllGather": "ReduceScatter", "ReduceScatter": "AllGather"}


class _ForwardCall(NamedTuple):
    """A collective of the forward pass, and whether recompute and the backward pass have it too."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    backward: bool = True
    """Whether it has a counterpart in the backward pass."""
    recomputed: bool = True
    """Whether recomputing a layer needs its result."""
    by: str = "recompute"
    """Phase that repeats it where a layer is recomputed."""
    members: int = 0
    """Devices of a smaller group, every `stride`-th of those of the axes; 0: all of them."""
    stride: int = 1


class Calls:
    """Collectives of one recipe.

    Args:
        a: The model: MLA, gated feed-forwards, balance loss by sequence, no z-loss.
        x: Its layout; experts reached by AlltoAllV.
    """

    def __init__(self, a: Architecture, x: Layout, shards: WeightShards) -> None:
        self.a, self.x, self.shards, self.mesh = a, x, shards, shards.mesh
        self.whole = x.micro_batch * a.seq
        self.token = self.whole // x.cp
        self.pairs = self.token // (1 if x.etp > 1 else x.tp) * a.top_k

    def of(self, rank: int) -> Counter[ExpectedCall]:
        """Return the calls of a step of a device."""
        stage = self.mesh.stage(rank)
        self.rank, self.calls = rank, Counter[ExpectedCall]()
        self._passes(stage)
        self._batch(stage)
        self._boundaries(stage)
        for weight in self._trained(stage):
            self._weight(weight)
        everyone = tuple(range(self.mesh.devices))
        routers = self.a.moe_layers + self.a.mtp * (self.a.layers[-1] == "moe")
        for size in (1, 3, max(1, routers) * max(1, self.a.experts)):
            self._put("optimizer", "AllReduce", everyone, 4 * size)
        return self.calls

    def gradients(self, rank: int) -> int:
        """Return the elements of gradients that a device holds at the end of a step.

        Accumulators are as large as weights. Without them a gradient is summed at once, and its device's share stays.
        """
        elements = 0
        for weight in self._trained(self.mesh.stage(rank)):
            copies = len(self._copies(weight, rank))
            shared = self.x.micro_batches == 1 and self._shared(weight, copies)
            elements += math.prod(self._shape(weight)) // (copies if shared else 1)
        return elements

    def _trained(self, stage: int) -> list[Weight]:
        weights = self.shards.weights.values()
        return [w for w in weights if w.trained and self.shards.stage(w.name) == stage]

    def _shape(self, weight: Weight) -> tuple[int, ...]:
        """Return the shape of a weight's shard on one device, without sharding of the optimizer."""
        axes = self.shards.axes(weight.name)
        return tuple(n // self.mesh.size(cut) for n, cut in zip(weight.shape, axes, strict=True))

    def _put(self, phase: str, kind: str, ranks: Sequence[int], size: int, times: int = 1) -> None:
        if len(ranks) > 1 and times:
            self.calls[ExpectedCall(phase, kind, tuple(ranks), size)] += times

    def _passes(self, stage: int) -> None:
        """Add the collectives of all micro-batches' forward and backward passes."""
        a, x = self.a, self.x
        place, last = stage_of_chunk(x), x.pp * x.vpp - 1
        full = "full" in x.recompute
        for chunk, layers in enumerate(x.chunk_kinds(a.layers)):
            if chunk == last:
                layers += [(a.layers[-1], x.recompute_layers is None)] * a.mtp
            if place[chunk] != stage:
                continue
            if chunk == 0:
                for _ in range(1 + a.mtp):
                    self._run(self._sum_tp(4), False)
            for kind, recomputed in layers:
                self._run(self._block(kind), full and recomputed)
            if chunk == last:
                # with MTP's layers the head's inputs are gathered again, in a pipeline the first one, too: MindSpore does
                # so, nothing asks for it
                gathered_twice = full and x.recompute_layers is None and a.mtp > 0
                for depth in range(1 + a.mtp):
                    self._run(self._loss(), gathered_twice and (depth > 0 or x.pp > 1))
            if any(kind == "moe" for kind, _ in layers):  # one gradient for all routers of the pass
                ranks = self.mesh.group(self.rank, self.mesh.axes("dp", "cp", "tp"))
                self._put("backward", "AllReduce", ranks, 4, x.micro_batches)

    def _run(self, once: Sequence[_ForwardCall], recomputed: bool) -> None:
        for call in once:
            ranks = self.mesh.group(self.rank, call.axes)
            if call.members:
                first, span = ranks.index(self.rank), call.members * call.stride
                start = first // span * span + first % call.stride
                ranks = ranks[start : start + span : call.stride]
            times = self.x.micro_batches
            self._put("forward", call.kind, ranks, call.bytes, times)
            if recomputed and call.recomputed:
                self._put(call.by, call.kind, ranks, call.bytes, times)
            if call.backward:
                kind = REVERSE.get(call.kind, call.kind)
                self._put("backward", kind, ranks, call.bytes, times)

    def _gather_tp(self, size: int) -> list[_ForwardCall]:
        """Return the gather of rows that sequence parallelism divides."""
        return [_ForwardCall("AllGather", self.mesh.axes("tp"), size)] if self.mesh.sp else []

    def _sum_tp(self, element: int | None = None, recomputed: bool = False) -> list[_ForwardCall]:
        """Return the sum over tp of `[T, H]`."""
        kind = "ReduceScatter" if self.mesh.sp else "AllReduce"
        size = (element or WIDTH) * self.token * self.a.hidden
        return [_ForwardCall(kind, self.mesh.axes("tp"), size, recomputed=recomputed)]

    def _block(self, kind: str) -> list[_ForwardCall]:
        a, mesh = self.a, self.mesh
        calls: list[_ForwardCall] = []
        calls += self._gather_tp(WIDTH * self.token * (a.q_lora_rank or a.hidden))
        for width in (a.kv_lora_rank, a.qk_rope):
            size = WIDTH * self.whole * width
            # MindSpore gathers a latent over both at once where other rows stay divided over dp.
            if mesh.sp and mesh.cp > 1 and mesh.dp > 1 and width == a.kv_lora_rank:
                calls.append(_ForwardCall("AllGather", mesh.axes("cp", "tp"), size))
                continue
            size, sequences = WIDTH * self.token * width, math.gcd(self.x.micro_batch, mesh.tp)
            split = mesh.sp and width == a.qk_rope and mesh.dp == 1 < sequences < mesh.tp
            if split:  # the rotary key's slices have sequences and their rows: its rows are gathered first, then sequences
                tp, slices = mesh.axes("tp"), mesh.tp // sequences
                calls.append(_ForwardCall("AllGather", tp, size // sequences, members=slices))
                calls.append(_ForwardCall("AllGather", tp, size, members=sequences, stride=slices))
            else:
                calls += self._gather_tp(size)
            # The rotary key comes from a function on slices, whose gather MindSpore repeats among backward operators,
            # unmarked, in a network that micro-batches share.
            shared = self.x.micro_batches > 1
            by = "backward" if width == a.qk_rope and shared else "recompute"
            size = WIDTH * self.whole * width
            calls.append(_ForwardCall("AllGather", mesh.axes("cp"), size, by=by))
        calls += self._sum_tp(recomputed=True)
        rows = self._gather_tp(WIDTH * self.token * a.hidden)
        if kind == "dense":
            return calls + rows + self._sum_tp()
        if a.shared_width and not mesh.sp:
            calls += self._sum_tp()
        return calls + self._experts() + self._balance()

    def _experts(self) -> list[_ForwardCall]:
        a, mesh = self.a, self.mesh
        calls: list[_ForwardCall] = []
        tp, ep = mesh.axes("tp"), mesh.axes("ep")
        if mesh.expert_tp:
            calls += self._gather_tp(WIDTH * self.token * a.hidden)
            size = 4 * self.token * a.top_k
            calls += [_ForwardCall("AllGather", tp, size, backward) for backward in (False, True)]
        if self.x.ep > 1:
            calls.append(_ForwardCall("AlltoAll", ep, 4 * a.experts, backward=False))
            calls += [_ForwardCall("AlltoAllV", ep, WIDTH * self.pairs * a.hidden)] * 2
        if mesh.expert_tp:
            calls += self._sum_tp()
        elif not mesh.sp:
            size = WIDTH * self.token * a.hidden
            calls.append(_ForwardCall("AllGather", tp, size, recomputed=False))
        return calls

    def _balance(self) -> list[_ForwardCall]:
        mesh, size = self.mesh, 4 * self.x.micro_batch * self.a.experts
        within, stage = mesh.axes("cp", "tp"), mesh.axes("dp", "cp", "tp")
        counts = _ForwardCall("AllReduce", within, size, backward=False, recomputed=False)
        return [counts, _ForwardCall("AllReduce", stage, 4, backward=False, recomputed=False)]

    def _loss(self) -> list[_ForwardCall]:
        """Return the collectives of head and cross-entropy: maximum, sum, the label's logit; sum and number of tokens."""
        mesh, tp = self.mesh, self.mesh.axes("tp")
        tokens = mesh.axes("dp", "cp")
        part = 4 * self.token
        sums = [(tp, part, backward) for backward in (False, True, True)]
        sums += [(tokens, 4, backward) for backward in (True, False)]
        return self._gather_tp(WIDTH * self.token * self.a.hidden) + [
            _ForwardCall("AllReduce", axes, size, backward, recomputed=False)
            for axes, size, backward in sums
        ]

    def _batch(self, stage: int) -> None:
        """Add the gathers of the columns that a stage reads: tokens, labels, mask, positions."""
        a, x = self.a, self.x
        if x.micro_batches == 1 and x.pp == 1:
            return
        place = stage_of_chunk(x)
        first, last = place[0] == stage, place[-1] == stage
        counts = zip(x.chunk_layers(len(a.layers)), place, strict=True)
        layers = any(count for count, of_stage in counts if of_stage == stage)
        columns = [first, last or (first and a.mtp > 0), last, layers or (last and a.mtp > 0)]
        size = 4 * x.dp * x.micro_batch * x.micro_batches * a.seq
        ranks = self.mesh.group(self.rank, self.mesh.axes("dp"))
        self._put("forward", "AllGather", ranks, size, sum(columns))

    def _boundaries(self, stage: int) -> None:
        """Add sends and receives: the residual stream, balance losses after the first router, MTP's embeddings."""
        a, x = self.a, self.x
        place = stage_of_chunk(x)
        rows = self.token // (x.tp if self.mesh.sp else 1) * a.hidden
        end = 0
        borders: list[tuple[int, int, int]] = []
        for chunk, count in enumerate(x.chunk_layers(len(a.layers))[:-1]):
            end += count
            sizes = [x.residual_bytes * rows, *([4] if "moe" in a.layers[:end] else [])]
            borders += [(place[chunk], place[chunk + 1], size) for size in sizes]
        borders += [(place[0], place[-1], WIDTH * rows)] * a.mtp
        for source, target, size in borders:
            if source == target or stage not in (source, target):
                continue
            other = target if stage == source else source
            peer = self.rank + (other - stage) * self.mesh.stage_devices
            kinds = ("Send", "Receive") if stage == source else ("Receive", "Send")
            for phase, kind in zip(("forward", "backward"), kinds, strict=True):
                self._put(phase, kind, sorted((self.rank, peer)), size, x.micro_batches)

    def _weight(self, weight: Weight) -> None:
        """Add the sum of a gradient over the copies of its weight, and the gather of a weight that they share."""
        ranks, shape = self._copies(weight, self.rank), self._shape(weight)
        elements = math.prod(shape)
        if not self._shared(weight, len(ranks)):
            self._put("backward", "AllReduce", ranks, 4 * elements)
            return
        # norms, routers and the embedding are read in float32, matrices in the type of products; so is the head in one
        # graph, where two losses read it: a gather with one reader alone changes places with its cast
        names = ["router.weight", "embedding.weight"]
        names += ["head.weight"] * (self.a.mtp > 0 and self.x.micro_batches == 1)
        wide = len(shape) == 1 or weight.name.endswith(tuple(names))
        self._put("backward", "ReduceScatter", ranks, 4 * elements)
        self._put("forward", "AllGather", ranks, (4 if wide else 2) * elements)

    def _copies(self, weight: Weight, rank: int) -> list[int]:
        """Return the devices that hold a copy of a weight's shard."""
        cut = {axis for axes in self.shards.axes(weight.name) for axis in axes}
        return self.mesh.group(rank, [axis for axis in self.mesh.sizes if axis not in cut])

    def _shared(self, weight: Weight, copies: int) -> bool:
        """Tell whether a weight's copies share the optimizer's states."""
        shape = self._shape(weight)
        large = self.shards.threshold is not None and 4 * math.prod(shape) >= self.shards.threshold
        return large and shape[0] % copies == 0
