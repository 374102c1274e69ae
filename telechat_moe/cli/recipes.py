"""`telechat-moe ls`, `show`, `check` and `cp`: the recipe files."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telechat_moe.cli.arguments import add_start, arg
from telechat_moe.cli.output import show_table, to_yaml, write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.units import count_text, gib_text
from telechat_moe.versions import warn_of_mindformers

if TYPE_CHECKING:
    from telechat_moe.recipe import ModelConfig, Recipe
    from telechat_moe.recipe.mode1 import DynamicRecipe

SCHEMA_COMMENT = b"# yaml-language-server: $schema=../schema.json"

CONVENTION = (
    "matrix products only, 2 per multiply-add; causal attention, (S + 1) / 2 keys per token; "
    "training = 3 x forward; MTP included; recomputation not"
)


DEVICES = arg("--devices N", "number of devices", type=int)


def run_ls(args: argparse.Namespace) -> int:
    """List the shipped recipes."""
    from telechat_moe.recipe import load, shipped_names

    report = [_entry(name, load(name)) for name in shipped_names()]
    if not write_json(args.json, {"recipes": report}):
        rows = [
            [
                e["name"],
                count_text(e["total_without_mtp"]),
                count_text(e["active_without_mtp"]),
                f"{e['devices']:,}",
                e["description"],
            ]
            for e in report
        ]
        show_table(["recipe", "total ", "active ", "devices ", "what"], rows)
    return 0


def _entry(name: str, recipe: Recipe) -> dict[str, Any]:
    from telechat_moe.recipe.arithmetic import parameters

    return {
        "name": name,
        "model_type": recipe.model_config.model_type,
        **parameters(recipe.model_config).totals(),
        "devices": recipe.devices,
        "description": describe(recipe.source.read_text(encoding="utf-8")),
    }


def describe(text: str) -> str:
    """Return the first sentence of the ``What:`` entry in a recipe's header comment."""
    words: list[str] = []
    for line in text.splitlines():
        comment = line.removeprefix("#").strip()
        if words and (not comment or not line.startswith("#   ")):
            break
        if words:
            words.append(comment)
        elif comment.startswith("What:"):
            words.append(comment.removeprefix("What:").strip())
    sentence, _, _ = " ".join(words).partition(". ")
    for end in (";", ":"):
        sentence = sentence.partition(end + " ")[0]
    return sentence.rstrip(".")


def run_show(args: argparse.Namespace) -> int:
    """Print a resolved recipe and what follows from it, or who reads its keys."""
    from telechat_moe.recipe import ModelConfig, find, load, mode1
    from telechat_moe.recipe.uses import written

    if mode1.kind_of_file(find(args.recipe), args.overrides) == "mode 1":
        return _show_mode1(args)
    recipe = load(args.recipe, args.overrides, devices=args.devices)
    if args.keys:
        return _show_keys(recipe, [entry.row() for entry in written(recipe)], args)
    config = recipe.model.model_config
    model = config if isinstance(config, ModelConfig) else None
    report: dict[str, Any] = {
        "source": str(recipe.source),
        "recipe": recipe.to_dict(),
        "devices": recipe.devices,
        "global_batch": recipe.global_batch,
        "train_steps": recipe.train_steps,
        "parameters": None,
        "flops_per_token": None,
        "state_bytes": None,
    }
    if model is not None:
        report |= _derived(model)
    if not write_json(args.json, report):
        _print_show(report, config.model_type)
    return 0


def _show_mode1(args: argparse.Namespace) -> int:
    from telechat_moe.recipe import find, mode1
    from telechat_moe.recipe.uses import written_keys
    from telechat_moe.recipe.values import plain

    recipe = mode1.load(find(args.recipe), args.overrides, devices=args.devices)
    if args.keys:
        keys: list[dict[str, Any]] = []
        for entry in written_keys("", recipe.config, recipe.written):
            readers = [] if entry.takes else ["mindformers"]
            keys.append({**entry.row(), "readers": readers, "train": "refused"})
        return _show_keys(recipe, keys, args)
    training, model = recipe.config.training, mode1.network(recipe)
    report: dict[str, Any] = {
        "source": str(recipe.source),
        "recipe": plain(recipe.config, recipe.written),
        "devices": recipe.devices,
        "global_batch": training.global_batch_size,
        "train_steps": training.steps,
        "parameters": None,
        "flops_per_token": None,
        "state_bytes": None,
    }
    report |= _derived(model) if model is not None else {}
    if not write_json(args.json, report):
        _print_show(report, recipe.config.model.model_type)
    return 0


def _show_keys(
    recipe: Recipe | DynamicRecipe, keys: list[dict[str, Any]], args: argparse.Namespace
) -> int:
    report: list[dict[str, Any]] = [
        {"line": recipe.problem(row["key"], "", "").line, **row} for row in keys
    ]
    if not write_json(args.json, {"source": str(recipe.source), "keys": report}):
        rows = [
            [row["line"] or "", row["key"], row["value"], ", ".join(row["readers"]), row["train"]]
            for row in report
        ]
        show_table(["line ", "key", "value", "read by", "for `telechat-moe train`"], rows)
    return 0


def _derived(model: ModelConfig) -> dict[str, Any]:
    from telechat_moe.recipe.arithmetic import flops_per_token, parameters, state_bytes

    counts, flops, state = parameters(model), flops_per_token(model), state_bytes(model)
    keys = {key: key for key in ("name", "count", "each", "total")} | {"active": "total_active"}
    parts = [{key: getattr(part, name) for key, name in keys.items()} for part in counts.parts]
    rates = {"forward": flops.forward, "training": flops.training, "convention": CONVENTION}
    return {
        "parameters": {**counts.totals(), "parts": parts},
        "flops_per_token": rates,
        "state_bytes": {**asdict(state), "total": state.total},
    }


def _print_show(report: dict[str, Any], model_type: str | None) -> None:
    print(to_yaml(report["recipe"]), end="")
    lines = [
        f"devices:         {report['devices']:,}"
        if report["devices"]
        else "devices:         any (--devices N)",
        f"batch:           {report['global_batch']:,} samples per update",
        f"steps:           {report['train_steps']:,}",
    ]
    counts = report["parameters"]
    if counts is None:
        lines.append(f"parameters:      not counted for model type {model_type}")
        print("\n".join(f"# {line}" for line in lines))
        return
    flops, state = report["flops_per_token"], report["state_bytes"]
    lines += [
        f"parameters:      {count_text(counts['total_without_mtp'])} without MTP, "
        f"{count_text(counts['total'])} with",
        f"active:          {count_text(counts['active_without_mtp'])} without MTP, "
        f"{count_text(counts['active'])} with, per token, embedding and head included",
        f"FLOPs per token: {count_text(flops['forward'])} forward, {count_text(flops['training'])} training",
        f"                 ({flops['convention']})",
        f"states:          {gib_text(state['total'])} over all devices: parameters, "
        "gradients, two float32 moments",
    ]
    print("\n".join(f"# {line}" for line in lines))
    total, active = counts["total"], counts["active"]
    rows = [
        [
            part["name"],
            f"{part['count']}",
            f"{part['each']:,}",
            f"{part['total']:,}",
            f"{part['total'] / total:.1%}",
            f"{part['active']:,}",
            f"{part['active'] / active:.1%}",
        ]
        for part in counts["parts"]
    ]
    titles = ["part", "count ", "parameters each ", "total ", "share ", "active ", "share "]
    show_table(titles, rows, prefix="# ")


def run_check(args: argparse.Namespace) -> int:
    """Check recipes and print every problem."""
    from telechat_moe.cli.judge import judge_for_check

    report: list[dict[str, Any]] = []
    lines: list[str] = []
    missing, count = False, 0
    if args.use == "mindformers":
        warn_of_mindformers()
    names = ("use", "devices", "allow_outside", "resume", "overwrite")
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    for name in args.recipes:
        judged = judge_for_check(name, args.overrides, **options)
        problems, use, open_keys = judged.problems, judged.use, judged.not_judged
        missing = missing or not use
        by = f" {judged.version}" if use == "mindformers" else ""
        ok = f"{name}: ok" if use == "train" else f"{name}: ok for {use}{by}"
        asks = args.host_syncs and not problems
        waits = _host_waits(name, use, args) if asks else None
        unneeded = [wait for wait in waits or () if not wait["needed"]]
        lines += [str(problem) for problem in problems] or [ok] * (not unneeded)
        lines += _wait_lines(name, waits) if asks else []
        for reason in dict.fromkeys(open_keys.values()):
            keys = ", ".join(key for key, key_reason in open_keys.items() if key_reason == reason)
            lines.append(f"{name}: not judged: {keys}: {reason}")
        lines += [f"{name}: note: {note}" for note in judged.notes]
        entries = [asdict(problem) for problem in problems]
        is_ok = not problems and not unneeded
        entry = {"use": use, "ok": is_ok, "problems": entries, "not_judged": dict(open_keys)}
        report.append(
            {"name": name, **entry, "notes": judged.notes} | ({"host_waits": waits} if asks else {})
        )
        count += len(problems) + len(unneeded)
    broken = sum(not entry["ok"] for entry in report)
    if not write_json(args.json, {"recipes": report, "problems": count}):
        print("\n".join(lines))
        if broken:
            print(f"problems: {count}, in {broken} of {len(report)} recipes")
    return 3 if missing else int(broken > 0)


def _host_waits(name: str, use: str, args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Return for what the host waits in our steps on several devices; None: the recipe has none."""
    from telechat_moe.cli.progress import counted
    from telechat_moe.recipe import load
    from telechat_moe.train import run_graphs

    if use not in ("train", "dryrun"):
        return None
    recipe = load(name, args.overrides, devices=args.devices, use=use)
    if recipe.devices == 1:
        return None
    graphs = run_graphs.step_graphs(recipe)
    title = f"compiling the steps of {Path(name).name}"
    with counted(title, sum(len(graph.ranks) for graph in graphs)) as advance:
        return run_graphs.host_waits(recipe, graphs, advance)


def _wait_lines(name: str, waits: Sequence[dict[str, Any]] | None) -> list[str]:
    """Say for what the host waits in a step, for the user; graphs and layers together."""
    if waits is None:
        return [f"{name}: not judged: waits of the host, but for our steps on several devices"]
    lines = [f"{name}: the host waits once a step, for the outputs of the step before"]
    for kind, reason, needed in dict.fromkeys((w["kind"], w["why"], w["needed"]) for w in waits):
        alike = [w for w in waits if (w["kind"], w["why"], w["needed"]) == (kind, reason, needed)]
        times = Counter[tuple[str, int]]()
        for wait in alike:
            times[wait["graph"], wait["stage"]] += wait["times"]
        modules = ", ".join(dict.fromkeys(wait["module"] for wait in alike))
        if needed:
            reason = "HCCL takes the sizes of an all-to-all from the host (telechat_moe.sharding.dispatcher: alltoall has none)"
        begin = f"{name}: {'and' if needed else 'problem:'}"
        lines.append(f"{begin} up to {max(times.values())} times in {modules}, {kind}: {reason}")
    return lines


def run_cp(args: argparse.Namespace) -> int:
    """Copy a recipe to a file of the user's own, in the words of another version of MindFormers if that is asked for."""
    from telechat_moe.files import write_atomic
    from telechat_moe.recipe import find

    source, dest = find(args.recipe), Path(args.dest)
    if dest.is_dir():
        dest = dest / source.name
    if args.devices is not None and args.to != "mindformers-1":
        raise UsageError("--devices belongs to --to mindformers-1")
    data, notes = _translated(source, args) if args.to else (_copied(source), ())
    if args.output_dir is not None:
        line = f"output_dir: {json.dumps(args.output_dir, ensure_ascii=False)}".encode()
        data, count = re.subn(rb"^output_dir:[^\r\n]*", lambda _: line, data, flags=re.MULTILINE)
        if count != 1:
            text = f"--output-dir needs one line output_dir: in it, found {count}"
            raise BadInputError(f"{source}: {text}")
    try:
        write_atomic(dest, data, replace=args.force)
    except FileExistsError:
        if not dest.is_file() or dest.read_bytes() != data:
            message = f"{dest} exists and differs; choose another name or give --force"
            raise UsageError(message) from None
    except OSError as error:
        raise UsageError(f"{dest}: cannot be written: {error.strerror}") from None
    if not write_json(
        args.json, {"source": str(source), "destination": str(dest), "differences": notes}
    ):
        print(f"{source.name} -> {dest}")
        print("".join(f"  {note}\n" for note in notes), end="")
    return 0


def _copied(source: Path) -> bytes:
    """Return the bytes of a recipe; the editor's hint in its first line finds the schema from everywhere."""
    from telechat_moe.recipe import schema_file

    data = source.read_bytes()
    if not data.startswith(SCHEMA_COMMENT):
        return data
    hint = f"# yaml-language-server: $schema={schema_file()}".encode()
    return hint + data.removeprefix(SCHEMA_COMMENT)


def _translated(source: Path, args: argparse.Namespace) -> tuple[bytes, Sequence[str]]:
    """Return a recipe in the words of mode 0 or mode 1, and what it means there."""
    from telechat_moe.recipe import RecipeError, load, loads, mode1

    target = {"mindformers-1": "mode 0", "mindformers-2": "mode 1"}[args.to]
    kind = mode1.kind_of_file(source)
    if kind == target:
        raise BadInputError(f"{source}: is a recipe of {target} already; leave --to out to copy it")
    title = f"# Translated from {source.name} by `telechat-moe cp --to {args.to}`"
    recipe = mode1.load(source, devices=args.devices) if kind == "mode 1" else load(source)
    devices = recipe.devices
    try:
        if isinstance(recipe, mode1.DynamicRecipe):
            result = mode1.to_mode0(recipe)
            text = to_yaml(result.sections)
            loads(text, name=args.dest)
        else:
            result = mode1.to_mode1(recipe)
            text = to_yaml(result.sections)
            mode1.loads(text, path=Path(args.dest), devices=devices)
    except RecipeError as error:
        raise BadInputError(f"{source}: cannot be written for {target}:\n{error}") from None
    comments = [
        f"{title}, for {devices:,} devices.",
        "# What is not the same:" if result.notes else "#",
    ]
    comments += [f"#   {note}" for note in result.notes]
    return ("\n".join(comments) + "\n\n" + text).encode(), result.notes


SET = "replace a setting; may be repeated (values are YAML, list items by index)"
VERBS = (
    Verb(
        name="ls",
        help="list the recipes that come with the package",
        examples="telechat-moe ls",
        exits={3: "a shipped recipe is broken"},
        json_keys="recipes, a list of {name, model_type, total, total_without_mtp, active, active_without_mtp "
        "(parameters), devices, description}.",
        run=run_ls,
    ),
    Verb(
        name="show",
        help="print a resolved recipe and what follows from it",
        notes="Prints the resolved recipe (defaults, aliases and --set applied) as YAML that MindFormers reads, and "
        "after it,\nas comments, what follows from it.",
        examples="telechat-moe show telechat3_moe/pretrain_105b_a4b_4k.yaml --set parallel_config.data_parallel=8",
        exits={3: "the recipe has problems"},
        json_keys="source, recipe (resolved), devices (null: a recipe of mode 1 that does not say), global_batch, train_steps, and null for a model type that "
        "this package only checks: parameters {total, total_without_mtp, active, active_without_mtp, parts [{name, "
        "count, each, total, active}]}, flops_per_token {forward, training, convention}, state_bytes {parameters, "
        "gradients, optimizer, total}. With --keys: source, keys, a list of {line (0: none), key, value, readers (own, "
        "mindformers), train (what our trainer makes of a key that it does not read)}.",
        recipe=True,
        overrides=SET,
        arguments=[DEVICES, arg("--keys", "list the written keys and who reads each")],
        run=run_show,
    ),
    Verb(
        name="check",
        help="check recipes and print every problem",
        notes="Prints every problem of every recipe as file:line: key: found; expected. A key that asks for something\n"
        "which the use of the recipe (--for) will not do is a problem; `show --keys` says who reads each. `mindformers` is\n"
        "its installed version, 1.9 if there is none. For train, files, folders, checkpoint and device are looked at, too,\n"
        "as `train` with the same flags would.",
        examples="telechat-moe check my_recipe.yaml --devices 256",
        exits={
            0: "no problems",
            1: "at least one recipe has problems",
            3: "a recipe does not exist or cannot be read",
        },
        json_keys="recipes, a list of {name, use, ok, problems [{file, line, key, found, expected, suggestion}], not_judged "
        "{key: why; keys that MindFormers reads only with settings that were not observed, or whose problems hide others}, "
        "notes (what the build of its data said), with --host-syncs host_waits [{graph, stage, rank, kind, module, phase, times, "
        "waits, needed, why}]}; problems, their number.",
        overrides=SET,
        arguments=[
            arg("recipes RECIPE", "shipped recipes or files", nargs="+"),
            DEVICES,
            arg(
                "--for",
                "what the recipe is for (default: train with TelechatMoeTrainer, else mindformers)",
                "written",
                dest="use",
                choices=["train", "dryrun", "mindformers", "mindformers-1.9", "mindformers-2.1"],
            ),
            add_start,
            arg(
                "--host-syncs",
                "compile the steps for Ascend and name every operator for which the host waits; a problem, but for the "
                "sizes of all-to-alls",
            ),
        ],
        run=run_check,
    ),
    Verb(
        name="cp",
        help="copy a recipe to a file of your own, or translate it for MindFormers 1 or 2",
        notes="With --to the same training is written in the words of the other mode: mindformers-2 for MindFormers 2's dynamic\n"
        "graphs (mode 1), mindformers-1 for static graphs (mode 0), those of this package too. What has no counterpart, or\n"
        "means something else there, is printed and stands in the first lines of the file.",
        examples="telechat-moe cp telechat3_moe/pretrain_tiny.yaml my_recipe.yaml --output-dir output/mine",
        exits={2: "wrong usage, or DEST exists", 3: "no such recipe, or it cannot be translated"},
        json_keys="source, destination, differences (with --to: what is not the same, a text each).",
        recipe=True,
        arguments=[
            arg("DEST", "file or folder to write"),
            arg("--output-dir DIR", "the copy's output_dir, for runs of its own"),
            arg("--force", "replace DEST if it exists"),
            arg("--to", "translate it", choices=["mindformers-1", "mindformers-2"]),
            arg("--devices N", "with --to mindformers-1: on how many devices", type=int),
        ],
        run=run_cp,
    ),
)
