"""Compile a rank of MindFormers' own TeleChat3-MoE class and of our model from one recipe, and compare them.

    python -m benchmarks.upstream RECIPE [--rank R] [--one-device] [--set KEY=VALUE]

Nothing is run. --one-device takes two layers and the MTP layer, 16 experts and 1024 words; overrides come after these.
Needs the extra `mindformers`. The exit code is 1 if the parameters are not the same.

--json keys: recipe, rank, parameters, elements, problems, operators.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.command import answer, new_parser
from benchmarks.upstream import compare
from telechat_moe.cli.arguments import add_json, add_overrides
from telechat_moe.cli.output import show_table, write_json


def run(args: argparse.Namespace) -> int:
    """Compile, compare; return the exit code."""
    overrides = [*(compare.ONE_DEVICE if args.one_device else ()), *args.overrides]
    theirs, ours, recipe = compare.compile_both(args.recipe, args.rank, overrides)
    stage = args.rank * recipe.parallel_config.pipeline_stage // recipe.devices
    rows = compare.compare_parameters(theirs, ours, recipe, stage)
    parameters = compare.parameter_table(rows)
    operators = compare.operator_table(theirs, ours)
    upstream_elements, our_elements = compare.elements(rows)
    problems = [row.problem for row in rows if row.problem]
    report = {
        "recipe": args.recipe,
        "rank": args.rank,
        "parameters": parameters,
        "elements": {"mindformers": upstream_elements, "telechat-moe": our_elements},
        "problems": problems,
        "operators": operators,
    }
    if not write_json(args.json, report):
        show_table(["MindFormers", "shape", "ours", "layout"], [list(row) for row in parameters])
        show_table(["forward pass", "MindFormers", "ours"], [list(row) for row in operators])
        print(
            f"{len(rows)} parameters of {upstream_elements} values; ours: {our_elements} values; "
            f"{len(problems)} not as expected"
        )
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit code."""
    parser = new_parser("upstream", __doc__)
    parser.add_argument("recipe", metavar="RECIPE", help="shipped recipe name or YAML file")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="global rank (default 0)")
    parser.add_argument("--one-device", action="store_true", help="operators without the layout's")
    add_overrides(parser)
    add_json(parser)
    return answer(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
