"""`telechat-moe check --host-syncs`: what makes the host wait for the device in the steps of a recipe."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telechat_moe.cli.output import show_table, write_json
from telechat_moe.errors import BadInputError, UsageError

if TYPE_CHECKING:
    from telechat_moe.recipe import Recipe
    from telechat_moe.recipe.host_syncs import HostSync


def run(args: argparse.Namespace) -> int:
    """List the waits; return the exit code."""
    from telechat_moe.recipe import host_syncs, load
    from telechat_moe.recipe.uses import use_of

    if not args.host_syncs:
        raise UsageError("--graph goes with --host-syncs")
    report: list[dict[str, Any]] = []
    for name in args.recipes:
        recipe = load(name, args.overrides, devices=args.devices)
        found = host_syncs.of_recipe(recipe)
        waits = host_syncs.waits_in_every_step(found)
        entry = {"name": name, "use": use_of(recipe), "waits_in_every_step": waits}
        report.append({**entry, "syncs": [_row(recipe, one) for one in found]})
    graph = _graph(Path(args.graph)) if args.graph else None
    costs = host_syncs.costs()
    if not write_json(args.json, {"recipes": report, "costs": costs, "graph": graph}):
        for entry in report:
            _show(entry)
        if graph is not None:
            _show_graph(args.graph, graph)
        print(f"costs: {costs['machine']}, `{costs['command']}`; an NPU's are not measured")
    return int(any(e["use"] == "train" and e["waits_in_every_step"] > 1 for e in report))


def _row(recipe: "Recipe", one: "HostSync") -> dict[str, Any]:
    """Return an entry with its place in the recipe."""
    place = recipe.problem(one.key, "", "")
    return {"file": place.file, "line": place.line, **asdict(one), "cost_us": one.cost_us}


def _graph(path: Path) -> list[dict[str, Any]]:
    """Return what is in a compiled graph.

    Raises:
        BadInputError: It cannot be read.
    """
    from google.protobuf.message import DecodeError

    from telechat_moe.graph.host_syncs import host_syncs
    from telechat_moe.reading import MALFORMED

    try:
        found = host_syncs(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (DecodeError, BadInputError, RecursionError, *MALFORMED) as error:
        raise BadInputError(f"{path}: not a graph ({error}); expected a .mindir file") from None
    return [one._asdict() for one in found]


def _show(entry: dict[str, Any]) -> None:
    trainer = "our trainer" if entry["use"] == "train" else "MindFormers' trainer"
    print(f"{entry['name']}: {trainer}, waits in every step: {entry['waits_in_every_step']}\n")
    rows = [
        (
            f"{one['file']}:{one['line']}" if one["line"] else one["file"],
            one["key"],
            _number(one["waits"]),
            _number(one["fetches"]),
            str(one["every"]),
            "?" if one["cost_us"] is None else f"{one['cost_us']:.0f}",
        )
        for one in entry["syncs"]
    ]
    titles = ("where", "key", "waits ", "fetches ", "every (steps) ", "us a step ")
    show_table(titles, rows)
    print()
    for one in entry["syncs"]:
        print(f"{one['key']}: {one['what']}\n  by {one['source']}\n  {one['move']}")
    print()


def _number(count: int | None) -> str:
    return "?" if count is None else str(count)


def _show_graph(name: str, graph: list[dict[str, Any]]) -> None:
    print(f"{name}: operators that reach the host{'' if graph else ': none'}\n")
    rows = [
        (
            one["kind"],
            one["module"],
            one["phase"],
            str(one["times"]),
            "yes" if one["waits"] else "no",
            one["why"],
        )
        for one in graph
    ]
    if rows:
        show_table(("operator", "module", "phase", "times ", "waits", "why"), rows)
        print()
