"""Capture steps of a sharded recipe in which one gradient is reduced wrongly, to see that it is found.

``--fault group`` sums it over the wrong ranks (the recipe needs two groups of equal size, such as data parallel 2 and
tensor parallel 2), ``missing`` not at all, ``doubled`` twice; ``scaled`` adds its sum to itself. ``bias`` moves an
expert bias (``--weight layers.1.moe.router.expert_bias``) the wrong way, which the next step shows::

    python plant_wrong_group.py mine.yaml --weight layers.1.attention.out.weight --out planted
    telechat-moe align capture mine.yaml --out clean
    telechat-moe align bisect clean planted --html align.html
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.mindir import Editor, MindIR, Operation, value_of
from telechat_moe.recipe import load
from telechat_moe.tools.align.capture.mindspore import capture_recipe
from telechat_moe.train import rank_graph


def with_fault(graph: RankGraph, weight: str, fault: str) -> RankGraph:
    """Return a rank's graph with a fault at a weight; a stage without an expert bias stays as it is."""
    model = MindIR(graph.mindir)
    for operation in list(model.operations()):
        whose = [value_of(a) for a in operation.node.primal_attr if a.name == "mirror_user_id"]
        moves = fault == "bias" and operation.kind == "AssignAdd"
        if moves and operation.node.input[0].endswith(weight):
            effects = ["side_effect_mem"]
            kind = Editor(model, None).primitive("AssignSub", operation.primitive, effects)
            operation.node.op_type = kind
            sys.stderr.write(f"rank {graph.rank}: {weight} moves the wrong way\n")
            return replace(graph, mindir=model.proto.SerializeToString())
        if operation.kind == "AllReduce" and weight in whose:
            said = FAULTS[fault](model, operation, graph)
            sys.stderr.write(f"rank {graph.rank}: {weight} {said}\n")
            return replace(graph, mindir=model.proto.SerializeToString())
    if fault == "bias":
        return graph
    sys.exit(f"rank {graph.rank}: no reduction of the gradient of {weight}")


def _group(model: MindIR, operation: Operation, graph: RankGraph) -> str:
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
    return f"over {graph.groups[others[0]]}, not over {right}"


def _missing(model: MindIR, operation: Operation, graph: RankGraph) -> str:
    made = operation.node.output[0]
    _handed_on(model, operation, made, operation.node.input[0])
    for body in model.graphs():
        if operation.node in body.node:
            body.node.remove(operation.node)
            break
    return "not reduced"


def _doubled(model: MindIR, operation: Operation, graph: RankGraph) -> str:
    own = _added(model, operation)
    own.input[0] = operation.node.output[0]
    return "reduced twice"


def _scaled(model: MindIR, operation: Operation, graph: RankGraph) -> str:
    own = _added(model, operation)
    own.op_type = Editor(model, None).primitive("Add")
    del own.input[:], own.primal_attr[:]
    own.input.extend([operation.node.output[0]] * 2)
    return "added to itself"


def _added(model: MindIR, operation: Operation) -> Any:
    """Return a copy of an operation's node, added behind it, whose output others take in its place."""
    made = operation.node.output[0]
    own = type(operation.node)()
    own.CopyFrom(operation.node)
    own.name = own.output[0] = f"{made}_again"
    _handed_on(model, operation, made, own.output[0])
    body = next(g for g in model.graphs() if operation.node in g.node)
    at = list(body.node).index(operation.node) + 1
    body.node.insert(at, own)
    return body.node[at]


def _handed_on(model: MindIR, operation: Operation, made: str, other: str) -> None:
    """Hand another tensor to all that take what an operation made."""
    for body in model.graphs():
        if operation.node not in body.node:
            continue
        for node in body.node:
            for i, name in enumerate(node.input):
                if name == made:
                    node.input[i] = other


FAULTS: Mapping[str, Callable[[MindIR, Operation, RankGraph], Any]] = {
    "group": _group,
    "missing": _missing,
    "doubled": _doubled,
    "scaled": _scaled,
}


def main() -> None:
    """Capture the first steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--out", required=True)
    parser.add_argument("--weight", default="layers.1.attention.out.weight")
    parser.add_argument("--fault", default="group", choices=[*FAULTS, "bias"])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    recipe = load(args.recipe, args.overrides)
    compiled = rank_graph.compile_recipe

    def planted(*given: Any, **named: Any) -> list[RankGraph]:
        return [with_fault(g, args.weight, args.fault) for g in compiled(*given, **named)]

    with mock.patch.object(rank_graph, "compile_recipe", planted):  # the graphs of all ranks
        capture_recipe(recipe, args.out, range(args.steps))


if __name__ == "__main__":
    main()
