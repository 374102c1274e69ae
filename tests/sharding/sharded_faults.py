"""What is done wrong on purpose, to see that the comparison notices."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from telechat_moe.graph import rewrite

# Faults in the layout, compiled in; the others are faults in the rewriting.
LAYOUT = (
    *("cut-softmax", "no-sum-of-balance", "no-sum-of-widths", "no-sum-of-vocabulary"),
    *("nodes-of-other-devices", "no-token-to-other-nodes"),
    *("mean-of-means", "loads-in-bf16", "loads-twice", "balance-by-shards"),
    *("balance-of-one-device", "balance-counted-again"),
    *("no-earlier-keys", "no-gradients-of-earlier-keys"),
)


@contextmanager
def in_layout(fault: str) -> Iterator[None]:
    """Build and place the model with a fault."""
    from telechat_moe.sharding import placement
    from telechat_moe.sharding.cells import collective as parallel
    from telechat_moe.sharding.cells import dispatch as parallel_dispatch
    from telechat_moe.sharding.cells import hierarchical
    from telechat_moe.sharding.layouts import TABLE, LayoutRule

    if fault == "cut-softmax":
        # Softmax computes along its last dimension; self_define_shard makes MindSpore believe this.
        cut = LayoutRule(("batch . seq tp",), ("batch . seq tp",), "own")
        rules = {**TABLE["PlainAttention"], "softmax": cut}
        with (
            mock.patch.dict(TABLE, {"PlainAttention": rules}),
            mock.patch.object(placement, "refuse_cut_axis", return_value=None),
        ):
            yield
    elif fault == "no-sum-of-balance":
        with _without_sum(1):
            yield
    elif fault == "no-sum-of-widths":
        with mock.patch.object(parallel_dispatch, "sum_over", return_value=None):
            yield
    elif fault == "no-sum-of-vocabulary":
        whole = parallel.TokenCrossEntropy.__init__

        def alone(self, group):
            whole(self, group._replace(size=1))

        with mock.patch.object(parallel.TokenCrossEntropy, "__init__", alone):
            yield
    elif fault == "nodes-of-other-devices":
        own = parallel_dispatch.OwnExperts.__init__

        def other(self, group, experts):
            own(self, group._replace(member=(group.member + 1) % group.size), experts)

        with mock.patch.object(parallel_dispatch.OwnExperts, "__init__", other):
            yield
    elif fault == "no-token-to-other-nodes":
        needs = hierarchical.NodesOfTokens.__init__

        def fewer(self, nodes, experts):
            needs(self, nodes, experts)
            self.on = self.off  # no node has an expert of any token

        with mock.patch.object(hierarchical.NodesOfTokens, "__init__", fewer):
            yield
    elif fault in CELLS:
        with CELLS[fault]():
            yield
    else:
        yield


@contextmanager
def in_counting(fault: str) -> Iterator[None]:
    """Count tokens with a fault."""
    from telechat_moe.train import token_weights as counting

    count = counting.token_weights

    def wrong(config, masks, *counts):
        if fault == "tokens-of-one-split":
            return count(config, [mask[:, : mask.shape[1] // 2] for mask in masks], *counts)
        weights = count(config, masks, *counts)
        if fault == "mtp-by-next-token":
            depth = max(1, config.num_nextn_predict_layers)
            weights[1:-1] = weights[0] * config.mtp_loss_factor / depth
        return weights

    with mock.patch.object(counting, "token_weights", wrong):
        yield


@contextmanager
def _loads(twice: bool):
    """Count the loads of all devices twice, as a recomputed forward pass would, or add them up in bfloat16."""
    import mindspore as ms
    from mindspore import nn, ops

    from telechat_moe.train.rank_step import RankStep

    class Sum(nn.Cell):
        def __init__(self):
            super().__init__()
            self.sum, self.low, self.high = ops.AllReduce(), ops.Cast(), ops.Cast()

        def construct(self, x):
            x = self.sum(x)
            return x + x if twice else self.high(self.low(x, ms.bfloat16), ms.float32)

    whole = RankStep.__init__

    def other(self, *args, **kwargs):
        whole(self, *args, **kwargs)
        self.sum_loads = Sum()

    with mock.patch.object(RankStep, "__init__", other):
        yield


@contextmanager
def _balance_by_shards():
    """Add the balance loss and the z-loss once for each device that is counted together."""
    from telechat_moe.sharding.cells.collective import RouterLosses

    whole = RouterLosses.body

    def body(self, logits_tE, score_tE, chosen_tE):
        return whole(self, logits_tE, score_tE, chosen_tE) * self.group.size

    with mock.patch.object(RouterLosses, "body", body):
        yield


@contextmanager
def _without_sum(number: int):
    """Leave out a sum over devices of the router's losses: 0 that of the counts, 1 that of the losses."""
    from telechat_moe.sharding.cells import collective

    whole, sum_over = collective.RouterLosses.__init__, collective.sum_over

    def alone(self, *args):
        groups = iter(range(2))

        def left_out(group):
            return None if next(groups) == number else sum_over(group)

        with mock.patch.object(collective, "sum_over", left_out):
            whole(self, *args)

    with mock.patch.object(collective.RouterLosses, "__init__", alone):
        yield


@contextmanager
def _balance_counted_again():
    """Let the backward pass count a step's load again, which then has the micro-batches in between."""
    from telechat_moe.sharding import recompute
    from telechat_moe.train import rank_graph

    marked = recompute.recompute

    def again(model, *args):
        marked(model, *args)
        for layer in model.layers:
            if getattr(layer, "is_moe", False):
                router = layer.moe.router
                for primitive in (router.add_load, *router.losses.kept()):
                    primitive.add_prim_attr("recompute", True)

    with mock.patch.object(rank_graph, "recompute", again):
        yield


@contextmanager
def _keep(gradients: bool):
    """Keep nothing of the parts of a sequence before, or only what MindSpore's pass does not find to keep gradients of."""
    from mindspore import ops

    from telechat_moe.sharding.cells import parts

    def nothing(self, x_BLW, part_1):
        return self.run(x_BLW, part_1)

    def unfound(self, x_BLW, part_1):
        so_far = self.add(self.key_cache, self.run(x_BLW, part_1))  # the parameter comes first
        zeros = self.nothing(so_far, self.zero)
        stay = self.stay(self.always(zeros, self.one), self.not_last(part_1, self.last))
        kept = ops.stop_gradient(self.select(stay, so_far, zeros))
        return self.depend(so_far, self.assign(self.key_cache, kept))

    with mock.patch.object(parts.KeptRows, "construct", unfound if gradients else nothing):
        yield


CELLS = {
    "balance-of-one-device": partial(_without_sum, 0),
    "balance-counted-again": _balance_counted_again,
    "no-earlier-keys": partial(_keep, gradients=False),
    "no-gradients-of-earlier-keys": partial(_keep, gradients=True),
    "loads-in-bf16": partial(_loads, twice=False),
    "loads-twice": partial(_loads, twice=True),
    "balance-by-shards": _balance_by_shards,
}


@contextmanager
def in_rewriting(fault: str) -> Iterator[None]:
    """Rewrite collectives for CPU with a fault."""
    if fault == "slice-of-another-rank":

        def wrong(site):
            site.me = (site.me + 1) % site.size
            scatter(site)

        scatter = rewrite.REWRITES["ReduceScatter"]
        with mock.patch.dict(rewrite.REWRITES, {"ReduceScatter": wrong}):
            yield
    elif fault == "parts-in-another-order":
        exchange = rewrite.REWRITES["AlltoAll"]

        def wrong(site):
            make = site.make

            def interleaved(kind, inputs, shape, name=None):
                if kind != "Transpose":
                    return make(kind, inputs, shape, name)
                concat = site.operation.attribute("concat_dim")
                rank = len(shape)
                order = [*range(1, concat + 2), 0, *range(concat + 2, rank)]
                stacked = [shape[concat], *shape[:concat], *shape[concat + 1 :]]
                moved = [stacked[i] for i in order]
                return make(kind, [inputs[0], site.editor.constant(order)], moved, name)

            site.make = interleaved
            exchange(site)

        with mock.patch.dict(rewrite.REWRITES, {"AlltoAll": wrong}):
            yield
    elif fault == "another-pair":
        peer = rewrite._Site.peer.fget
        # Two stages of two ranks: 0 talks to 3 and 1 to 2.
        with mock.patch.object(rewrite._Site, "peer", property(lambda site: peer(site) ^ 1)):
            yield
    else:
        yield
