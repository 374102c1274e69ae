"""Attention of the ranks of a step with samples in order and dealt, and the step's time in the planner's simulation.

    python -m benchmarks.data_balance [--json FILE]

Documents of three kinds fill sequences as Megatron cuts them. For each kind, window, number of data-parallel ranks and of
micro-batches, the visible token pairs of a rank are summed over a global batch: the most of any rank over the mean, divided
by the larger of 1 and the heaviest sample over that mean, for no dealing can divide a sample.

Step times: seconds of a micro-batch's passes on each pipeline stage are the planner's for the micro-batch's own share of
visible pairs, put in the order of the program. Ranks whose experts are spread over data parallelism run micro-batch by
micro-batch together, so the heaviest rank sets the time of each; others wait for each other at the end of the step.

--json keys: level, a list of {documents, window, ranks, micro_batches, batches, in_order, in_order_p99, dealt, dealt_p99,
ms}; steps, a list of {model, window, devices, layout, batches, imbalance, in_order_s, dealt_s, even_s, gain, bound};
documents, {name: {tokens_below_half}}.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import answer, new_parser
from benchmarks.plan_published.models import published
from telechat_moe.data import IndexedDataset, build
from telechat_moe.data.balance import deal
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.documents import pack
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import chunk_times, make_program, simulate_step
from telechat_moe.tools.plan.schedules.simulate import durations, longest_paths

K = 1024
LOG_NORMAL = {"WLB-LLM": (7.0, 1.8), "heavy tail": (7.0, 2.4)}
"""Mean and deviation of the logarithm of a document's tokens; longer ones are cut at the window."""
OWN = "Python's library"
LEVEL = [
    ("WLB-LLM", 128 * K, 4, 16), ("WLB-LLM", 128 * K, 16, 16), ("WLB-LLM", 64 * K, 8, 8),
    ("heavy tail", 128 * K, 4, 16), ("heavy tail", 32 * K, 16, 16), ("heavy tail", 8 * K, 64, 16),
    (OWN, 4 * K, 4, 8), (OWN, 4 * K, 16, 16), (OWN, 32 * K, 4, 8),
]  # fmt: skip
"""Documents, tokens of a sequence, data-parallel ranks, micro-batches."""
BATCHES = 60
STEPS = 40


@dataclass(frozen=True)
class StepCase:
    """A step to simulate; the experts of `together` are spread over data parallelism."""

    model: str
    device: str
    layout: Layout
    window: int
    together: bool = False

    def architecture(self) -> Architecture:
        """Return what the model computes at this window."""
        if self.together:
            recipe = load("telechat3_moe/pretrain_105b_a4b_4k.yaml", devices=256)
            return replace(Architecture.from_recipe(recipe), seq=self.window)
        found = published(self.model, seq=self.window)
        assert found is not None
        return found


TELECHAT, FEW = "TeleChat3-MoE 105B", {"tp": 8, "sequence_parallel": True}
INTERLEAVED = {"vpp": 4, "schedule": "interleaved", "micro_batches": 4}
CASES = [
    StepCase(TELECHAT, "ascend-910b", Layout(dp=8, pp=4, ep=8, micro_batches=16, **FEW), 32 * K, True),
    StepCase(TELECHAT, "ascend-910b", Layout(dp=4, cp=4, pp=4, ep=4, micro_batches=16, **FEW), 128 * K, True),
    StepCase(TELECHAT, "ascend-910b", Layout(dp=4, cp=8, pp=4, ep=4, micro_batches=16, **FEW), 256 * K, True),
    StepCase("Llama 3.1 405B", "h100", Layout(dp=4, cp=16, pp=16, micro_batches=16, **FEW), 128 * K),
    StepCase("Llama 2 7B", "h100", Layout(tp=4, sequence_parallel=True, cp=2, pp=4, **INTERLEAVED), 64 * K),
    StepCase("Llama 2 7B", "h100", Layout(cp=2, pp=4, **FEW, **INTERLEAVED), 128 * K),
]  # fmt: skip
"""The last three: the trace of WLB-LLM's section 3.1 and two rows of its table 1."""


class Documents:
    """Lengths of documents of a kind, and the visible pairs of the sequences that they fill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own: np.ndarray | None = None

    def lengths(self, kind: str, window: int, tokens: int, seed: int) -> np.ndarray:
        """Return documents of at least so many tokens."""
        generator = np.random.default_rng(seed)
        if kind in LOG_NORMAL:
            drawn = []
            while sum(int(part.sum()) for part in drawn) < tokens:
                part = generator.lognormal(*LOG_NORMAL[kind], 100_000)
                drawn.append(part.clip(1, window).astype(np.int64))
            return np.concatenate(drawn)
        if self.own is None:
            build(self.folder / "data", seed=1)
            self.own = np.asarray(IndexedDataset(self.folder / "data/train").sequence_lengths)
        epochs = -(-tokens // int(self.own.sum()))
        return np.concatenate([generator.permutation(self.own) for _ in range(epochs)])

    def batches(self, kind: str, window: int, samples: int, count: int) -> Iterator[np.ndarray]:
        """Yield the visible pairs of each sample of global batches."""
        for seed in range(count):
            lengths = self.lengths(kind, window, (samples + 1) * window, seed)
            yield pack(lengths, window).pairs[:samples]


def level(documents: Documents, kind: str, window: int, ranks: int, micro: int) -> dict[str, Any]:
    """Return how level the ranks' attention is, in order and dealt."""
    found, seconds = [], []
    for pairs in documents.batches(kind, window, ranks * micro, BATCHES):
        began = time.perf_counter()
        dealt = deal(pairs, ranks, micro)
        seconds.append(time.perf_counter() - began)
        assert sorted(dealt.ravel().tolist()) == list(range(len(pairs)))
        most = max(pairs.sum() / ranks, pairs.max())
        in_order = pairs.reshape(micro, ranks).sum(0)
        found.append((in_order.max() / most, pairs[dealt].sum((0, 2)).max() / most))
    (plain, even), (plain_99, even_99) = np.mean(found, 0), np.quantile(found, 0.99, axis=0)
    return {
        "documents": kind, "window": window, "ranks": ranks, "micro_batches": micro, "batches": BATCHES,
        "in_order": plain, "in_order_p99": plain_99, "dealt": even, "dealt_p99": even_99,
        "ms": 1e3 * float(np.median(seconds)),
    }  # fmt: skip


class Simulated:
    """The steps of a case, whose micro-batches see different shares of the pairs."""

    def __init__(self, case: StepCase) -> None:
        architecture, layout, device = case.architecture(), case.layout, load_device(case.device)
        self.together, self.program = case.together, make_program(layout)

        def at(share: float) -> tuple[list[np.ndarray], float]:
            times, _ = chunk_times(replace(architecture, pair_share=share), layout, device)
            return list(durations(self.program, times)), times.comm

        (low, self.comm), (high, _), (middle, _) = at(0.1), at(0.4), at(0.25)
        for a, b, c in zip(low, high, middle, strict=True):
            np.testing.assert_allclose(
                (a + b) / 2, c, rtol=1e-6
            )  # attention is linear in its pairs
        self.slope = [(b - a) / 0.3 for a, b in zip(low, high, strict=True)]
        self.rest = [a - 0.1 * s for a, s in zip(low, self.slope, strict=True)]
        self.micro = [np.array([op.parts()[0][2] for op in ops]) for ops in self.program.ops]
        self.after_s = simulate_step(architecture, layout, device).after_s

    def pipeline(self, share_M: np.ndarray) -> float:
        """Return the seconds of one pipeline whose micro-batches see these shares of all pairs."""
        lasting = [
            (rest + slope * share_M[micro]).tolist()
            for rest, slope, micro in zip(self.rest, self.slope, self.micro, strict=True)
        ]
        _, end = longest_paths(self.program, lasting, self.comm)
        return max(times[-1] for times in end)

    def step(self, share_MR: np.ndarray) -> float:
        """Return the seconds of a step."""
        ranks = share_MR.max(1, keepdims=True) if self.together else share_MR
        return max(self.pipeline(ranks[:, r]) for r in range(ranks.shape[1])) + self.after_s

    def imbalance(self, share_MR: np.ndarray) -> float:
        """Return the forward seconds of the slowest micro-batch over the mean, on the first stage (WLB-LLM, table 2)."""
        forward = self.rest[0][0] + self.slope[0][0] * share_MR
        return float(forward.max() / forward.mean())


def step(documents: Documents, case: StepCase) -> dict[str, Any]:
    """Return the time of a case's step: samples in order, dealt, and if all samples were alike."""
    simulated, layout = Simulated(case), case.layout
    ranks, micro, found = layout.dp, layout.micro_batches, []
    for pairs in documents.batches("WLB-LLM", case.window, ranks * micro, STEPS):
        share = pairs / case.window**2
        in_order, dealt = share.reshape(micro, ranks), share[deal(pairs, ranks, micro)][..., 0]
        even = np.full((micro, ranks), share.mean())
        times = [simulated.step(x) for x in (in_order, dealt, even)]
        found.append((*times, simulated.imbalance(in_order)))
    in_order_s, dealt_s, even_s, imbalance = np.mean(found, 0).tolist()
    degrees = ("dp", "tp", "cp", "pp", "ep", "micro_batches")
    return {
        "model": case.model, "window": case.window, "devices": case.device,
        "layout": {name: getattr(layout, name) for name in degrees}, "batches": STEPS, "imbalance": imbalance,
        "in_order_s": in_order_s, "dealt_s": dealt_s, "even_s": even_s,
        "gain": in_order_s / dealt_s, "bound": in_order_s / even_s,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    print(
        "| documents | window | ranks x micro-batches | in order, mean (99 %) | dealt, mean (99 %) | ms |"
    )
    print("|---|---|---|---|---|---|")
    for r in result["level"]:
        print(
            f"| {r['documents']} | {r['window'] // K}K | {r['ranks']} x {r['micro_batches']} "
            f"| {r['in_order']:.3f} ({r['in_order_p99']:.3f}) | {r['dealt']:.3f} ({r['dealt_p99']:.3f}) | {r['ms']:.1f} |"
        )
    print("\n| model | window | layout | in order, s | dealt, s | gain | all samples alike |")
    print("|---|---|---|---|---|---|---|")
    for s in result["steps"]:
        layout = ", ".join(f"{k} {v}" for k, v in s["layout"].items() if v > 1)
        print(
            f"| {s['model']} | {s['window'] // K}K | {layout.replace('micro_batches', 'micro')} | {s['in_order_s']:.2f} "
            f"| {s['dealt_s']:.2f} | {s['gain']:.2f} | {s['bound']:.2f} |"
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return 1 where a figure of the first table is above its bar."""
    with tempfile.TemporaryDirectory() as name:
        documents = Documents(Path(name))
        result = {
            "level": [level(documents, *one) for one in LEVEL],
            "steps": [step(documents, case) for case in CASES],
            "documents": {
                kind: {"tokens_below_half": float(x[x < 64 * K].sum() / x.sum())}
                for kind in LOG_NORMAL
                for x in [documents.lengths(kind, 128 * K, 10**9, 0)]
            },
        }
    show(result)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    above = [r for r in result["level"] if r["dealt"] > 1.02 or r["dealt_p99"] > 1.05]
    return 1 if above else 0


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = new_parser("data_balance", __doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")
    return answer(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
