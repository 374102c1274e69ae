"""What waits and fetches of the host cost on a CPU: one by one, and as our trainer and MindFormers' callbacks make them after a step.

And what the host takes to make ids and masks of a sample, and for what `telechat_moe.operators.host` leaves to it.

    python -m benchmarks.host_syncs [--rounds 300] [--json FILE]

All are measured in turn, round by round, after a graph has computed what a training step returns (losses, gradient norm, flags,
loads of 64 experts in 45 layers), so that nothing is left to wait for but what is queued here.

--json keys: machine, command, rounds, layers, min_us, median_us, {wait, fetch, ...: microseconds}.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.command import answer
from benchmarks.machine import processor
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json

EXPERTS, LAYERS, TOKENS, TOP_K = 64, 45, 4096, 8
SAYS = {
    "wait": "`if load.sum() > 0` on one layer's loads: queue, wait, fetch",
    "fetch": "`asnumpy()` of a tensor that is ready",
    "own_step": "our trainer after a step: RunningStep.fetch",
    "loss_monitor": "MindFormers' MFLossMonitor after a step: _get_loss_output",
    "bias_layers": f"MindFormers' expert bias: a `wait` for each of {LAYERS} layers, as in update_topk_bias",
    "ids": f"labels, loss mask and positions by document of a sample of {TOKENS} tokens, by the loader",
    "ids_and_mask": f"the same, and its attention mask by document, {TOKENS} x {TOKENS} bytes",
    "top_k": f"`operators.host: [top_k]`: the {TOP_K} highest of {EXPERTS} scores of {TOKENS} tokens",
    "sort": f"`operators.host: [sort]`: the places of {TOKENS} x {TOP_K} pairs, by {EXPERTS} experts",
    "histogram": f"`operators.host: [histogram]`: {TOKENS} x {EXPERTS} choices added up by expert",
}


def parts(theirs: Callable[[Any], Any]) -> Callable[[], dict[str, Callable[[], object]]]:
    """Return what computes a step's results anew and returns the measured calls on them."""
    import mindspore as ms
    from mindspore import Tensor, nn, ops

    from telechat_moe.data.sample import SampleOptions, collate
    from telechat_moe.ops.permute import BlockPlan
    from telechat_moe.ops.routing import Routing, RoutingRule
    from telechat_moe.ops.select import using
    from telechat_moe.train.step import RunningStep

    ids = SampleOptions(eod=0, eod_mask_loss=True, reset_position_ids=True)
    masks = replace(ids, create_attention_mask=True, reset_attention_mask=True)
    rng = np.random.default_rng(0)
    window = rng.integers(0, 500, (1, TOKENS + 1), np.int32)
    score_TE = rng.random((TOKENS, EXPERTS), np.float32)
    index_TK = np.argsort(-score_TE, 1)[:, :TOP_K].astype(np.int32)
    chosen_TE = np.zeros_like(score_TE)
    np.put_along_axis(chosen_TE, index_TK.astype(np.int64), 1, 1)
    scores, pairs, chosen = Tensor(score_TE), Tensor(index_TK.ravel()), Tensor(chosen_TE)

    class Step(nn.Cell):
        def construct(self, x: Tensor, loads: Tensor) -> tuple[Tensor, ...]:
            mean = x.mean()
            return x[:3] + mean, mean + 1.0, mean > 0.0, loads + 1.0, x[:1] * 2.0

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    with using("plain", {}, "CPU", ("top_k", "sort", "histogram")):
        routing, plan = Routing(RoutingRule(EXPERTS, TOP_K)), BlockPlan(EXPERTS)
    step = Step()
    given = Tensor(np.ones(8, np.float32)), Tensor(np.ones((LAYERS, EXPERTS), np.float32))
    rate, scale = Tensor(1e-4, ms.float32), Tensor(1.0, ms.float32)

    def begin() -> dict[str, Callable[[], object]]:
        losses, norm, applied, load_LE, dropped = step(*given)
        for ready in (losses, norm, applied, load_LE, dropped):
            ready.asnumpy()
        ops.add(load_LE, 1.0).asnumpy()  # operators outside of graphs are built once
        layers = [ops.add(load_LE[i], 0.0) for i in range(LAYERS)]
        for layer in layers:
            layer.asnumpy()
        return {
            "wait": lambda: bool(layers[0].sum() > 0),
            "fetch": norm.asnumpy,
            "own_step": RunningStep(losses, norm, None, applied, load_LE, dropped).fetch,
            "loss_monitor": lambda: theirs((losses, applied, scale, rate, norm)),
            "bias_layers": lambda: [bool(layer.sum() > 0) for layer in layers],
            "ids": lambda: collate(window, TOKENS, ids),
            "ids_and_mask": lambda: collate(window, TOKENS, masks),
            "top_k": lambda: routing.top(scores, TOP_K)[1].asnumpy(),
            "sort": lambda: plan.rank(pairs, EXPERTS)[0].asnumpy(),
            "histogram": lambda: routing.count(chosen, 0).asnumpy(),
        }

    return begin


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0."""
    from mindformers.core.callback.callback import _get_loss_output

    begin = parts(_get_loss_output)
    seconds: dict[str, list[float]] = {name: [] for name in SAYS}
    for number in range(args.rounds + 20):
        for name, call in begin().items():
            began = time.perf_counter()
            call()
            if number >= 20:
                seconds[name].append(time.perf_counter() - began)
    found = {name: np.array(times) * 1e6 for name, times in seconds.items()}
    result: dict[str, Any] = {
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "command": "python -m benchmarks.host_syncs",
        "rounds": args.rounds,
        "layers": LAYERS,
        "min_us": {name: round(float(each.min()), 1) for name, each in found.items()},
        "median_us": {name: round(float(np.median(each)), 1) for name, each in found.items()},
    }
    if not write_json(args.json, result):
        rows = [
            (says, f"{result['min_us'][name]:.1f}", f"{result['median_us'][name]:.1f}")
            for name, says in SAYS.items()
        ]
        show_table(["what", "min us ", "median us "], rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_syncs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="repetitions")
    add_json(parser)
    return answer(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
