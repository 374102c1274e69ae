"""What a call of a small graph costs, and each operator in it: `python -m benchmarks.ops.calls`.

A graph of 1 and one of 33 additions of 4 x 64 numbers, ours and MindSpore's own, called as users do (a cell) and with what a cell
calls at last. A node's cost is the difference of both graphs by 32.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.graph.api import _cell_graph_executor

from benchmarks.command import answer
from benchmarks.machine import machine
from benchmarks.ops.timing import Call, microseconds
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.ops import dvm

LENGTHS = (1, 33)
SECONDS = 0.7


class Chain(nn.Cell):
    """Additions, each of the last one's result."""

    def __init__(self, length: int, ours: bool) -> None:
        super().__init__()
        program = dvm.build(lambda k, x, y: k.store(x + y), ("T", 64), ("T", 64))
        self.adds = [dvm.custom_op(program) if ours else ops.Add() for _ in range(length)]

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x with y added as often as the chain is long."""
        for add in self.adds:
            x = add(x, y)
        return x


def compiled(cell: nn.Cell, *inputs: Tensor) -> Call:
    """Return the call of a cell's compiled graph, without what the cell does in Python before."""
    seen: list[tuple[str, tuple[Any, ...]]] = []
    run = _cell_graph_executor._exec_pip

    def spy(obj: Any, *arguments: Any, phase: str = "") -> Any:
        seen.append((phase, arguments))
        return run(obj, *arguments, phase=phase)

    _cell_graph_executor._exec_pip = spy
    try:
        cell(*inputs)
    finally:
        _cell_graph_executor._exec_pip = run
    phase, arguments = seen[-1]
    return lambda: _cell_graph_executor._graph_executor(arguments, phase)


def report() -> list[dict[str, Any]]:
    """Return microseconds for each kind of shape and of operator."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    x, y = (Tensor(np.full((4, 64), value, np.float32)) for value in (1.0, 0.5))
    calls: dict[Any, Call] = {}
    for shapes in ("static", "dynamic"):
        for ours in (False, True):
            for length in LENGTHS:
                cell = Chain(length, ours)
                if shapes == "dynamic":
                    cell.set_inputs(*[Tensor(shape=[None, 64], dtype=ms.float32)] * 2)
                np.testing.assert_array_equal(cell(x, y).asnumpy(), 1.0 + 0.5 * length)
                calls[shapes, ours, length, "cell"] = lambda cell=cell: cell(x, y)
                calls[shapes, ours, length, "graph"] = compiled(cell, x, y)
    times = {
        name: {"min": min(t), "median": statistics.median(t)}
        for name, t in microseconds(calls, SECONDS * len(calls)).items()
    }
    rows: list[dict[str, Any]] = []
    for shapes in ("static", "dynamic"):
        for ours in (False, True):
            short, long = (
                {c: times[shapes, ours, n, c] for c in ("cell", "graph")} for n in LENGTHS
            )
            node = {
                k: (long["graph"][k] - short["graph"][k]) / (LENGTHS[1] - 1)
                for k in ("min", "median")
            }
            rows.append({"shapes": shapes, "ours": ours, **short, "node": node})
    return rows


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops.calls", description=__doc__)
    add_json(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    found = {"machine": machine(), "microseconds": report()}
    if write_json(args.json, found):
        return 0
    columns = ("cell", "graph", "node")
    rows = [
        [f"{'ours' if r['ours'] else 'MindSpore'}, {r['shapes']}"]
        + [f"{r[c]['min']:.1f} ({r[c]['median']:.1f})" for c in columns]
        for r in found["microseconds"]
    ]
    show_table(("microseconds, minimum (median)", "cell ", "its graph ", "a further node "), rows)
    print(found["machine"])
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
