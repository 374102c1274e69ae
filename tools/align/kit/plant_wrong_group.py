"""Capture a step of a sharded recipe in which one gradient is summed over the wrong ranks, to see that it is found.

The recipe needs two groups of equal size, such as data parallel 2 and tensor parallel 2::

    python plant_wrong_group.py mine.yaml --weight layers.1.attention.out.weight --out planted
    telechat-moe align capture mine.yaml --out clean
    telechat-moe align bisect clean planted --html align.html
"""

import argparse
import sys
from dataclasses import replace

from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.mindir import Model, value_of
from telechat_moe.recipe import load
from telechat_moe.tools.align.capture_mindspore import capture_recipe


def with_wrong_group(graph: RankGraph, weight: str) -> RankGraph:
    """Return a rank's graph in which the gradient of a weight is summed over another group of the same size."""
    model = Model(graph.mindir)
    for operation in list(model.operations()):
        whose = [value_of(a) for a in operation.node.primal_attr if a.name == "mirror_user_id"]
        if operation.kind != "AllReduce" or weight not in whose:
            continue
        right = list(graph.groups[operation.attribute("group")])
        others = [
            name
            for name, ranks in sorted(graph.groups.items())
            if len(ranks) == len(right) and list(ranks) != right and graph.rank in ranks
        ]
        if not others:
            sys.exit(f"no other group of {len(right)} ranks has rank {graph.rank}: {graph.groups}")
        own = model.proto.primitives.add()
        own.CopyFrom(operation.primitive)
        own.name = f"{own.name}_wrong"
        for attribute in own.attribute:
            if attribute.name == "group":
                attribute.s = others[0].encode()
        operation.node.op_type = f"REF::{own.name}"
        sys.stderr.write(
            f"rank {graph.rank}: {weight} over {graph.groups[others[0]]}, not over {right}\n"
        )
        return replace(graph, mindir=model.proto.SerializeToString())
    sys.exit(f"rank {graph.rank}: no reduction of the gradient of {weight}")


def main() -> None:
    """Capture one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--out", required=True)
    parser.add_argument("--weight", default="layers.1.attention.out.weight")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    recipe = load(args.recipe, args.overrides)
    edit = lambda graph: with_wrong_group(graph, args.weight)  # noqa: E731
    capture_recipe(recipe, args.out, range(1), edit=edit)


if __name__ == "__main__":
    main()
