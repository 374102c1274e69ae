"""`telechat-moe train`: train the model of a recipe on this machine."""

import argparse
from dataclasses import asdict
from pathlib import Path

from telechat_moe.cli.arguments import add_start, arg
from telechat_moe.cli.output import write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

NOTES = """\
A recipe that is laid out for several devices (use_parallel: True) is trained by as many processes on
this machine: on CPU each runs the graph that MindSpore compiled for its rank as for Ascend, on Ascend
each compiles its own. A checkpoint holds whole tensors: --resume goes on from it in any other layout.

Writes into the recipe's output_dir: metrics.jsonl, loss.png, tensorboard/, sample.txt,
summary.json, recipe.json and checkpoints/.
"""


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code."""
    from telechat_moe.cli.judge import require
    from telechat_moe.files import keep_others_out
    from telechat_moe.interop import hf

    keep_others_out()
    start, outside = {"resume": args.resume, "overwrite": args.overwrite}, args.allow_outside
    # Says what is wrong before the seconds that importing mindspore takes.
    recipe = require(args.recipe, args.overrides, use="train", allow_outside=outside, **start)
    try:
        from telechat_moe.train.trainer import Trainer
    except ModuleNotFoundError as error:
        text = f"training needs the package {error.name}; pip install 'telechat-moe[train]'"
        raise UsageError(text) from error

    if recipe.devices > 1:
        from telechat_moe.launch import job as launch
        from telechat_moe.tools.plan.schedules.ranks import rank_orders

        plan = launch.plan_here(recipe, allow_outside=outside)
        summary = launch.train(recipe, plan=plan, orders=rank_orders(recipe), **start)
    else:
        keep, weights = not args.no_graph_cache, hf.weights
        trainer = Trainer(recipe, **start, plain=args.plain, keep_graph=keep, weights=weights)
        summary = asdict(trainer.run())
    stdout_is_taken = write_json(args.json, summary)
    if not summary["finished"]:
        return 130
    if not stdout_is_taken:
        sample = ["sample.txt"] if recipe.telechat_moe.sample else []
        files = ["loss.png", "summary.json", *sample, "checkpoints"]
        written = [name for name in files if (Path(recipe.output_dir) / name).exists()]
        print(f"done: {recipe.output_dir}/{', '.join(written)}")
    return 0


VERB = Verb(
    name="train",
    help="train the model of a recipe on this machine",
    description="Train the model of a recipe on this machine, in MindSpore graph mode.",
    notes=NOTES,
    examples="telechat-moe data build --recipe telechat3_moe/pretrain_tiny.yaml\n"
    "telechat-moe train telechat3_moe/pretrain_tiny.yaml --set output_dir=output/first",
    exits={
        0: "trained",
        1: "stopped (not finite, disk full, a process died)",
        3: "bad recipe, data or checkpoint",
        130: "interrupted (Ctrl-C or SIGTERM; the step is saved, continue with --resume)",
    },
    after_interruption="--resume continues from its last checkpoint, if it has saved one",
    recipe=True,
    overrides="override a value, for example optimizer.weight_decay=0.05",
    arguments=[
        add_start,
        arg("--plain", "print plain lines, also on a terminal"),
        arg(
            "--no-graph-cache",
            "compile the graph of a step, also where an earlier start has kept it, and keep none",
        ),
    ],
    run=run,
)
