"""`telechat-moe align replay`: is each operator of a dump what its definition gives?"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from telechat_moe.cli.output import VERDICT_CODES, show_table, write_json
from telechat_moe.cli.verb import Verb

NOTES = """\
Each call is recomputed in float64 from its own inputs; no second run is needed. What only a second run can tell
(wrong weights, other settings, a tensor changed on its way) is for `align bisect`.
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dump", metavar="DUMP", help="folder of a dump")


def run(args: argparse.Namespace) -> int:
    """Replay, print; return the exit code."""
    from telechat_moe.tools.align.dump import summary
    from telechat_moe.tools.align.judge import collectives, replay

    dump = summary.read(Path(args.dump))
    counts: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    passed: list[tuple[float, str]] = []
    for step in dump.steps:
        ranks = dump.at(step)
        judged = [(r.rank, v) for r in ranks for each in replay.replay(r) for v in each]
        given = [(x.rank, x.verdict) for x in collectives.judged_collectives(ranks)]
        for rank, v in [*judged, *given]:
            counts[v.status] += 1
            if v.status == "not judged":
                unknown[v.reason] += 1
            elif v.status == "pass":
                passed.append((v.ratio, f"{v.key} {v.place}"))
            else:
                wrong.append(
                    {
                        "step": step,
                        "rank": rank,
                        "call": v.key,
                        "tensor": v.place,
                        "observed_over_bound": v.ratio if v.ratio < float("inf") else None,
                        "reason": v.reason,
                    }
                )
    verdict = "diverged" if wrong else "pass" if passed else "not comparable"
    code = VERDICT_CODES[verdict]
    closest = [
        {"tensor": name, "observed_over_bound": r} for r, name in sorted(passed, reverse=True)[:5]
    ]
    report = {
        "verdict": verdict,
        "tensors": dict(counts),
        "not_judged": dict(unknown),
        "wrong": wrong,
        "closest": closest,
    }
    if write_json(args.json, report):
        return code
    if wrong:
        rows = [
            [str(w["step"]), str(w["rank"]), w["call"], w["tensor"], w["reason"]] for w in wrong
        ]
        show_table(["step ", "rank ", "call", "tensor", "what"], rows[:20])
        print(f"and {len(rows) - 20} more\n" if len(rows) > 20 else "")
    table = [[name, str(count)] for name, count in sorted(counts.items())]
    table += [[f"not judged: {why}", str(n)] for why, n in unknown.most_common(20)]
    show_table(["tensors", "number "], table)
    print(f"\n{verdict}: {len(wrong)} of {sum(counts.values())} tensors are wrong")
    return code


VERB = Verb(
    name="replay",
    help="recompute every operator of a dump from its own inputs",
    description="Recompute every operator of a dump from its own inputs, and judge it by a derived bound.",
    notes=NOTES,
    examples="telechat-moe align replay dump",
    exits={0: "pass", 1: "diverged", 4: "nothing could be judged"},
    json_keys="verdict, tensors (by answer), not_judged (reasons, with their number), wrong (step, rank, call, "
    "tensor, observed_over_bound, reason), closest (the largest observed_over_bound that pass)",
    arguments=_arguments,
    run=run,
)
