"""samples.jsonl folded into the steps that count, without those that a resume or a rollback undid."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.reading import parse_json

_MANY = 100


@dataclass
class Start:
    """A process of the run, from its line ``start`` on.

    Attributes:
        line: Line of the log.
        step: Last step done before.
        layout: How the model was split.
        steps: Steps that it did.
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
    undone: int = 0
    skipped: int = 0
    starts: list[Start] = field(default_factory=list[Start])
    data: list[DataSpan] = field(default_factory=list[DataSpan])
    rollbacks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    mixture: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    problems: list[str] = field(default_factory=list[str])


@dataclass
class Entry:
    """A step that counts, or samples that a rollback left out."""

    first: int
    end: int
    step: int | None
    content: str = ""
    applied: bool = True
    start: int = 0
    span: int = 0
    order: np.ndarray | None = None
    sources: list[int] | None = None

    @property
    def is_step(self) -> bool:
        """Whether it is a step; else a rollback, or a gap in the log."""
        return self.step is not None and self.step > 0


class Timeline:
    """The steps that count at a moment, and how they came about."""

    def __init__(self, audit: Audit) -> None:
        self.audit, self.problems = audit, audit.problems
        self.entries: list[Entry] = []
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

    def start(self, line: int, said: dict[str, Any]) -> None:
        """Take note of a process that begins at a checkpoint, which undoes later steps."""
        begun = Start(line, int(said["step"]), str(said["layout"]), mixture=said.get("mixture"))
        self.audit.starts.append(begun)
        step, known = int(said["step"]), list(said["rollbacks"])
        if said.get("continues") and not self.entries:
            self.before = step
            if not said.get("new_data"):
                self.entries.append(Entry(0, int(said["next_sample"]), -1))
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
        if said.get("mixture"):  # a run may become longer or shorter
            spans[self.span].samples_per_epoch = int(said["samples_per_epoch"])
        for key in ("samples_per_epoch", "dataset"):
            before = getattr(spans[self.span], key)
            if said[key] != before:
                self.problems.append(f"line {line}: {key} is {said[key]}, before it was {before}")

    def rollback(self, line: int, said: dict[str, Any]) -> None:
        """Take note of a rollback, which undoes the steps after its checkpoint."""
        to_step, (first, end) = int(said["to_step"]), said["left_out"]
        self._undo(lambda e: e.step is not None and e.step > to_step)
        self._place(f"line {line}, a rollback to step {to_step},", first)
        self.entries.append(Entry(first, end, None, span=self.span))

    def step(self, line: int, said: dict[str, Any]) -> None:
        """Take note of a step that was done."""
        step, first, count = int(said["step"]), int(said["first"]), int(said["count"])
        if self.audit.starts:
            self.audit.starts[-1].steps += 1
        if step <= self.last_step:
            self.problems.append(f"step {step}: a second time in line {line}")
            return
        lost = range(self.last_step + 1, step)
        if len(lost) > _MANY:
            self.problems.append(f"steps {lost[0]} to {lost[-1]}: missing before line {line}")
        else:
            self.problems += [f"step {one}: missing before line {line}" for one in lost]
        self._place(f"step {step} (line {line})", first)
        entry = Entry(first, first + count, step, str(said["content"]), bool(said["applied"]))
        entry.start, entry.span = len(self.audit.starts) - 1, self.span
        entry.sources = said.get("sources")
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
                self.entries.append(Entry(first, first, -1, span=self.span))

    def _undo(self, is_undone: Callable[[Entry], bool]) -> None:
        """Remove the last entries for which ``is_undone`` holds."""
        while self.entries and is_undone(self.entries[-1]):
            self.audit.undone += self.entries.pop().is_step

    def steps(self) -> list[Entry]:
        """Return the steps that count."""
        return [e for e in self.entries if e.is_step]


def _order(said: Any, count: int) -> np.ndarray | None:
    """Return the order in which a step read its samples; None: not each of them once."""
    try:
        order = np.asarray(said, np.int64).ravel()
    except (ValueError, TypeError, OverflowError):
        return None
    whole = len(order) == count and np.array_equal(np.sort(order), np.arange(count))
    return order if whole else None


def read_lines(path: Path, found: Audit) -> Iterator[tuple[int, dict[str, Any]]]:
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
            said = parse_json(text)
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
