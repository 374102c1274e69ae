"""`telechat-moe align merge DUMP OUT`: a dump of many ranks as one of logical tensors."""

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import VERDICT_CODES, show_left, show_table, write_json
from telechat_moe.cli.progress import tracked
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.interruption import unfinished

NOTES = """\
OUT is a dump of one rank in msprobe's format: each tensor whole, values that waited for a reduction reduced. A tensor's layout is that of the dump,
else that of --said, a JSON file (docs/align_layouts.md). Without one, ranks whose values are equal to the last bit hold copies. What contradicts
itself is not merged, but named. With --reference the layout is used that fits the shapes and whose copies agree; if several do, none.
"""


def run(args: argparse.Namespace) -> int:
    """Merge, print; return the exit code."""
    import tempfile

    from telechat_moe.tools.align.dump import logical, msprobe, records
    from telechat_moe.tools.align.dump import merge as merger
    from telechat_moe.tools.align.dump import msprobe_write as writer

    dump: Any = msprobe.read(args.dump)
    steps: list[int] = dump.steps if args.step is None else [args.step]
    if missing := [s for s in steps if s not in dump.steps]:
        raise UsageError(f"--step {missing[0]}: {args.dump} has steps {dump.steps}")
    out = Path(args.out)
    if out.exists():
        raise UsageError(f"{out} exists; name a folder to make")
    description: Any = (
        merger.LayoutDescription.read(Path(args.said)) if args.said else merger.LayoutDescription()
    )
    model: Any = msprobe.read(args.reference) if args.reference else None
    bound = logical.CopyBound(args.rtol, args.atol, args.ulp)
    bound = bound if any(bound) else None
    out.parent.mkdir(parents=True, exist_ok=True)
    merged: list[Any] = []
    outcomes: list[tuple[int, Any]] = []
    parts = tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent)
    with parts as folder, unfinished(folder), unfinished(out):
        for step in tracked(steps, "merging"):
            write = merger.into(Path(folder, str(step)))
            if model is not None:
                description = replace(description, reference=_one_rank(model, step))
            ranks, merged_tensors = merger.merge_ranks(
                dump.at(step), description, write, bound, args.keep
            )
            merged.append(ranks)
            outcomes += [(step, outcome) for outcome in merged_tensors]
        writer.write(records.Dump(Path(folder), {(r.step, 0): r for r in merged}), out)
    return _report(args, steps, outcomes)


def _one_rank(dump: Any, step: int) -> Any:
    ranks: list[Any] = dump.at(step)
    if len(ranks) != 1:
        raise BadInputError(f"{dump.root}: {len(ranks)} ranks in step {step}; a reference has one")
    return ranks[0]


def _report(args: argparse.Namespace, steps: list[int], outcomes: list[tuple[int, Any]]) -> int:
    from telechat_moe.tools.align.judge.coverage import answer

    problems = [(step, o) for step, o in outcomes if o.problem is not None]
    laid_out = [o for _, o in problems if o.how in ("dump", "said", "inferred")]
    text = f"{len(problems)} tensors not merged" if problems else ""
    verdict, _ = answer(any(o.copies == "differ" for o in laid_out), problem=text)
    code = VERDICT_CODES[verdict]
    report: dict[str, Any] = {
        "verdict": verdict,
        "out": args.out,
        "steps": steps,
        "tensors": len(outcomes),
        "merged": sum(o.merged for _, o in outcomes),
        "copies": dict(Counter(o.copies for _, o in outcomes if o.copies != "none")),
        "how": dict(Counter(o.how for _, o in outcomes)),
        "problems": [{"step": step, **o._asdict()} for step, o in problems],
    }
    if write_json(args.json, report):
        return code
    if problems:
        rows = [[s, o.key, o.place, o.how or "-", o.problem[:160]] for s, o in problems[:20]]
        show_table(["step ", "call", "tensor", "layout", "what is wrong"], rows)
        show_left(len(problems) - 20, "--json FILE")
        print()
    how = ", ".join(f"{n} {name}" for name, n in report["how"].items())
    text = f"{report['merged']} of {len(outcomes)} tensors merged into {args.out}"
    print(f"{verdict}: {text} (layout from: {how})")
    return code


VERB = Verb(
    name="merge",
    help="make whole tensors from the shards of all ranks",
    description="Make whole tensors from the shards of all ranks, whatever the layout.",
    notes=NOTES,
    examples="telechat-moe align merge dump merged\n"
    "telechat-moe align merge megatron_dump merged --said layout.json --ulp 1",
    exits={
        0: "all merged",
        1: "copies differ that the layout calls copies",
        4: "some tensors were not merged",
    },
    json_keys="verdict (pass | diverged | inconclusive), out, steps, tensors, merged, copies (bitwise | within "
    "bound | differ: tensors), how (dump | said | inferred | copies | one rank: tensors), problems (step,"
    " key, place, ranks, how, copies, problem).",
    arguments=[
        arg("DUMP", "dump of all ranks"),
        arg("OUT", "folder to make"),
        arg("--step N", "only this step", type=int),
        arg("--said FILE", "what the dump does not say of layouts"),
        arg("--reference DUMP", "of one device: infer layouts that are not said from its shapes"),
        *(
            arg(f"--{name} X", f"how far copies may differ, {measure} (0)", 0.0)
            for name, measure in (
                ("rtol", "relative"),
                ("atol", "absolute"),
                ("ulp", "ULPs of the type"),
            )
        ),
        arg("--keep", "write the first copy where copies differ"),
    ],
    run=run,
)
