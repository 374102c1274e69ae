"""`telechat-moe upstream`: MindFormers' own TeleChat3-MoE class and our model, parameter by parameter."""

import argparse

from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.verb import Verb

NOTES = """\
Needs the extra `mindformers`. --one-device takes two layers and the MTP layer, 16 experts and 1024 words; overrides
come after these.
"""
EXAMPLES = """\
telechat-moe upstream telechat3_moe/pretrain_105b_a4b_4k.yaml --one-device
telechat-moe upstream telechat3_moe/pretrain_105b_a4b_4k.yaml --rank 255
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="global rank (default 0)")
    parser.add_argument(
        "--one-device",
        action="store_true",
        help="two layers and MTP on one device: operators without those of the layout",
    )


def run(args: argparse.Namespace) -> int:
    """Compile, compare; return the exit code."""
    from telechat_moe.interop import upstream

    overrides = [*(upstream.ONE_DEVICE if args.one_device else ()), *args.overrides]
    theirs, ours, recipe = upstream.compile_both(args.recipe, args.rank, overrides)
    stage = args.rank * recipe.parallel_config.pipeline_stage // recipe.devices
    rows = upstream.compare_parameters(theirs, ours, recipe, stage)
    parameters = upstream.parameter_table(rows)
    table = upstream.operator_table(theirs, ours)
    number, own = upstream.elements(rows)
    problems = [row.problem for row in rows if row.problem]
    result = {
        "recipe": args.recipe,
        "rank": args.rank,
        "parameters": parameters,
        "elements": {"mindformers": number, "telechat-moe": own},
        "problems": problems,
        "operators": table,
    }
    if not write_json(args.json, result):
        show_table(["MindFormers", "shape", "ours", "layout"], [list(row) for row in parameters])
        show_table(["forward pass", "MindFormers", "ours"], [list(row) for row in table])
        print(
            f"{len(rows)} parameters of {number} values; ours: {own} values; "
            f"{len(problems)} not as expected"
        )
    return 1 if problems else 0


VERB = Verb(
    name="upstream",
    help="compare MindFormers' own TeleChat3-MoE class with our model: parameters, operators",
    description="Compile a rank of MindFormers' own TeleChat3-MoE class and of our model from one recipe, and compare"
    " their parameters and the operators of their forward passes. Nothing is run.",
    notes=NOTES,
    examples=EXAMPLES,
    exits={0: "the same parameters", 1: "not", 3: "bad recipe or MindFormers refuses it"},
    recipe=True,
    overrides="override a value",
    arguments=_arguments,
    run=run,
)
