"""`telechat-moe layouts`: how a recipe splits each module."""

import argparse
from typing import Any

from telechat_moe.cli.arguments import arg, check_rank
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.verb import Verb


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from telechat_moe.recipe import load
    from telechat_moe.sharding.layouts import LOCAL, TABLE, WEIGHTS, WORDS, resolve
    from telechat_moe.sharding.recipe import mesh_of, stages_of

    recipe = load(args.recipe, args.overrides)
    mesh = mesh_of(recipe)
    check_rank("--rank", args.rank, mesh, args.recipe)
    places, stage = stages_of(recipe), mesh.stage(args.rank)
    layers = places and [i for i, place in enumerate(places.layers) if place.stage == stage]
    words = {
        word: {
            "axes": [axis for axis in resolve(word, mesh) if mesh.sizes[axis] > 1],
            "parts": mesh.size(resolve(word, mesh)),
        }
        for word in WORDS
    }
    groups = mesh.node_groups(args.rank) if mesh.node else {}
    hops = {f"ep {hop} nodes": ranks for hop, ranks in groups.items()}
    answer = {
        "recipe": str(recipe.source),
        "layout": mesh.describe(),
        "devices": mesh.devices,
        "rank": args.rank,
        "groups": {d: mesh.group(args.rank, mesh.axes(d)) for d in ("dp", "cp", "tp", "ep")} | hops,
        "stage": stage,
        "layers": layers,
        "words": words,
        "weights": WEIGHTS,
        "modules": {
            module: {name: rule._asdict() for name, rule in rules.items()}
            for module, rules in TABLE.items()
        },
        "on_slices": LOCAL,
    }
    if not write_json(args.json, answer):
        _print(answer)
    return 0


def _print(answer: dict[str, Any]) -> None:
    location = f"rank {answer['rank']} on stage {answer['stage']}"
    location += f", layers {answer['layers']}" if answer["layers"] else ""
    print(f"{answer['recipe']}: {answer['layout']}, {answer['devices']} devices; {location}\n")
    groups = [(name, " ".join(map(str, ranks))) for name, ranks in answer["groups"].items()]
    show_table(("group", "ranks"), groups)
    print()
    words = answer["words"].items()
    sizes = [(w, split["parts"], ", ".join(split["axes"]) or "whole") for w, split in words]
    show_table(("word", "parts ", "axes of the mesh"), sizes)
    print()
    rows: list[tuple[str, ...]] = []
    for module, rules in answer["modules"].items():
        names = [module, *[""] * (len(rules) - 1)]
        for shown, (name, rule) in zip(names, rules.items(), strict=True):
            rows.append((shown, name, " | ".join(rule["inputs"]), " | ".join(rule["outputs"])))
    for module, (inputs, outputs) in answer["on_slices"].items():
        rows.append((module, "(on slices)", " | ".join(inputs), " | ".join(outputs)))
    show_table(("module", "primitive", "inputs", "outputs"), rows)


VERB = Verb(
    name="layouts",
    help="print how a recipe splits each module over its devices",
    description="Print the mesh of a recipe, the groups of a rank, and the layout of each module: the mesh "
    "axes that shard each dimension; `.` is a dimension that every device has whole.",
    examples="telechat-moe layouts telechat3_moe/pretrain_105b_a4b_4k.yaml --rank 17",
    exits={3: "bad recipe"},
    recipe=True,
    overrides="override a value",
    arguments=[arg("--rank R", "global rank (default 0)", 0)],
    run=run,
)
