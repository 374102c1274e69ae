"""samples.jsonl folded into the steps that count, without those that a resume or a rollback undid."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.data.epochs import Epochs
from telechat_moe.errors import BadInputError
from telechat_moe.reading import parse_json

_MANY = 100


@dataclass
class LoggedStart:
    """A process of the run, from its line ``start`` on.

    Attributes:
        step: Last step done before.
        layout: How the model was split.
        kept: Those of these steps that no resume and no rollback undid.
        mixture: The schedule of `telechat_moe.mixture`, as the log has it; None: no mixture.
    """

    line: int
    step: int
    layout: str
    steps: int = 0
    kept: int = 0
    mixture: list[Any] | None = None


@dataclass
class DataSpan:
    """Steps in a row that read the same data from its first sample, or from where another run stopped.

    Attributes:
        data_path: As in the recipe; empty: the log does not say.
        dataset: Fingerprint.
        earlier_samples: Samples of other data that count as read; None: the log does not say.
        first_step, last_step: Of the steps that count; 0: none.
        read_again: Their token ids were compared.
    """

    data_path: list[str]
    dataset: str
    samples_per_epoch: int
    earlier_samples: int | None = 0
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
        unread: Samples at the ends of epochs that do not fill a step.
        to_come: Samples that the run has not reached yet.
        undone: Steps that were done and undone.
        skipped: Steps that count whose update was left out.
        starts: Every process.
        data: Which data were read, more than one if the run went on with new data (`telechat_moe.resume_data`).
        rollbacks: The rollbacks that were not undone later, as logged.
        mixture: Of each segment of a mixture that was reached ``from_sample``, ``to_sample`` and ``sources``: of each
            ``prefix``, ``weight``, samples ``planned`` and samples ``seen`` (None: of a plan).
        problems: What is wrong, a line each.
    """

    source: str
    covers: str
    steps: int = 0
    samples: int = 0
    epochs: float = 0.0
    samples_per_epoch: int = 0
    unread: int = 0
    to_come: int = 0
    undone: int = 0
    skipped: int = 0
    starts: list[LoggedStart] = field(default_factory=list[LoggedStart])
    data: list[DataSpan] = field(default_factory=list[DataSpan])
    rollbacks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    mixture: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    problems: list[str] = field(default_factory=list[str])


@dataclass
class TimelineEntry:
    """A step that counts, or samples that a rollback left out.

    Attributes:
        first, end: Places in the data (:mod:`telechat_moe.data.epochs`), of its first sample and after its last one.
        parts: Places of its samples, as (first, end) of the parts in one epoch.
        begin: Place after the step before, from which on samples were left that do not fill a step.
    """

    first: int
    end: int
    step: int | None
    parts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    begin: int = -1
    content: str = ""
    applied: bool = True
    start: int = 0
    span: int = 0
    order: np.ndarray | None = None
    sources: list[int] | None = None

    @property
    def count(self) -> int:
        """Samples of a step."""
        return sum(end - first for first, end in self.parts)

    def places(self) -> np.ndarray:
        """Return the places of the samples of a step."""
        return np.concatenate([np.arange(*part) for part in self.parts])

    def unread(self) -> list[tuple[int, int]]:
        """Return the places at the ends of epochs before and in a step that were not read."""
        ends = [self.begin, *(end for _, end in self.parts)]
        gaps = [(end, first) for end, (first, _) in zip(ends, self.parts, strict=False)]
        return [(end, first) for end, first in gaps if 0 <= end < first]

    @property
    def is_step(self) -> bool:
        """Whether it is a step; else a rollback, or a gap in the log."""
        return self.step is not None and self.step > 0


class StepTimeline:
    """The steps that count at a moment, and how they came about.

    Args:
        sizes: Samples of an epoch by the fingerprint of their data, as far as they are known.
    """

    def __init__(self, audit: Audit, sizes: Mapping[str, int]) -> None:
        self.audit, self.problems, self.sizes = audit, audit.problems, sizes
        self.logged = self.epochs = Epochs(1, 1)  # as a start says, and as they are
        self.entries: list[TimelineEntry] = []
        self.span = 0
        self.before = 0  # last step of the run that this one continues

    @property
    def end(self) -> int:
        """The sample that comes next, of the data that are being read."""
        last = self.entries[-1] if self.entries else None
        return last.end if last is not None and last.span == self.span else 0

    @property
    def last_step(self) -> int:
        """The last step that counts."""
        return next((e.step or 0 for e in reversed(self.entries) if e.is_step), self.before)

    def _rollbacks(self) -> int:
        return sum(e.step is None for e in self.entries)

    def start(self, line: int, event: dict[str, Any]) -> None:
        """Take note of a process that begins at a checkpoint, which undoes later steps."""
        step = int(event["step"])
        begun = LoggedStart(line, step, str(event["layout"]), mixture=event.get("mixture"))
        self.audit.starts.append(begun)
        rollbacks = list(event["rollbacks"])
        self._count_epochs(line, event)
        place = self._place_of(event["next_sample"])
        if event.get("continues") and not self.entries:
            self.before = step
            if not event.get("new_data"):
                self.entries.append(TimelineEntry(0, place, -1))
        count = len(rollbacks)
        self._undo(lambda e: self._rollbacks() > count if e.step is None else e.step > step)
        self._choose_span(line, event)
        # Killed between the checkpoint that a rollback writes and its line in the log.
        for rollback in rollbacks[self._rollbacks() :]:
            self.rollback(line, rollback)
        if self.last_step != step:
            self.problems.append(
                f"step {self.last_step + 1}: missing; line {line} continues after step {step}, the log ends at "
                f"step {self.last_step}"
            )
        self._place(f"line {line}, a start after step {step},", place)

    def _count_epochs(self, line: int, event: dict[str, Any]) -> None:
        """Note in which epochs a start counts; older versions counted those without what does not fill a step."""
        size, batch = max(1, int(event["samples_per_epoch"])), int(event.get("global_batch", 1))
        expected = self.sizes.get(event["dataset"], size)
        fits = size == expected if "unit" in event else 0 <= expected - size < batch
        if not fits and not event.get("mixture"):  # which may become longer or shorter
            text = f"an epoch had {size} samples, the recipe and its data give {expected}"
            self.problems.append(f"line {line}: {text}")
            expected = size
        self.logged = Epochs(size, int(event.get("unit", 1)))
        self.epochs = Epochs(max(expected, size), int(event.get("unit", batch)))

    def _place_of(self, logged: Any) -> int:
        return self.epochs.place_of(int(logged), self.logged.size)

    def _choose_span(self, line: int, event: dict[str, Any]) -> None:
        """Note which data are read from a start on."""
        spans = self.audit.data
        self.span = self.entries[-1].span if self.entries else 0
        if event.get("new_data") or not spans:
            self.span = len(spans)
            earlier = event.get("earlier_samples", None if event.get("new_data") else 0)
            path, size = event.get("data_path") or [], self.epochs.size
            spans.append(DataSpan(list(path), str(event["dataset"]), size, earlier))
        spans[self.span].samples_per_epoch = self.epochs.size
        if event["dataset"] != (before := spans[self.span].dataset):
            self.problems.append(
                f"line {line}: dataset is {event['dataset']}, before it was {before}"
            )

    def rollback(self, line: int, event: dict[str, Any]) -> None:
        """Take note of a rollback, which undoes the steps after its checkpoint."""
        to_step, (first, end) = int(event["to_step"]), map(self._place_of, event["left_out"])
        self._undo(lambda e: e.step is not None and e.step > to_step)
        self._place(f"line {line}, a rollback to step {to_step},", first)
        self.entries.append(TimelineEntry(first, end, None, span=self.span))

    def step(self, line: int, event: dict[str, Any]) -> None:
        """Take note of a step that was done."""
        step, first, count = int(event["step"]), int(event["first"]), int(event["count"])
        if self.audit.starts:
            self.audit.starts[-1].steps += 1
        if step <= self.last_step:
            self.problems.append(f"step {step}: a second time in line {line}")
            return
        lost = range(self.last_step + 1, step)
        names = (f"step {n}" for n in lost)
        if len(lost) > _MANY:
            names = [f"steps {lost[0]} to {lost[-1]}"]
        self.problems += [f"{name}: missing before line {line}" for name in names]
        longer = self.epochs.size - self.logged.size
        parts = [
            (a + epoch * longer, b + epoch * longer)
            for a, b in self.logged.ranges(first, count)
            for epoch in [a // self.logged.size]
        ]
        first = parts[0][0] if parts else first
        begin = self.end if first == self.epochs.begin(self.end) else first
        self._place(f"step {step} (line {line})", first)
        entry = TimelineEntry(first, parts[-1][1] if parts else first, step, parts, begin)
        entry.content, entry.applied = str(event["content"]), bool(event["applied"])
        entry.start, entry.span = len(self.audit.starts) - 1, self.span
        entry.sources = event.get("sources")
        if "order" in event:
            entry.order = _order(event["order"], count)
            if entry.order is None:
                text = f"step {step}: its order does not name each of its {count} samples once"
                self.problems.append(text)
        self.entries.append(entry)

    def _place(self, subject: str, first: int) -> None:
        if first not in (self.end, self.epochs.begin(self.end)):
            how = "are lost" if first > self.end else "come twice"
            text = f"begins at sample {first}, {self.end} is next: {abs(first - self.end)} {how}"
            self.problems.append(f"{subject} {text}")
            if not self.entries or self.entries[-1].end != first:
                self.entries.append(TimelineEntry(first, first, -1, span=self.span))

    def _undo(self, is_undone: Callable[[TimelineEntry], bool]) -> None:
        """Remove the last entries for which ``is_undone`` holds."""
        while self.entries and is_undone(self.entries[-1]):
            self.audit.undone += self.entries.pop().is_step

    def steps(self) -> list[TimelineEntry]:
        """Return the steps that count."""
        return [e for e in self.entries if e.is_step]


def _order(indices: Any, count: int) -> np.ndarray | None:
    """Return the order in which a step read its samples; None: not each of them once."""
    try:
        order = np.asarray(indices, np.int64).ravel()
    except (ValueError, TypeError, OverflowError):
        return None
    complete = len(order) == count and np.array_equal(np.sort(order), np.arange(count))
    return order if complete else None


def read_lines(path: Path, report: Audit) -> Iterator[tuple[int, dict[str, Any]]]:
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
            event = parse_json(text)
            is_event = event["event"] in ("start", "step", "rollback")
        except (ValueError, TypeError, KeyError):
            event, is_event = {}, False
        if torn and event.get("event") != "start":
            report.problems.append(f"line {torn}: cannot be read")
        torn = 0 if is_event else number
        if is_event:
            yield number, event
    if torn and raw.endswith(b"\n"):
        report.problems.append(f"line {torn}: cannot be read")
