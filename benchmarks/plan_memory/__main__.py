"""Compare the memory of random layouts with their compiled graphs: `python -m benchmarks.plan_memory`."""

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.command import answer
from benchmarks.plan_memory.small import RECIPE, SETTINGS
from telechat_moe.cli import main as telechat_moe
from telechat_moe.errors import TelechatMoeError
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.search.emit import write_recipe

LAYERS = 6


def drawn(seed: int) -> Iterator[Layout]:
    """Yield random layouts of the small model; the recipe's rules refuse some."""
    dice = random.Random(seed)
    while True:
        pp, tp, cp, dp = (dice.choice(some) for some in ((1, 2, 2, 4), (1, 2), (1, 1, 2), (1, 2)))
        vpp = dice.choice((1, 1, 2)) if pp > 1 else 1
        if not 1 < dp * tp * cp * pp <= 8 or pp * vpp > LAYERS:
            continue
        chunks = [1] * (pp * vpp)
        for _ in range(LAYERS - pp * vpp):
            chunks[dice.randrange(pp * vpp)] += 1
        recompute = dice.choice(("none", "none", "full", "full", "norm+activation"))
        counts = tuple(dice.randint(0, n) for n in chunks) if recompute == "full" else None
        try:
            yield Layout(
                dp=dp,
                tp=tp,
                cp=cp,
                pp=pp,
                vpp=vpp,
                ep=dice.choice([e for e in (1, 2, 4) if dp * cp * tp % e == 0]),
                sequence_parallel=tp > 1 and dice.random() < 0.6,
                zero=dice.choice((0, 1)) if dp * cp > 1 else 0,
                micro_batch=1 if cp > 1 else dice.choice((1, 2, 4)),
                micro_batches=dice.choice((pp, 2 * pp)) if pp > 1 else 1,
                recompute=recompute,
                recompute_layers=counts,
                chunks=tuple(chunks),
                schedule="interleaved" if vpp > 1 else "1f1b",
                own_graph=True,
            )
        except TelechatMoeError:
            continue


def recipes(seed: int) -> Iterator[tuple[str, Layout]]:
    """Yield the texts of recipes that are legal, with their layouts."""
    for layout in drawn(seed):
        try:
            yield write_recipe(RECIPE, SETTINGS, layout, "A random layout."), layout
        except TelechatMoeError:
            continue


def judged(report: dict[str, Any]) -> tuple[float, list[str]]:
    """Return the largest error of a stage's peak by size, with its sign, and what else differs."""
    errors: list[float] = []
    others: list[str] = []
    for stage, one in zip(report["stages"], report["confirm"], strict=True):
        mine, theirs = one["activations"]
        kept = sum(stage["memory"][name] for name in ("parameters", "gradients", "optimizer"))
        errors.append((mine - theirs) / (kept + theirs))
        others += [f"stage {stage['stage']}: {d}" for d in one["differences"]]
    return max(errors, key=abs), others


def _run(args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "recipe.yaml", Path(folder) / "report.json"
        for text, layout in recipes(args.seed):
            if len(rows) == args.layouts:
                break
            file.write_text(text, encoding="utf-8")
            load(str(file), use="dryrun")
            words = ["dryrun", str(file), "--stage", "all", "--confirm", "--json", str(out)]
            with contextlib.redirect_stdout(io.StringIO()):
                telechat_moe(words)
            error, others = judged(json.loads(out.read_text(encoding="utf-8")))
            said = f"{layout.short()} layers {layout.chunks} recomputed {layout.recompute_layers}"
            rows.append({"layout": said, "peak_error": error, "differences": others})
            print(f"{error * 100:+6.2f} %  {said}", *others, sep="\n    ", flush=True)
    errors = [abs(row["peak_error"]) for row in rows]
    over = sum(e > args.bar for e in errors)
    print(
        f"{len(rows)} layouts: largest error {max(errors) * 100:.2f} %, {over} over {args.bar * 100:g} %"
    )
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if over else 0


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_memory", description=__doc__)
    parser.add_argument("--layouts", type=int, default=40, help="how many (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--bar", type=float, default=0.03, help="largest error (default 0.03)")
    parser.add_argument("--json", help="file to write")
    return answer(parser, _run, argv)


if __name__ == "__main__":
    sys.exit(main())
