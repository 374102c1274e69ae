"""`telechat-moe align capture`: dump what a recipe's training steps, or a torch script, compute."""

import argparse
import json
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.interruption import unfinished

_LAST = 12  # lines of the log of a script that failed
VALUES = ("tensor", "statistics", "fingerprint")
NOTES = """\
A recipe runs as `telechat-moe train` or, with a layout, as `telechat-moe run-sharded` runs it, and every operator of the compiled graph is recorded. With
--torch a script runs unchanged in a process of its own; every torch function is recorded, forward and backward, and every update of a weight
by an optimizer, which ends a step. With --mindtorch the script's torch is mindtorch, which computes with MindSpore. OUT is a tree that msprobe
reads, too. docs/align.md has the details.
"""


_ELSEWHERE = """
import json, runpy, sys, types
for name, path in json.loads(sys.argv.pop(1)).items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Runs a module of telechat_moe in an environment without it; arguments: where its packages are, the module, and its own."""
_RECORDER = "telechat_moe.tools.align.capture.mindtorch_functions"


def run(args: argparse.Namespace) -> int:
    """Run and record; return the exit code."""
    import subprocess

    steps = _steps(args.steps)
    if Path(args.out).exists():
        raise UsageError(f"--out {args.out}: it exists; give a new folder")
    if args.torch is None:
        if args.mindtorch is not None:
            raise UsageError("--mindtorch is for --torch SCRIPT, not for a recipe")
        return _recipe(args, steps)
    if args.layers or args.ranks or args.only or args.overrides or args.values != VALUES[0]:
        raise UsageError(
            "--layers, --ranks, --only, --values and --set are for recipes, not for --torch"
        )
    if not Path(args.torch).is_file():
        raise BadInputError(f"--torch {args.torch}: there is no such file")
    words = ["--modules"] * args.modules
    words += [args.out, str(steps.start), str(steps.stop - 1), args.torch, *args.arguments]
    if args.mindtorch is not None:
        _on_mindspore(args.mindtorch, args.torch, args.out, words)
        write_json(args.json, {"out": args.out, "exit_code": 0})
        return 0
    command = [sys.executable, "-m", "telechat_moe.tools.align.capture.torch_functions", *words]
    with unfinished(args.out):
        code = subprocess.call(command, start_new_session=True)  # Ctrl-C reaches only this process
    write_json(args.json, {"out": args.out, "exit_code": code})
    return code


def _on_mindspore(environment: str, script: str, out: str, words: list[str]) -> None:
    """Record a script of torch by the Python of an environment with mindtorch."""
    import subprocess

    python = Path(environment, "bin", "python")
    if not python.is_file():
        make = f"sh benchmarks/peers/mindtorch.sh {environment}"
        raise UsageError(f"--mindtorch {environment}: no bin/python is there; `{make}` makes it")
    packages = [find_spec(n) for n in ("telechat_moe", "telechat_moe.ops", "telechat_moe.tools")]
    paths = {p.name: [*(p.submodule_search_locations or ())] for p in packages if p is not None}
    command = [str(python), "-c", _ELSEWHERE, json.dumps(paths), _RECORDER, *words]
    with unfinished(out):
        process = subprocess.run(
            command, stderr=subprocess.PIPE, start_new_session=True, check=False
        )
    log = process.stderr.decode(errors="replace")
    if process.returncode:
        last = "\n".join(log.splitlines()[-_LAST:])
        raise BadInputError(
            f"{script}: exit code {process.returncode} with mindtorch; the end of its log:\n{last}"
        )
    sys.stderr.write(log)


def _recipe(args: argparse.Namespace, steps: range) -> int:
    if len(args.arguments) != 1:
        words = " ".join(args.arguments) or "none"
        raise UsageError(f"one recipe expected, or --torch SCRIPT; found {words}")
    from telechat_moe.cli.judge import require

    layers, ranks = _numbers("--layers", args.layers), _numbers("--ranks", args.ranks)
    flags = {"overwrite": True, "allow_outside": True}
    recipe = require(args.arguments[0], args.overrides, use="train", **flags)
    from telechat_moe.tools.align.capture import mindspore as capture

    selection = capture.Filter(None if layers is None else frozenset(layers), tuple(args.only))
    dump = capture.capture_recipe(
        recipe, args.out, steps, values=args.values, selection=selection, ranks=ranks
    )
    calls = sum(len(rank.calls) for rank in dump.ranks.values())
    if not calls:
        raise BadInputError(f"{args.out}: no operator fits --layers and --only; the dump is empty")
    count, on = len(dump.steps), len(dump.at(steps.start))
    if not write_json(args.json, {"out": args.out, "calls": calls, "steps": count, "ranks": on}):
        print(f"{args.out}: {calls:,} calls of {count} steps on {on} ranks")
    return 0


def _steps(text: str) -> range:
    steps = _range(text)
    if not steps:
        raise UsageError(f"--steps {text}: expected a number or A-B, such as 0-3")
    return steps


def _range(text: str) -> range | None:
    first, _, last = text.partition("-")
    is_range = first.isdigit() and (last or first).isdigit()
    return range(int(first), int(last or first) + 1) if is_range else None


def _numbers(option: str, text: str | None) -> list[int] | None:
    """Return the numbers of a list such as ``0,2-3``."""
    if text is None:
        return None
    ranges = [_range(part) for part in text.split(",")]
    if None in ranges:
        raise UsageError(f"{option} {text}: expected numbers, such as 0,2-3")
    return [*chain.from_iterable(filter(None, ranges))]


VERB = Verb(
    name="capture",
    help="run a recipe or a torch script and dump what it computes",
    description="Run a recipe or a torch script and dump what it computes, forward, backward and updates.",
    notes=NOTES,
    examples="telechat-moe align capture mine.yaml --out router --only '*.router.*' --values fingerprint\n"
    "telechat-moe align capture --torch train.py --out golden --steps 0-1 -- --lr 0.1",
    exits={
        1: "a process died",
        2: "wrong usage, or OUT exists",
        3: "no such script, recipe or data, or the script failed with --mindtorch; else the script's own",
    },
    json_keys="out, calls, steps and ranks (their numbers); with --torch: out, exit_code.",
    overrides="override a value of the recipe",
    arguments=[
        arg("--torch SCRIPT", "run this script"),
        arg("--mindtorch ENV", "run the script on MindSpore, by this environment with mindtorch"),
        arg("--out OUT", "folder to make", required=True),
        arg("--steps A[-B]", "steps to record, from 0 (default: 0)", "0"),
        arg("--modules", "of a script: record what modules return, too"),
        arg("--layers N,A-B", "of a recipe: only these layers"),
        arg("--ranks N,A-B", "of a recipe: only these ranks"),
        arg(
            "--only PATTERN",
            "of a recipe: only operators whose name fits, such as '*.attention.*'",
            [],
            action="append",
        ),
        arg(
            "--values",
            "of a recipe: whole tensors (default), statistics, or fingerprints of 2 KiB",
            VALUES[0],
            choices=VALUES,
        ),
        arg("arguments RECIPE", "the recipe; of a script its arguments, after --", nargs="*"),
    ],
    run=run,
)
