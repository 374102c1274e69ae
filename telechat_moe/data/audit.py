"""Prove which samples each step of a run saw: none lost, none twice, across resumes, rollbacks and layouts.

The log of a run (:mod:`telechat_moe.data.sample_log`) is folded into the steps that count, without those that a
resume or a rollback undid. Then the plan is recomputed from the recipe and the index files, without the loader: step k
gets the next global batch of samples; sample g of all epochs is number ``g mod samples_per_epoch``. Every step's
position in the plan and the checksum of its tokens are compared with it. Where samples were dealt to ranks, the order of
each step must name all of its samples once, and the checksum is that of the tokens in that order.

:func:`audit_plan` is for runs that leave no such log (MindFormers): it proves the plan alone.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.data.blend import open_recipe
from telechat_moe.data.dataset import Dataset
from telechat_moe.data.sample_log import FILE, content
from telechat_moe.data.whole import ConversationDataset
from telechat_moe.errors import BadInputError

Progress = Callable[[int, int], None]


@dataclass
class Start:
    """A process of the run, from its line ``start`` on.

    Attributes:
        line: Line of the log.
        step: Last step done before.
        layout: How the model was split.
        steps: Steps that it did.
        kept: Those of these steps that no resume and no rollback undid.
    """

    line: int
    step: int
    layout: str
    steps: int = 0
    kept: int = 0


@dataclass
class DataSpan:
    """Steps in a row that read the same data from its first sample, or from where another run stopped.

    Attributes:
        data_path: As in the recipe; empty: the log does not say.
        dataset: Fingerprint.
        samples_per_epoch: Samples of a pass.
        first_step, last_step: Of the steps that count; 0: none.
        read_again: Their token ids were compared.
    """

    data_path: list[str]
    dataset: str
    samples_per_epoch: int
    first_step: int = 0
    last_step: int = 0
    read_again: bool = False


@dataclass
class Audit:
    """What an audit found.

    Attributes:
        source: Folder or recipe.
        covers: What was compared with what.
        steps: Steps that count.
        samples: Samples that these saw.
        epochs: Passes over the samples, the last one perhaps not whole.
        samples_per_epoch: Samples of a pass.
        undone: Steps that were done and undone.
        skipped: Steps that count whose update was left out.
        starts: Every process.
        data: Which data were read, more than one if the run went on with new data (`telechat_moe.resume_data`).
        rollbacks: The rollbacks that were not undone later, as logged.
        problems: What is wrong, a line each.
    """

    source: str
    covers: str
    steps: int = 0
    samples: int = 0
    epochs: float = 0.0
    samples_per_epoch: int = 0
    undone: int = 0
    skipped: int = 0
    starts: list[Start] = field(default_factory=list[Start])
    data: list[DataSpan] = field(default_factory=list[DataSpan])
    rollbacks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    problems: list[str] = field(default_factory=list[str])


@dataclass
class _Entry:
    """A step that counts, or samples that a rollback left out."""

    first: int
    end: int
    step: int | None
    content: str = ""
    applied: bool = True
    start: int = 0
    span: int = 0
    order: np.ndarray | None = None

    @property
    def is_step(self) -> bool:
        """Whether it is a step; else a rollback, or a gap in the log."""
        return self.step is not None and self.step > 0


class _Timeline:
    """The steps that count at a moment, and how they came about."""

    def __init__(self, audit: Audit) -> None:
        self.audit, self.problems = audit, audit.problems
        self.entries: list[_Entry] = []
        self.span = 0
        self.before = 0  # last step of the run that this one continues

    @property
    def end(self) -> int:
        """The sample that comes next, of the data that are being read."""
        last = self.entries[-1] if self.entries else None
        return last.end if last is not None and last.span == self.span else 0

    @property
    def last_step(self) -> int:
        return next((e.step or 0 for e in reversed(self.entries) if e.is_step), self.before)

    def _rollbacks(self) -> int:
        return sum(e.step is None for e in self.entries)

    def start(self, line: int, said: dict[str, Any]) -> None:
        """Take note of a process that begins at a checkpoint, which undoes later steps."""
        self.audit.starts.append(Start(line, int(said["step"]), str(said["layout"])))
        step, known = int(said["step"]), list(said["rollbacks"])
        if said.get("continues") and not self.entries:
            self.before = step
            if not said.get("new_data"):
                self.entries.append(_Entry(0, int(said["next_sample"]), -1))
        self._undo(lambda e: self._rollbacks() > len(known) if e.step is None else e.step > step)
        self._choose_span(line, said)
        # Killed between the checkpoint that a rollback writes and its line in the log.
        for rollback in known[self._rollbacks() :]:
            self.rollback(line, rollback)
        if self.last_step != step:
            self.problems.append(
                f"step {self.last_step + 1}: missing; line {line} continues after step {step}, the log ends at "
                f"step {self.last_step}"
            )
        self._place(f"line {line}, a start after step {step},", int(said["next_sample"]))

    def _choose_span(self, line: int, said: dict[str, Any]) -> None:
        """Note which data are read from a start on."""
        spans = self.audit.data
        self.span = self.entries[-1].span if self.entries else 0
        if said.get("new_data") or not spans:
            self.span = len(spans)
            path, size = said.get("data_path") or [], int(said["samples_per_epoch"])
            spans.append(DataSpan(list(path), str(said["dataset"]), size))
        for key in ("samples_per_epoch", "dataset"):
            before = getattr(spans[self.span], key)
            if said[key] != before:
                self.problems.append(f"line {line}: {key} is {said[key]}, before it was {before}")

    def rollback(self, line: int, said: dict[str, Any]) -> None:
        """Take note of a rollback, which undoes the steps after its checkpoint."""
        to_step, (first, end) = int(said["to_step"]), said["left_out"]
        self._undo(lambda e: e.step is not None and e.step > to_step)
        self._place(f"line {line}, a rollback to step {to_step},", first)
        self.entries.append(_Entry(first, end, None, span=self.span))

    def step(self, line: int, said: dict[str, Any]) -> None:
        """Take note of a step that was done."""
        step, first, count = int(said["step"]), int(said["first"]), int(said["count"])
        if self.audit.starts:
            self.audit.starts[-1].steps += 1
        if step <= self.last_step:
            self.problems.append(f"step {step}: a second time in line {line}")
            return
        for lost in range(self.last_step + 1, step):
            self.problems.append(f"step {lost}: missing before line {line}")
        self._place(f"step {step} (line {line})", first)
        entry = _Entry(first, first + count, step, str(said["content"]), bool(said["applied"]))
        entry.start, entry.span = len(self.audit.starts) - 1, self.span
        if "order" in said:
            entry.order = _order(said["order"], count)
            if entry.order is None:
                text = f"step {step}: its order does not name each of its {count} samples once"
                self.problems.append(text)
        self.entries.append(entry)

    def _place(self, what: str, first: int) -> None:
        if first != self.end:
            how = (
                f"{first - self.end} are lost"
                if first > self.end
                else f"{self.end - first} come twice"
            )
            self.problems.append(f"{what} begins at sample {first}, {self.end} is next: {how}")
            if not self.entries or self.entries[-1].end != first:
                self.entries.append(_Entry(first, first, -1, span=self.span))

    def _undo(self, is_undone: Callable[[_Entry], bool]) -> None:
        """Remove the last entries for which ``is_undone`` holds."""
        while self.entries and is_undone(self.entries[-1]):
            self.audit.undone += self.entries.pop().is_step

    def steps(self) -> list[_Entry]:
        """Return the steps that count."""
        return [e for e in self.entries if e.is_step]


def _order(said: Any, count: int) -> np.ndarray | None:
    """Return the order in which a step read its samples; None: not each of them once."""
    try:
        order = np.asarray(said, np.int64).ravel()
    except (ValueError, TypeError, OverflowError):
        return None
    return order if np.array_equal(np.sort(order), np.arange(count)) else None


def audit(
    output: str | Path,
    recipe: Any,
    *,
    contents: bool = True,
    progress: Progress | None = None,
) -> Audit:
    """Audit a run.

    Args:
        recipe: The loaded recipe, of any of its layouts.
        contents: Read the samples, too, and compare their checksums; False: compare positions only.
        progress: Called with steps checked and in all.

    Raises:
        BadInputError: There is no log, or the data are not there.
    """
    output = Path(output)
    found = Audit(str(output), "")
    timeline = _Timeline(found)
    for line, said in _lines(output / FILE, found):
        if said["event"] != "start" and not found.starts:
            found.problems.append(f"line {line}: a {said['event']} before the first start")
        getattr(timeline, said["event"])(line, said)
    steps = timeline.steps()
    dataset = open_recipe(recipe)
    _describe(found, timeline, steps, _samples_per_epoch(recipe, dataset))
    known = dataset.fingerprint()
    there = [span for span in found.data if span.dataset == known]
    for span in there:
        if span.samples_per_epoch != found.samples_per_epoch:
            found.problems.append(
                f"an epoch had {span.samples_per_epoch} samples, the recipe and its data give {found.samples_per_epoch}"
            )
    if found.data and not there:
        found.problems.append(
            "the data are not those of the run (fingerprints differ): files, seed, sizes or masks"
        )
    for number, span in enumerate(found.data):
        span.read_again = contents and span in there
        entries = [e for e in timeline.entries if e.span == number]
        _each_once(found, entries, span.samples_per_epoch)
    _check_index(found, dataset)
    _compare_checkpoints(found, timeline, output)
    _compare_metrics(found, steps, output)
    found.covers = "places of all steps in the data; that every sample of an epoch comes once; checkpoints; metrics"
    if contents and there:
        again = [e for e in steps if found.data[e.span].read_again]
        _compare_contents(found, again, dataset, progress)
        whole = len(again) == len(steps)
        found.covers += (
            f"; the token ids of {'every step' if whole else f'{len(again)} steps'}, read again"
        )
        if not whole:
            found.covers += (
                f". Those of {len(steps) - len(again)} steps are of other data and not judged: --recipe takes the "
                "recipe of these"
            )
    return found


def _lines(path: Path, found: Audit) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, line); a torn one must be followed by a start."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadInputError(
            f"{path}: {error.strerror}; `telechat-moe train` writes it. For a run of MindFormers, audit the plan of "
            "its recipe: telechat-moe data audit --plan RECIPE"
        ) from error
    torn = 0
    for number, text in enumerate(raw.splitlines(), 1):
        try:
            said = json.loads(text)
            known = said["event"] in ("start", "step", "rollback")
        except (ValueError, TypeError, KeyError):
            said, known = {}, False
        if torn and said.get("event") != "start":
            found.problems.append(f"line {torn}: cannot be read")
        torn = 0 if known else number
        if known:
            yield number, said
    if torn and raw.endswith(b"\n"):
        found.problems.append(f"line {torn}: cannot be read")


def _samples_per_epoch(recipe: Any, dataset: Dataset) -> int:
    """Return the samples of a pass: whole global batches, and no more than the recipe asks for."""
    runner = recipe.runner_config
    wanted = recipe.epoch_samples
    rows = runner.batch_size * (recipe.parallel_config.data_parallel if recipe.use_parallel else 1)
    return min(wanted, len(dataset)) // rows * rows


def _describe(
    found: Audit, timeline: _Timeline, steps: list[_Entry], samples_per_epoch: int
) -> None:
    found.steps = len(steps)
    found.samples = sum(e.end - e.first for e in steps)
    found.skipped = sum(not e.applied for e in steps)
    found.samples_per_epoch = samples_per_epoch
    found.epochs = timeline.end / samples_per_epoch if samples_per_epoch else 0.0
    found.rollbacks = [{"left_out": [e.first, e.end]} for e in timeline.entries if e.step is None]
    for entry in steps:
        if 0 <= entry.start < len(found.starts):
            found.starts[entry.start].kept += 1
            span = found.data[entry.span]
            span.first_step, span.last_step = span.first_step or entry.step or 0, entry.step or 0


def _each_once(found: Audit, entries: list[_Entry], size: int) -> None:
    """Count how often each sample of each epoch was seen or left out by a rollback."""
    if not size or not entries:
        return
    epochs = -(-max(e.end for e in entries) // size)
    for epoch in range(epochs):
        count = np.zeros(size, np.int32)
        for e in entries:
            begin, end = max(e.first, epoch * size), min(e.end, (epoch + 1) * size)
            if begin < end:
                count[begin - epoch * size : end - epoch * size] += 1
        reached = min(entries[-1].end - epoch * size, size)
        for name, bad in (("never", count[: max(0, reached)] == 0), ("more than once", count > 1)):
            if bad.any():
                example = int(np.flatnonzero(bad)[0])
                found.problems.append(
                    f"epoch {epoch + 1}: {int(bad.sum())} sample(s) came {name}, for example sample {example}"
                )


def _compare_contents(
    found: Audit, steps: list[_Entry], dataset: Dataset, progress: Progress | None
) -> None:
    size = found.samples_per_epoch
    for number, entry in enumerate(steps, 1):
        order = np.arange(entry.end - entry.first) if entry.order is None else entry.order
        places = (entry.first + order) % size
        if content([dataset.batch(places)["input_ids"]]) != entry.content:
            found.problems.append(
                f"step {entry.step}: its token ids are not those of samples {entry.first} to {entry.end - 1}"
            )
        if progress is not None:
            progress(number, len(steps))


def _compare_checkpoints(found: Audit, timeline: _Timeline, output: Path) -> None:
    """Check that every checkpoint continues at the sample at which its step ended, according to the log."""
    after: dict[int, int] = {}
    step = 0
    for entry in timeline.entries:
        step = (entry.step or 0) if entry.is_step else step
        after[step] = entry.end
    for path in sorted((output / "checkpoints").glob("step-*/checkpoint.json")):
        try:
            given = json.loads(path.read_bytes())
            step, sample = int(given["step"]), int(given["state"]["data"]["next_sample"])
            known = given["state"].get("rollbacks", [])
        except (OSError, ValueError, KeyError, TypeError):
            found.problems.append(f"{path}: cannot be read")
            continue
        if step and step not in after:
            found.problems.append(
                f"step {step}: there is a checkpoint, but the log has no such step"
            )
        elif len(known) > len(found.rollbacks) and known[-1]["to_step"] == step:
            continue  # killed after going back and before saying so; a resume will say it
        elif step and after[step] != sample:
            found.problems.append(
                f"step {step}: its checkpoint continues at sample {sample}, the log at {after[step]}"
            )


def _compare_metrics(found: Audit, steps: list[_Entry], output: Path) -> None:
    """Check that metrics.jsonl has the same steps, and marks the same ones as skipped."""
    path = output / "metrics.jsonl"
    if not path.exists():
        return
    there: dict[int, bool] = {}
    for line in path.read_bytes().splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if said.get("event") == "step":
            there[int(said["step"])] = bool(said.get("skipped"))
    here = {e.step: not e.applied for e in steps if e.step is not None}
    for step in sorted(here.keys() | there.keys()):
        if step not in here:
            found.problems.append(f"step {step}: in metrics.jsonl, but not in {FILE}")
        elif step in there and there[step] != here[step]:
            found.problems.append(
                f"step {step}: skipped in one of metrics.jsonl and {FILE}, applied in the other"
            )


def audit_plan(recipe: Any) -> Audit:
    """Audit what a recipe plans: its steps use every sample of each epoch once, over all data-parallel ranks together.

    Raises:
        BadInputError: The data are not there.
    """
    dataset = open_recipe(recipe)
    found = Audit(
        str(recipe.source),
        "the plan only: which samples the recipe and its data give to each step and rank. What the processes read was "
        "not recorded, and is not judged",
    )
    batch_at, size = recipe.batch_at, _samples_per_epoch(recipe, dataset)
    found.steps, found.samples, found.samples_per_epoch = (
        recipe.train_steps,
        sum(batch_at(step) for step in range(recipe.train_steps)),
        size,
    )
    found.epochs = found.samples / size if size else 0.0
    if found.samples > size * recipe.runner_config.epochs:
        found.problems.append(
            f"{found.samples} samples are planned, the data give {size} in each of {recipe.runner_config.epochs} epoch(s)"
        )
    _check_index(found, dataset)
    return found


def _check_index(found: Audit, dataset: Any) -> None:
    """Check that different samples are different tokens: the index files list none twice, and none overlap."""
    parts = getattr(dataset, "datasets", [dataset])
    chosen = getattr(dataset, "chosen", np.zeros(len(dataset), np.int64))
    within = getattr(dataset, "within", np.arange(len(dataset)))
    for number, part in enumerate(parts):
        if isinstance(part, ConversationDataset):
            found.problems += part.index_problems()
            continue
        used = part.indices.shuffle[within[chosen == number]]
        twice = len(used) - len(np.unique(used))
        row = np.concatenate(
            [[0], np.cumsum(part.source.sequence_lengths[part.indices.documents], dtype=np.int64)]
        )
        places = row[part.indices.samples[:, 0]] + part.indices.samples[:, 1]
        uneven = int((np.diff(places)[:-1] != part.seq_length).sum())
        for count, what in (
            (twice, "sample(s) are listed twice"),
            (uneven, "cut(s) are not seq_length tokens apart"),
        ):
            if count:
                found.problems.append(f"{part.source.prefix}: {count} {what} in its index")
