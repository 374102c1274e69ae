"""`telechat-moe ckpt`: what a checkpoint holds, its pieces for a layout and back, to MindFormers and back."""

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import Any

from telechat_moe.cli import ckpt_mindformers
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.units import size_text

NOTES = """\
Each process of a run writes its own shards of a checkpoint; `telechat-moe train --resume` goes on
from them in any layout or in one process, and nothing needs to be converted. `merge` makes one with whole tensors,
for other programs; `reshard` is for programs that load one file a rank.
"""
EXAMPLES = """\
telechat-moe ckpt show output/checkpoints/step-00001000
telechat-moe ckpt reshard output/checkpoints/step-00001000 pieces --recipe telechat3_moe/pretrain_tiny.yaml \\
    --set use_parallel=True --set parallel_config.model_parallel=2
telechat-moe ckpt merge pieces merged
telechat-moe ckpt merge output/checkpoints/step-00001000 whole
telechat-moe ckpt to-mindformers output/checkpoints/step-00001000 moved --recipe my_recipe.yaml
telechat-moe ckpt from-mindformers output/checkpoint --recipe my_recipe.yaml --set output_dir=mine
"""
BAD = {3: "missing, broken, of another model, or the output exists"}


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="checkpoint, or folder of shards")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def _reshard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    parser.add_argument(
        "--recipe", required=True, metavar="RECIPE", help="recipe of that model with the layout"
    )


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="folder of shards, or checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder of checkpoints; OUT/step-... is made")


def run_show(args: argparse.Namespace) -> int:
    """Verify, describe; return the exit code."""
    path = Path(args.path)
    found = _pieces(path) if _is_pieces(path) else _checkpoint(path)
    if write_json(args.json, found):
        return 0
    print(f"{path}: {found['kind']} of step {found['step']}, {found['layout']}")
    rows = [
        [name, f"{g['tensors']:,}", f"{g['elements']:,}", ", ".join(g["dtypes"])]
        for name, g in found["groups"].items()
    ]
    show_table(["group", "tensors ", "elements ", "types"], rows)
    print()
    files = [[name, f"{f['bytes']:,}", f["sha256"][:16]] for name, f in found["files"].items()]
    show_table(["file", "bytes ", "sha256"], files)
    if args.tensors:
        print()
        tensors = found["tensors"].items()
        rows = [[t["group"], n, t["dtype"], str(t["shape"])] for n, t in tensors]
        show_table(["group", "tensor", "type", "whole shape"], rows)
    print(f"\nall {len(found['files'])} checksums agree")
    return 0


def run_reshard(args: argparse.Namespace) -> int:
    """Cut, say what was written; return the exit code."""
    from telechat_moe.checkpoint.reshard import reshard
    from telechat_moe.recipe import load

    content = reshard(Path(args.path), Path(args.out), load(args.recipe, args.overrides))
    found = _describe(Path(args.out), content)
    if not write_json(args.json, found):
        print(
            f"{args.out}: step {found['step']} for {found['layout']}, {found['devices']} files, "
            f"{size_text(found['bytes'])}"
        )
    return 0


def run_merge(args: argparse.Namespace) -> int:
    """Put together, say where; return the exit code."""
    from telechat_moe.checkpoint.reshard import merge

    path = merge(Path(args.path), Path(args.out))
    if not write_json(args.json, {"path": str(path)}):
        print(path)
    return 0


def _is_pieces(path: Path) -> bool:
    from telechat_moe.checkpoint import reshard

    return (path / reshard.FILE).exists()


def _pieces(path: Path) -> dict[str, Any]:
    from telechat_moe.checkpoint import reshard

    return _describe(path, reshard.verify(path))


def _describe(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    about = {"kind": "pieces", "layout": content["layout"], "devices": content["devices"]}
    return _summary(path, about, content, content["tensors"])


def _checkpoint(path: Path) -> dict[str, Any]:
    from telechat_moe.checkpoint import checkpoint, manifest

    checkpoint.verify(path)
    content = manifest.read(path)
    tensors = {
        name: {"group": group, "dtype": t["dtype"], "shape": t["shape"]}
        for group, names in content["tensors"].items()
        for name, t in names.items()
    }
    about = {"kind": "checkpoint", "layout": _layout(content), "devices": content.get("ranks", 1)}
    return _summary(path, about, content, tensors)


def _layout(content: dict[str, Any]) -> str:
    """Say how the tensors of a checkpoint lie in its files."""
    if "layout" not in content:
        return "whole tensors"
    return f"in pieces, written by {content['ranks']} ranks ({content['layout']})"


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
    arguments=_show_arguments,
    run=run_show,
)
RESHARD = Verb(
    name="reshard",
    help="write the shards of each rank of a recipe",
    examples="telechat-moe ckpt reshard output/checkpoints/step-00001000 shards --recipe my_recipe.yaml",
    exits=BAD,
    json_keys="as those of `ckpt show`.",
    overrides="override a value of the recipe",
    arguments=_reshard_arguments,
    run=run_reshard,
)
MERGE = Verb(
    name="merge",
    help="make a checkpoint with whole tensors from shards",
    examples="telechat-moe ckpt merge shards merged",
    exits=BAD,
    json_keys="path.",
    arguments=_merge_arguments,
    run=run_merge,
)
VERB = Verb(
    name="ckpt",
    help="look into a checkpoint, shard it for a layout, make it whole from shards",
    description="Look into a checkpoint, shard it for a layout, make it whole from shards; exact bits.",
    notes=NOTES,
    examples=EXAMPLES,
    exits=BAD,
    subverbs=[SHOW, RESHARD, MERGE, *ckpt_mindformers.VERBS],
)
