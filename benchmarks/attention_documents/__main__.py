"""Time of our flash attention for each visible pair, within documents against one causal document.

    python -m benchmarks.attention_documents [--tokens 32768] [--rounds 5] [--json FILE]

A query sees its document up to itself, so a sequence of documents of l tokens has the sum of l (l + 1) / 2 visible pairs. An
ideal kernel takes as long for a pair of a document as for a pair of one causal sequence:

    efficiency = (causal time / causal pairs) / (time / pairs)

Times are processor time of one thread, which other work on the machine disturbs less than wall time; all divisions take turns.

--json keys: tokens, heads, widths, rounds, cases, a list of {documents, pairs, forward_ms, forward_median_ms, backward_ms,
backward_median_ms, forward_efficiency, backward_efficiency, efficiency}.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import answer
from telechat_moe.ops import native
from telechat_moe.ops.native import Kernel

HEADS, WIDTH, VALUES = 1, 192, 128
"""One head of the 105B model."""
BAR = 0.8
"""Of sixteen documents."""


def divisions(tokens: int) -> dict[str, np.ndarray]:
    """Return lengths of documents that fill ``tokens``, by name; the first is one causal document."""
    rng = np.random.default_rng(20)
    found = {"1": np.array([tokens])}
    for count in (4, 16, 64, 256):
        found[f"{count} equal"] = np.full(count, tokens // count)
    for count in (16, 64, 256):
        cuts = np.sort(rng.choice(np.arange(1, tokens), count - 1, replace=False))
        found[f"{count} at random"] = np.diff(cuts, prepend=0, append=tokens)
    lengths = np.maximum(1, rng.lognormal(6.0, 1.4, tokens)).astype(np.int64)
    kept = lengths[: np.searchsorted(lengths.cumsum(), tokens)]
    found["log-normal"] = np.append(kept, tokens - kept.sum())
    return found


def first_keys(lengths: np.ndarray) -> np.ndarray:
    """Return the first key that each query sees, int32 ``[1, tokens]``."""
    return np.repeat(lengths.cumsum() - lengths, lengths).astype(np.int32)[None]


class Attention:
    """Forward and backward of one head over sequences of ``tokens``."""

    def __init__(self, tokens: int) -> None:
        rng = np.random.default_rng(0)
        wide, values = (1, tokens, HEADS, WIDTH), (1, tokens, HEADS, VALUES)
        self.q, self.k = (rng.standard_normal(wide, np.float32) for _ in range(2))
        self.v, self.do, self.o = (rng.standard_normal(values, np.float32) for _ in range(3))
        self.lse = np.empty((1, HEADS, tokens), np.float32)
        self.grads = [np.empty_like(x) for x in (self.q, self.k, self.v)]
        attributes = {"scale": WIDTH**-0.5, "bf16": False}
        self._forward = Kernel("FlashAttention", attributes)
        self._backward = Kernel("FlashAttentionGrad", attributes)

    def forward(self, start: np.ndarray) -> None:
        """Compute the output."""
        self._forward([self.q, self.k, self.v, start], [self.o, self.lse])

    def backward(self, start: np.ndarray) -> None:
        """Compute the gradients of what :meth:`forward` computed last."""
        given = [self.q, self.k, self.v, start, self.o, self.lse, self.do]
        self._backward(given, self.grads)


def _seconds(call: Callable[[], None]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def measure(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each division of a sequence, minimum and median over the rounds."""
    native.set_threads(1)
    attention, cases = Attention(tokens), divisions(tokens)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in cases}
    for _ in range(rounds):
        for name, lengths in cases.items():
            start = first_keys(lengths)
            times[name][0].append(_seconds(lambda: attention.forward(start)))  # noqa: B023
            times[name][1].append(_seconds(lambda: attention.backward(start)))  # noqa: B023
    pairs = {name: int((x * (x + 1) // 2).sum()) for name, x in cases.items()}
    best = {name: (min(ahead), min(back)) for name, (ahead, back) in times.items()}
    ideal = [seconds / pairs["1"] for seconds in best["1"]]
    rows = []
    for name in cases:
        ahead, back = best[name]
        middle = [1e3 * statistics.median(x) for x in times[name]]
        rows.append(
            {
                "documents": name,
                "pairs": pairs[name],
                "forward_ms": 1e3 * ahead,
                "forward_median_ms": middle[0],
                "backward_ms": 1e3 * back,
                "backward_median_ms": middle[1],
                "forward_efficiency": ideal[0] * pairs[name] / ahead,
                "backward_efficiency": ideal[1] * pairs[name] / back,
                "efficiency": sum(ideal) * pairs[name] / (ahead + back),
            }
        )
    return rows


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, and write JSON; 1: sixteen documents miss the bar."""
    rows = measure(args.tokens, args.rounds)
    print(
        f"{args.tokens} tokens, a head of {WIDTH} / {VALUES}, one thread, best (median) of {args.rounds}"
    )
    print(f"{'documents':14}{'pairs':>13}{'forward, ms':>20}{'backward, ms':>20}{'of ideal':>10}")
    for row in rows:
        cells = [
            f"{row[f'{name}_ms']:.1f} ({row[f'{name}_median_ms']:.1f})"
            for name in ("forward", "backward")
        ]
        print(
            f"{row['documents']:14}{row['pairs']:>13,}{cells[0]:>20}{cells[1]:>20}{row['efficiency']:>10.1%}"
        )
    if args.json:
        result = {
            "tokens": args.tokens,
            "heads": HEADS,
            "widths": [WIDTH, VALUES],
            "rounds": args.rounds,
            "cases": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(row["efficiency"] < BAR for row in rows if row["documents"].startswith("16")))


def main() -> int:
    """Answer the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the sequence")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all divisions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    return answer(parser, run)


if __name__ == "__main__":
    raise SystemExit(main())
