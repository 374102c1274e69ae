"""`telechat-moe align replay`: is each operator of a dump what its definition gives?"""

import argparse
from collections import Counter
from pathlib import Path

from telechat_moe.cli.output import (
    VERDICT_CODES,
    show_counts,
    show_coverage,
    show_left,
    show_table,
    write_json,
)
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
    from telechat_moe.tools.align.judge.coverage import Coverage, answer
    from telechat_moe.tools.align.judge.verdict import Verdict

    dump = summary.read(Path(args.dump))
    found: list[tuple[int, int, Verdict]] = []
    coverage = Coverage()
    for step in dump.steps:
        ranks = dump.at(step)
        judged = [(r.rank, r.calls[v[0].key], v) for r in ranks for v in replay.replay(r)]
        exchanged = collectives.judged_collectives(ranks)
        for rank, call, each in [*judged, *((x.rank, x.call, [x.verdict]) for x in exchanged)]:
            found += [(step, rank, verdict) for verdict in each]
            coverage.add(call, each)
    counts = Counter(v.status for _, _, v in found)
    unknown = Counter(v.reason for _, _, v in found if v.status == "not judged")
    wrong = [
        {
            "step": step,
            "rank": rank,
            "call": v.key,
            "tensor": v.place,
            "observed_over_bound": v.ratio if v.ratio < float("inf") else None,
            "reason": v.reason,
        }
        for step, rank, v in found
        if v.status == "diverged"
    ]
    passed = [(v.ratio, f"{v.key} {v.place}") for _, _, v in found if v.status == "pass"]
    verdict, reason = answer(bool(wrong), coverage)
    code = VERDICT_CODES[verdict]
    closest = sorted(passed, reverse=True)[:5]
    report = {
        "verdict": verdict,
        "reason": reason,
        "tensors": dict(counts),
        "not_judged": dict(unknown),
        **coverage.as_json(),
        "wrong": wrong,
        "closest": [{"tensor": name, "observed_over_bound": ratio} for ratio, name in closest],
    }
    if write_json(args.json, report):
        return code
    if wrong:
        rows = [[w[k] for k in ("step", "rank", "call", "tensor", "reason")] for w in wrong]
        show_table(["step ", "rank ", "call", "tensor", "what"], rows[:20])
        show_left(len(rows) - 20)
        print()
    show_counts(dict(sorted(counts.items())), dict(unknown.most_common(20)))
    show_coverage(report)
    print(f"\n{verdict}: {reason or f'{len(wrong)} of {len(found)} tensors are wrong'}")
    return code


VERB = Verb(
    name="replay",
    help="recompute every operator of a dump from its own inputs",
    description="Recompute every operator of a dump from its own inputs, and judge it by a derived bound.",
    notes=NOTES,
    examples="telechat-moe align replay dump",
    exits={0: "pass", 1: "diverged", 4: "inconclusive: too little could be judged"},
    json_keys="verdict, reason, tensors (by answer), not_judged (reasons, with their number), coverage and to_dump "
    "(as of bisect), wrong (step, rank, call, "
    "tensor, observed_over_bound, reason), closest (the largest observed_over_bound that pass)",
    arguments=_arguments,
    run=run,
)
