"""`telechat-moe align ckpt A B`: two checkpoints of ours, of any layouts, tensor by tensor."""

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

from telechat_moe.cli.output import VERDICT_CODES, show_left, show_table, write_json
from telechat_moe.cli.progress import tracked
from telechat_moe.cli.verb import Verb

NOTES = """\
A and B are checkpoints (step-00001000, whichever ranks wrote it) or folders that `ckpt reshard` wrote. All checksums
are compared first. Without bounds every bit must be equal; a tensor passes a bound if all its elements are within
--ulp ULPs of its type (0, 1, 2, 4, 16, 256, 65536), or its relative L2 distance is at most --rtol.
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="checkpoint, or folder of shards")
    parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument("--group", metavar="NAME", help="only this group: model, optimizer")
    parser.add_argument("--ulp", type=float, default=0.0, metavar="N", help="ULPs allowed (0)")
    parser.add_argument(
        "--rtol", type=float, default=0.0, metavar="X", help="relative L2 allowed (0)"
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def run(args: argparse.Namespace) -> int:
    """Compare, print; return the exit code."""
    from telechat_moe.tools.align.compare import checkpoints
    from telechat_moe.tools.align.judge.coverage import answer

    report: Any = checkpoints.compare_checkpoints(
        Path(args.a), Path(args.b), args.group, partial(tracked, what="comparing")
    )
    beyond: list[str] = report.beyond(args.ulp, args.rtol)
    lacking = f"{len(report.problems)} tensors were not compared" if report.problems else ""
    verdict, _ = answer(bool(beyond), problem=lacking)
    code = VERDICT_CODES[verdict]
    if write_json(args.json, _plain(report, verdict, beyond)):
        return code
    for side, stored in (("A", report.a), ("B", report.b)):
        print(f"{side} {stored.path}: step {stored.step}, {stored.layout}")
    names: list[str] = sorted(report.compared) if args.tensors else report.different[:20]
    if names:
        print()
        show_table(
            ["tensor", "type", "differ ", "max abs ", "rel L2 ", "ULPs"], _rows(report, names)
        )
    show_left(len(report.different) - len(names), "--tensors")
    for name, why in report.problems.items():
        print(f"not compared: {name}: {why}")
    equal = sum(c.bitwise for c in report.compared.values())
    print(
        f"\n{verdict}: {equal} of {len(report.compared)} tensors equal to the last bit, {len(beyond)} beyond the "
        f"bounds, {len(report.problems)} not compared"
    )
    return code


def _rows(report: Any, names: list[str]) -> list[list[str]]:
    rows: list[list[str]] = []
    for name in names:
        c = report.compared[name]
        counts: dict[str, int] = c.histogram or {}
        histogram = " ".join(f"{k}:{n:,}" for k, n in counts.items())
        differ = f"{c.different:,}/{c.elements:,}"
        numbers = [f"{c.max_abs:.3g}", f"{c.relative_l2:.3g}"]
        rows.append([name, c.dtype, differ, *numbers, histogram])
    return rows


def _plain(report: Any, verdict: str, beyond: list[str]) -> dict[str, Any]:
    def side(stored: Any) -> dict[str, Any]:
        return {"path": str(stored.path), "step": stored.step, "layout": stored.layout}

    tensors = {
        name: {
            "bitwise": c.bitwise,
            "dtype": c.dtype,
            "elements": c.elements,
            "different": c.different,
            "max_abs": _finite(c.max_abs),
            "relative_l2": _finite(c.relative_l2),
            "ulp_histogram": c.histogram,
            "first": None if c.first is None else [list(c.first[0]), *map(_finite, c.first[1:])],
        }
        for name, c in report.compared.items()
    }
    return {
        "verdict": verdict,
        "a": side(report.a),
        "b": side(report.b),
        "tensors": tensors,
        "beyond": beyond,
        "not_comparable": dict(report.problems),
    }


def _finite(x: Any) -> Any:
    """Return a number that JSON has; others as text."""
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


VERB = Verb(
    name="ckpt",
    help="compare two checkpoints of any layouts",
    description="Compare two checkpoints of any layouts, tensor by tensor.",
    notes=NOTES,
    examples="telechat-moe align ckpt run_tp2/checkpoints/step-00000100 run_dp2/checkpoints/step-00000100 --rtol "
    "1e-5",
    exits={
        0: "pass",
        1: "diverged",
        4: "inconclusive (a tensor is missing in one, or of another shape or type, and all others pass)",
    },
    json_keys="verdict (pass | diverged | inconclusive), a, b (path, step, layout), tensors (name: bitwise, "
    "dtype, elements, different, max_abs, relative_l2, ulp_histogram, first), beyond (names), "
    "not_comparable (name: why).",
    arguments=_arguments,
    run=run,
)
