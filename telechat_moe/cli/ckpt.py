"""`telechat-moe ckpt`: what a checkpoint holds, its pieces for a layout and back, to MindFormers and back."""

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.progress import bars
from telechat_moe.cli.verb import Verb
from telechat_moe.units import size_text

NOTES = """\
Each process of a run writes its own shards of a checkpoint; `telechat-moe train --resume` goes on
from them in any layout or in one process, and nothing needs to be converted. `merge` makes one with whole tensors,
for other programs; `reshard` is for programs that load one file a rank.
"""
FROM = """\
PATH is an iteration_... folder (whole tensors or shards of ranks, of MindFormers' static graph or of mode 1), a
..._rank_0-1_1000.safetensors file, or the folder checkpoint/ of a run through MindFormers (its newest). The checkpoint is written into the recipe's output_dir, and `telechat-moe train --resume`
goes on.
"""
BAD = {2: "wrong usage, or the output exists", 3: "missing, broken, or of another model"}


def run_show(args: argparse.Namespace) -> int:
    """Verify, describe; return the exit code."""
    path = Path(args.path)
    report = _verify_and_describe(path)
    if write_json(args.json, report):
        return 0
    print(f"{path}: {report['kind']} of step {report['step']}, {report['layout']}")
    groups = report["groups"].items()
    rows = [
        [n, f"{g['tensors']:,}", f"{g['elements']:,}", ", ".join(g["dtypes"])] for n, g in groups
    ]
    show_table(["group", "tensors ", "elements ", "types"], rows)
    print()
    files = [[name, f"{f['bytes']:,}", f["sha256"][:16]] for name, f in report["files"].items()]
    show_table(["file", "bytes ", "sha256"], files)
    if args.tensors:
        print()
        tensors = report["tensors"].items()
        rows = [[t["group"], n, t["dtype"], str(t["shape"])] for n, t in tensors]
        show_table(["group", "tensor", "type", "whole shape"], rows)
    print(f"\nall {len(report['files'])} checksums agree")
    return 0


def run_reshard(args: argparse.Namespace) -> int:
    """Cut, say what was written; return the exit code."""
    from telechat_moe.checkpoint.reshard import reshard
    from telechat_moe.recipe import load

    content = reshard(Path(args.path), Path(args.out), load(args.recipe, args.overrides))
    report = _describe(Path(args.out), content)
    if not write_json(args.json, report):
        files = f"{report['devices']} files, {size_text(report['bytes'])}"
        print(f"{args.out}: step {report['step']} for {report['layout']}, {files}")
    return 0


def run_merge(args: argparse.Namespace) -> int:
    """Put together, say where; return the exit code."""
    from telechat_moe.checkpoint.reshard import merge

    path = merge(Path(args.path), Path(args.out))
    if not write_json(args.json, {"path": str(path)}):
        print(path)
    return 0


def run_average(args: argparse.Namespace) -> int:
    """Average, say where."""
    from telechat_moe.interop.average import average

    paths = list(map(Path, args.paths))
    with bars(in_bytes=True) as progress:
        result = average(paths, Path(args.out), args.weights, ema=args.ema, progress=progress)
    if not write_json(args.json, vars(result)):
        terms = " + ".join(f"{s['share']:.4g} {s['path']}" for s in result.sources)
        size = size_text(result.total_bytes)
        print(f"{result.path}: {result.tensors} tensors, {size}: {terms}")
    return 0


def run_to(args: argparse.Namespace) -> int:
    """Write; say what MindFormers is to be told."""
    from telechat_moe.interop.mindformers_checkpoint import resume_settings, to_mindformers
    from telechat_moe.recipe import load

    recipe, out = load(args.recipe, args.overrides), Path(args.out)
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


def _verify_and_describe(path: Path) -> dict[str, Any]:
    """Verify a checkpoint or a folder of shards and describe it."""
    from telechat_moe.checkpoint import checkpoint, manifest, reshard
    from telechat_moe.errors import BadInputError
    from telechat_moe.interop.mindformers_tensors import folder_of

    if (path / reshard.FILE).exists():
        return _describe(path, reshard.verify(path))
    if not (path / manifest.FILE).exists() and folder_of(path) is not None:
        raise BadInputError(
            f"{path}: a checkpoint of MindFormers; `telechat-moe ckpt from-mindformers` makes one of ours, and "
            "`telechat-moe convert` reads its weights"
        )
    checkpoint.verify(path)
    content = manifest.read(path)
    tensors = {
        name: {"group": group, "dtype": t["dtype"], "shape": t["shape"]}
        for group, names in content["tensors"].items()
        for name, t in names.items()
    }
    layout = "whole tensors"
    if "layout" in content:
        layout = f"sharded, written by {content['ranks']} ranks ({content['layout']})"
    about = {"kind": "checkpoint", "layout": layout, "devices": content.get("ranks", 1)}
    return _summary(path, about, content, tensors)


def _describe(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    about = {"kind": "pieces", "layout": content["layout"], "devices": content["devices"]}
    return _summary(path, about, content, content["tensors"])


def _summary(
    path: Path, about: dict[str, Any], content: dict[str, Any], tensors: dict[str, Any]
) -> dict[str, Any]:
    groups: dict[str, dict[str, Any]] = {}
    for t in tensors.values():
        group = groups.setdefault(t["group"], {"tensors": 0, "elements": 0, "dtypes": Counter()})
        group["tensors"] += 1
        group["elements"] += math.prod(t["shape"])
        group["dtypes"][t["dtype"]] += 1
    return {
        "path": str(path),
        **about,
        "step": content["step"],
        "groups": {name: {**g, "dtypes": dict(g["dtypes"])} for name, g in groups.items()},
        "tensors": tensors,
        "files": content["files"],
        "bytes": sum(f["bytes"] for f in content["files"].values()),
        "verified": True,
    }


SHOW = Verb(
    name="show",
    help="step, layout, tensors, checksums",
    notes="PATH is a checkpoint (step-00001000) or a folder that `ckpt reshard` wrote. Every file is read and its "
    "checksum\ncompared.",
    examples="telechat-moe ckpt show output/checkpoints/step-00001000",
    exits=BAD,
    json_keys="path, kind (checkpoint | pieces), step, layout, devices, tensors (name: group, dtype, shape), groups "
    "(name: tensors, elements, dtypes), files (name: bytes, sha256), bytes, verified.",
    arguments=[
        arg("PATH", "checkpoint, or folder of shards"),
        arg("--tensors", "list every tensor"),
    ],
    run=run_show,
)
RESHARD = Verb(
    name="reshard",
    help="write the shards of each rank of a recipe",
    examples="telechat-moe ckpt reshard output/checkpoints/step-00001000 shards --recipe my_recipe.yaml",
    exits=BAD,
    json_keys="as those of `ckpt show`.",
    overrides="override a value of the recipe",
    arguments=[
        arg("PATH", "checkpoint"),
        arg("OUT", "folder to make"),
        arg("--recipe RECIPE", "recipe of that model with the layout", required=True),
    ],
    run=run_reshard,
)
MERGE = Verb(
    name="merge",
    help="make a checkpoint with whole tensors from shards",
    examples="telechat-moe ckpt merge shards merged",
    exits=BAD,
    json_keys="path.",
    arguments=[
        arg("PATH", "folder of shards, or checkpoint"),
        arg("OUT", "folder of checkpoints; OUT/step-... is made"),
    ],
    run=run_merge,
)
AVERAGE = Verb(
    name="average",
    help="average the weights of checkpoints, or take a moving average out",
    notes="Adds in float64 and writes float32 weights without optimizer state, which load_checkpoint and convert read.\n"
    "With --ema and one PATH the moving average of a run (telechat_moe.ema) becomes weights.",
    examples="telechat-moe ckpt average output/checkpoints/step-00000800 output/checkpoints/step-00001000 --out averaged",
    exits={1: "writing failed (disk full)", **BAD},
    json_keys="path, sources (path, share, group, checkpoint.json: its SHA-256), files, tensors, total_bytes.",
    arguments=[
        arg("paths PATH", "checkpoints, or weights", nargs="+"),
        arg("--out OUT", "folder or .safetensors to make", required=True),
        arg("--weights W", "one each (default: equal)", nargs="+", type=float),
        arg("--ema", "of the moving averages that they hold"),
    ],
    run=run_average,
)
TO_MINDFORMERS = Verb(
    name="to-mindformers",
    help="write a checkpoint as MindFormers' trainer resumes it",
    notes="PATH is a checkpoint (step-00001000), OUT a folder to create. MindFormers' trainer resumes with the settings that are printed.",
    examples="telechat-moe ckpt to-mindformers output/checkpoints/step-00001000 moved --recipe my_recipe.yaml\n"
    "python -m telechat_moe.run my_recipe.yaml --through mindformers --set load_checkpoint=PRINTED ...",
    json_keys="path, load_checkpoint, resume_training.",
    overrides="override a value of the recipe",
    arguments=[
        arg("PATH", "checkpoint"),
        arg("OUT", "folder to make"),
        arg("--recipe RECIPE", "recipe of the run", required=True),
    ],
    run=run_to,
)
FROM_MINDFORMERS = Verb(
    name="from-mindformers",
    help="take over a checkpoint that MindFormers' trainer wrote",
    notes=FROM,
    examples="telechat-moe ckpt from-mindformers output/checkpoint --recipe my_recipe.yaml --set output_dir=mine\n"
    "telechat-moe train my_recipe.yaml --resume --set output_dir=mine",
    json_keys="path.",
    overrides="override a value of the recipe",
    arguments=[
        arg("PATH", "checkpoint of MindFormers"),
        arg("--recipe RECIPE", "recipe of the run", required=True),
    ],
    run=run_from,
)
VERB = Verb(
    name="ckpt",
    help="inspect a checkpoint, shard it for a layout, merge its shards, or average several",
    description="Look into a checkpoint, shard it for a layout, make it whole from shards; exact bits.",
    notes=NOTES,
    examples="telechat-moe ckpt show output/checkpoints/step-00001000\n"
    "telechat-moe ckpt merge output/checkpoints/step-00001000 whole",
    exits=BAD,
    subverbs=[SHOW, RESHARD, MERGE, AVERAGE, TO_MINDFORMERS, FROM_MINDFORMERS],
)
