"""Run three phases before a production run: operators alone, one step, the loss curve. One verdict; resumable.

Each phase writes its report into the folder and is repeated only if something that it depends on has changed. A phase
that diverged ends the run, because later phases would only show the consequences; they are inconclusive then.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telechat_moe.errors import BadInputError
from telechat_moe.files import write_atomic
from telechat_moe.tools.align.judge.coverage import VERDICTS

TITLES = ("operators alone", "one step", "loss curve")
PhaseReport = dict[str, Any]


@dataclass(frozen=True)
class PhasesPlan:
    """The settings of a check."""

    recipe: str  # name or file of the recipe
    out: Path  # folder of the reports
    overrides: Sequence[str] = ()  # `KEY=VALUE` for the recipe
    # Dump of the trusted run; None: the step is judged by replay alone
    reference: Path | None = None
    target: Path | None = None  # dump of a step of the recipe; None: it is captured
    map: Path | None = None  # file that links the tensors of the two dumps, if their calls differ
    bases: Sequence[str] = ()  # curves of trusted runs
    # Curve of the recipe's run; None: it is trained for as many steps as the recipe says
    curve: str | None = None
    steps: int = 1000  # fewest steps that a curve must have
    repeat: bool = False  # whether to run all phases, even those that are done
    go_on: bool = False  # whether to run the phases after one that diverged, too
    show: Callable[[str], None] = field(default=print, compare=False)


def run(plan: PhasesPlan) -> dict[str, Any]:
    """Run the phases that are not done yet; return the report, which is also in ``phases.json``.

    Raises:
        BadInputError: An input is missing, or a command that a phase needs failed.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    phases: list[PhaseReport] = []
    works = zip(TITLES, (_operators, _step, _curve), strict=True)
    for number, (title, work) in enumerate(works, 1):
        wrong = [p["title"] for p in phases if p["verdict"] == "diverged"]
        if wrong and not plan.go_on:
            reason = f"{wrong[0]} diverged; what comes after shows only that (--go-on runs it)"
            phase = _not_judged(reason)
        else:
            phase = _saved_or_run(plan, number, work)
        phases.append({"title": title, **phase})
        took = f" ({phase['wall_s']:.0f} s)" if "wall_s" in phase else ""
        plan.show(f"{number}. {title}: {phase['verdict']}: {phase['sentence']}{took}")
    worst = min(phases, key=lambda p: VERDICTS.index(p["verdict"]))
    verdict, sentence = worst["verdict"], f"{worst['title']}: {worst['sentence']}"
    if verdict == "pass":
        sentence = "Operators, step and loss curve are right as far as they were judged."
    report = {"verdict": verdict, "recipe": plan.recipe, "sentence": sentence, "phases": phases}
    write_atomic(plan.out / "phases.json", json.dumps(report, indent=1))
    return report


def _not_judged(reason: str) -> PhaseReport:
    return {"verdict": "inconclusive", "sentence": reason, "not_judged": {reason: 1}}


def _saved_or_run(
    plan: PhasesPlan, number: int, work: Callable[[PhasesPlan], PhaseReport]
) -> PhaseReport:
    """Return a phase's report: the one in the folder, if nothing that it depends on has changed; else a new one."""
    path, key = plan.out / f"phase{number}.json", _state(plan, number)
    if path.exists() and not plan.repeat:
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["state"] == key:
                return saved["report"]
        except (ValueError, KeyError, TypeError):
            pass  # interrupted while it was written
    begin = time.monotonic()
    report = work(plan)
    report["wall_s"] = round(time.monotonic() - begin, 1)
    if report["verdict"] in ("pass", "diverged"):
        write_atomic(path, json.dumps({"state": key, "report": report}))
    return report


def _state(plan: PhasesPlan, number: int) -> str:
    from telechat_moe.recipe import load

    settings = load(plan.recipe, list(plan.overrides)).to_dict()
    recipe = json.dumps(settings, sort_keys=True, default=str)
    inputs: list[Any] = [number, recipe]
    if number == 2:
        inputs += [_file_state(p) for p in (plan.reference, plan.target, plan.map)]
    if number == 3:
        inputs += [_file_state(Path(p)) for p in (*plan.bases, plan.curve or "-")] + [plan.steps]
    return hashlib.sha256(json.dumps(inputs, default=str).encode()).hexdigest()


def _file_state(path: Path | None) -> Any:
    """Return name, size and time of a file; for a folder, those of its newest dump.json."""
    if path is None or not path.exists():
        return str(path)
    files = sorted(path.rglob("dump.json")) if path.is_dir() else [path]
    return [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def _align(*arguments: Any) -> int:
    """Run a sub-verb; exit codes 1 and 4 are answers, others are failures."""
    return _command(["-m", "telechat_moe.cli", "align", *map(str, arguments)], (0, 1, 4))


def _command(arguments: Sequence[str], good: Sequence[int] = (0,), shown: bool = False) -> int:
    """Run Python with arguments, maybe with its output shown on a terminal; return its exit code.

    Raises:
        BadInputError: The exit code is not one of the good ones.
    """
    out = sys.stderr if shown and sys.stderr.isatty() else subprocess.PIPE
    process = subprocess.run(
        [sys.executable, *arguments],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches only this process
    )
    if process.returncode not in good:
        message = process.stderr.strip() or (process.stdout or "").strip() or "no message"
        last = message.splitlines()[-1]
        raise BadInputError(f"{' '.join(arguments[1:4])}: exit code {process.returncode}: {last}")
    return process.returncode


def _operators(plan: PhasesPlan) -> PhaseReport:
    path = plan.out / "operators.json"
    module = "telechat_moe.tools.phases.operators"
    _command(["-m", module, plan.recipe, str(path), *plan.overrides])
    return json.loads(path.read_text(encoding="utf-8"))


def _step(plan: PhasesPlan) -> PhaseReport:
    target = plan.target
    if target is None:
        target = plan.out / "step"
        _check_folder(plan, target)
        if not target.exists():
            settings = _settings(plan.overrides)
            _align("capture", plan.recipe, "--out", target, "--steps", "0", *settings)
            _mark_folder(plan, target)
    reports: dict[str, Any] = {}
    commands = [("alone", ["bisect", target])]
    if plan.reference is not None:
        options = [] if plan.map is None else ["--map", plan.map]
        commands.append(("bisect", ["bisect", plan.reference, target, *options]))
    for name, arguments in commands:
        path = plan.out / f"{name}.json"
        _align(*arguments, "--json", path)
        reports[name] = json.loads(path.read_text(encoding="utf-8"))
    return _of_reports(reports, plan.reference is None)


def _of_reports(reports: dict[str, Any], alone: bool) -> PhaseReport:
    worst = min(reports.values(), key=lambda r: VERDICTS.index(r["verdict"]))
    reason = "no reference dump was given, each operator was judged by its own inputs"
    unknown = {f"weights, data and settings: {reason}": 1} if alone else {}
    summary = {key: worst[key] for key in ("verdict", "sentence")}
    return {**summary, "reports": reports, "not_judged": unknown}


def _settings(overrides: Sequence[str]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def _check_folder(plan: PhasesPlan, folder: Path) -> None:
    """Refuse a folder with the results of another recipe; with ``repeat`` remove the results of this one."""
    mark = folder.with_suffix(".state")
    if not folder.exists():
        return
    if not mark.exists() or mark.read_text(encoding="utf-8") != _state(plan, 1):
        problem = "of another recipe, or incomplete; remove it or give another --out"
        raise BadInputError(f"{folder}: {problem}")
    if plan.repeat:
        shutil.rmtree(folder)


def _mark_folder(plan: PhasesPlan, folder: Path) -> None:
    folder.with_suffix(".state").write_text(_state(plan, 1), encoding="utf-8")


def _curve(plan: PhasesPlan) -> PhaseReport:
    if not plan.bases:
        return _not_judged("no curve of a trusted run was given (--base)")
    curve = plan.curve
    if curve is None:
        folder = plan.out / "run"
        _check_folder(plan, folder)
        _mark_folder(plan, folder)
        settings = _settings((*plan.overrides, f"output_dir={folder}"))
        resume = ["--resume"] if (folder / "checkpoints").exists() else []
        _command(["-m", "telechat_moe.cli", "train", plan.recipe, *settings, *resume], shown=True)
        curve = str(folder / "metrics.jsonl")
    path = plan.out / "loss.json"
    _align("loss", *plan.bases, curve, "--min-steps", plan.steps, "--json", path)
    return _of_reports({"loss": json.loads(path.read_text(encoding="utf-8"))}, False)
