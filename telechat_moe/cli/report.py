"""`telechat-moe report`: what somebody else needs to understand a failure, in one file without data."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import BadInputError

if TYPE_CHECKING:
    from telechat_moe.recipe import Recipe

FILE = "telechat-moe-report.json"
DRY_RUN = "dryrun.json"
PACKAGES = ("mindspore", "mindformers", "numpy", "telechat_moe")
LEFT_OUT = "training data, token ids, prompts, what the run printed, environment variables, passwords and keys"

NOTES = f"""\
The file holds versions, devices, host, the resolved recipe, how each process of the last run ended, the first error with the
lines of the log that belong to it, and the figures of a dry run. Not in it: {LEFT_OUT}. Paths and host names are in it.
"""


def run(args: argparse.Namespace) -> int:
    """Collect, write, say the most important; return the exit code."""
    recipe, problems = _recipe(args.recipe, args.overrides, args.run_folder)
    output = Path(args.run_folder or (recipe.output_dir if recipe else "output"))
    report: dict[str, Any] = {
        "made": time.strftime("%FT%T%z"),
        "left_out": LEFT_OUT,
        "versions": versions(),
        "devices": devices(),
        "host": host(output),
        "recipe": None if recipe is None else describe_recipe(recipe),
        "recipe_problems": problems,
        "run": describe_run(output, Path(args.logs) if args.logs else None),
        "dry_run": dry_run(args.dryrun, output),
    }
    target = args.json or FILE
    if not write_json(target, report):
        print("\n".join([*summary(report), f"all of it: {target}"]))
    return 0


def _recipe(
    name: str | None, overrides: list[str], run_folder: str | None
) -> tuple[Recipe | None, list[str]]:
    """Return the recipe that is named, else that of the run, and what is wrong with it."""
    from telechat_moe.recipe import RecipeError, load

    written = Path(run_folder) / ".job" / "recipe.yaml" if run_folder else None
    if name is None and (written is None or not written.exists()):
        return None, []
    try:
        return load(name or str(written), overrides), []
    except RecipeError as error:
        return None, [str(problem) for problem in error.problems]


def versions() -> dict[str, Any]:
    """Return the versions of Python, packages, CANN and driver; None: not there."""
    from telechat_moe.versions import ASCEND, cann_problem, cann_version, installed, version_in

    return {
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
        "cann": cann_version(),
        "driver": version_in(ASCEND / "driver" / "version.info"),
        "problem": cann_problem(),
    }


def devices() -> dict[str, Any]:
    """Return the device files of NPUs and what `npu-smi info` prints; None: it is not there or fails."""
    import subprocess

    from telechat_moe.launch.affinity import npu_smi

    try:
        state = npu_smi().splitlines()
    except (OSError, subprocess.SubprocessError):
        state = None
    files = sorted(path.name for path in Path("/dev").glob("davinci[0-9]*"))
    return {"files": files, "npu_smi": state}


def host(output: Path) -> dict[str, Any]:
    """Return what machine this is; sizes in bytes."""
    existing = next(
        path for path in (output.absolute(), *output.absolute().parents) if path.exists()
    )
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "processors": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * page,
        "memory_free": os.sysconf("SC_AVPHYS_PAGES") * page,
        "disk_free": shutil.disk_usage(existing).free,
    }


def describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as it is resolved, its layout and whose trainer takes it; prompts and secrets left out."""
    from telechat_moe.recipe.uses import trainer_of

    return {
        "source": str(recipe.source),
        "devices": recipe.devices,
        "layout": recipe.degrees_text,
        "trainer": trainer_of(recipe, None),
        "resolved": _without_texts(recipe.to_dict()),
    }


def _without_texts(value: Any) -> Any:
    from telechat_moe.launch.last_run import is_secret, without_secrets
    from telechat_moe.narrowing import is_list, is_object

    if is_object(value):
        return {
            key: "left out" if key == "prompts" or is_secret(key) else _without_texts(entry)
            for key, entry in value.items()
        }
    if is_list(value):
        return [_without_texts(entry) for entry in value]
    return without_secrets(value) if isinstance(value, str) else value


def describe_run(output: Path, logs: Path | None) -> dict[str, Any] | None:
    """Return how far a run came, how its processes ended, and its first error; None: there is no run."""
    from telechat_moe.checkpoint.folder import list_checkpoints
    from telechat_moe.launch.job import LOGS
    from telechat_moe.launch.last_run import first_error, rank_ends
    from telechat_moe.processes import CONTROL, Control
    from telechat_moe.train.metrics import last_step

    job, logs = output / ".job", logs or output / LOGS
    if not any(path.exists() for path in (job, logs, output / "metrics.jsonl")):
        return None
    ends = rank_ends(Control(job / CONTROL))
    first = first_error(job, logs, ends)
    return {
        "output_dir": str(output),
        "finished": (output / "summary.json").exists() and first is None,
        "last_step": last_step(output / "metrics.jsonl"),
        "checkpoints": [path.name for path in list_checkpoints(output / "checkpoints")],
        "earlier_attempts": len(list(logs.glob("attempt_*"))),
        "ranks": [
            {"rank": e.rank, "position": e.position, "end": e.end, "message": e.message}
            for e in ends
        ],
        "first_error": None
        if first is None
        else {
            **first._asdict(),
            "fault": None if first.fault is None else first.fault.sentence,
            "lines": [{"number": number, "text": text} for number, text in first.lines],
        },
    }


def dry_run(path: str | None, output: Path) -> dict[str, Any] | None:
    """Return the figures of a dry run's report, of a step or of ``--run``, sizes in bytes; None: there is no report.

    Args:
        path: What `dryrun --json` wrote; None: ``dryrun.json`` in the run's folder, if it is there.

    Raises:
        BadInputError: It is not there, or no such report.
    """
    from telechat_moe.reading import MALFORMED, parse_json

    file = Path(path) if path else output / DRY_RUN
    if path is None and not file.exists():
        return None
    try:
        report = parse_json(file.read_bytes())
        about = {key: report[key] for key in ("recipe", "layout", "devices")}
        figures: dict[str, Any]
        if "graphs" in report:  # of --run
            figures = {key: report[key] for key in ("graphs", "largest_moment", "batch", "save")}
        else:
            keys = ("stage", "rank", "memory", "calls", "sent")
            figures = {"stages": [{key: stage[key] for key in keys} for stage in report["stages"]]}
        figures["device_memory"] = {
            str(entry["stage"]): entry["total"] if "total" in entry else entry["memory"]["total"]
            for entry in figures.get("largest_moment") or figures["stages"]
        }
        return {**about, **figures}
    except (OSError, *MALFORMED) as error:
        text = f"{type(error).__name__}: {error}"
        raise BadInputError(
            f"{file}: no report of a dry run ({text}); expected what `telechat-moe dryrun RECIPE --json FILE` writes"
        ) from error


def summary(report: Mapping[str, Any]) -> list[str]:
    """Return the lines for the terminal."""
    from telechat_moe.units import size_text

    versions, run = report["versions"], report["run"]
    listed = (
        f"{name} {versions[name] or 'none'}" for name in ("python", *PACKAGES, "cann", "driver")
    )
    lines = [f"versions: {', '.join(listed)}"]
    lines += [f"versions do not fit: {versions['problem']}"] if versions["problem"] else []
    count = len(report["devices"]["files"])
    lines.append(f"devices: {count} NPU(s)" if count else "devices: no NPU (no /dev/davinci*)")
    if (recipe := report["recipe"]) is not None:
        text = f"{recipe['devices']} device(s), {recipe['layout']}, trainer: {recipe['trainer']}"
        lines.append(f"recipe: {recipe['source']}, {text}")
    lines += [f"recipe: {problem}" for problem in report["recipe_problems"]]
    if run is None:
        lines.append("run: none")
    else:
        lines.append(
            f"run: {run['output_dir']}, step {run['last_step']}, {len(run['checkpoints'])} checkpoint(s)"
        )
        lines += _error_lines(run)
    sizes: dict[str, int] = report["dry_run"]["device_memory"] if report["dry_run"] else {}
    totals = (f"stage {stage} {size_text(size)}" for stage, size in sizes.items())
    return [*lines, f"dry run, memory of a device: {', '.join(totals)}"] if sizes else lines


def _error_lines(run: Mapping[str, Any]) -> list[str]:
    if (first := run["first_error"]) is None:
        return ["first error: none"]
    lines = [f"first error: {first['message']}"] if first["message"] else []
    if first["fault"]:
        lines.append(f"rank {first['fault_rank']} reports: {first['fault']}")
    position = f"rank {first['rank']} was at: {first['position']}" if first["position"] else ""
    shown = [f"  {line['number']}: {line['text']}" for line in first["lines"][-5:]]
    return [*lines, *([position] if position else []), *shown]


VERB = Verb(
    name="report",
    help="put what is needed to understand a failure into one file, without data",
    description="Write versions, devices, recipe, the first error of a run and a dry run's figures into one file, to send to others.",
    notes=NOTES,
    examples="telechat-moe report my_recipe.yaml\n"
    "telechat-moe report --run output/mine --dryrun dryrun.json --json report.json",
    exits={0: "written", 3: "no report of a dry run"},
    json_keys="made, left_out, versions, devices, host, recipe, recipe_problems, run, dry_run "
    f"(without --json: into {FILE})",
    overrides="override a value of RECIPE",
    arguments=[
        arg("RECIPE", "shipped recipe name or YAML file (default: the run's)", nargs="?"),
        arg("--run DIR", "output_dir of the run (default: the recipe's)", dest="run_folder"),
        arg("--logs DIR", "folder of the run's logs (default: log in its folder)"),
        arg(
            "--dryrun FILE", f"what `dryrun --json` wrote (default: {DRY_RUN} in the run's folder)"
        ),
    ],
    run=run,
)
