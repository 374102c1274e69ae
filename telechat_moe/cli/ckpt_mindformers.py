"""`telechat-moe ckpt to-mindformers | from-mindformers`."""

import argparse
from pathlib import Path

from telechat_moe.cli.output import write_json
from telechat_moe.cli.verb import Verb

TO = """\
PATH is a checkpoint (step-00001000), OUT a folder to make. MindFormers' trainer goes on from what is printed.
"""
FROM = """\
PATH is an iteration_... folder, a ..._rank_0-1_1000.safetensors file, or the folder checkpoint/ of a run through
MindFormers (its newest). The checkpoint is written into the recipe's output_dir, and `telechat-moe train --resume`
goes on.
"""
TO_EXAMPLES = """\
telechat-moe ckpt to-mindformers output/checkpoints/step-00001000 moved --recipe my_recipe.yaml
python -m telechat_moe.run my_recipe.yaml --through mindformers --set load_checkpoint=PRINTED ...
"""
FROM_EXAMPLES = """\
telechat-moe ckpt from-mindformers output/checkpoint --recipe my_recipe.yaml --set output_dir=mine
telechat-moe train my_recipe.yaml --resume --set output_dir=mine
"""


def _recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", required=True, metavar="RECIPE", help="recipe of the run")


def _to_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    _recipe(parser)


def _from_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="checkpoint of MindFormers")
    _recipe(parser)


def run_to(args: argparse.Namespace) -> int:
    """Write; say what MindFormers is to be told."""
    from telechat_moe.interop.mindformers_checkpoint import resume_settings, to_mindformers
    from telechat_moe.recipe import load

    recipe = load(args.recipe, args.overrides)
    out = Path(args.out)
    to_mindformers(Path(args.path), out, recipe)
    settings = resume_settings(out, recipe)
    if not write_json(args.json, {"path": str(out), **settings}):
        print(" ".join(f"{key}={value}" for key, value in settings.items()))
    return 0


def run_from(args: argparse.Namespace) -> int:
    """Write; say where."""
    from telechat_moe.interop.mindformers_checkpoint import to_ours
    from telechat_moe.recipe import load

    path = to_ours(Path(args.path), load(args.recipe, args.overrides))
    if not write_json(args.json, {"path": str(path)}):
        print(path)
    return 0


VERBS = (
    Verb(
        name="to-mindformers",
        help="write a checkpoint as MindFormers' trainer resumes it",
        notes=TO,
        examples=TO_EXAMPLES,
        json_keys="path, load_checkpoint, resume_training.",
        overrides="override a value of the recipe",
        arguments=_to_arguments,
        run=run_to,
    ),
    Verb(
        name="from-mindformers",
        help="take over a checkpoint that MindFormers' trainer wrote",
        notes=FROM,
        examples=FROM_EXAMPLES,
        json_keys="path.",
        overrides="override a value of the recipe",
        arguments=_from_arguments,
        run=run_from,
    ),
)
