"""Prove which samples each step of a run saw: none lost, none twice, across resumes, rollbacks and layouts.

The log of a run (:mod:`telechat_moe.data.sample_log`) is folded into the steps that count, without those that a
resume or a rollback undid (:mod:`telechat_moe.data.timeline`). Then the plan is recomputed from the recipe and the index
files, without the loader: a step gets the next samples, whatever its batch; the sample at place g of all epochs is number
``g mod samples_per_epoch``. None comes after the recipe's epochs, and a run that is finished leaves none that would fill a
step. Every step's
position in the plan and the checksum of its tokens are compared with it. Where samples were dealt to ranks, the order of
each step must name all of its samples once, and the checksum is that of the tokens in that order. Where several sources
are mixed, every process must have had the schedule that the recipe has now, as far as its steps went.

:func:`audit_plan` is for runs that leave no such log (MindFormers): it proves the plan alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.data.blend import Blend, Samples
from telechat_moe.data.dataset import Dataset
from telechat_moe.data.document_packing import WholeDataset
from telechat_moe.data.epochs import Epochs
from telechat_moe.data.mixture import MixedDataset, Passes
from telechat_moe.data.recipe import open_recipe
from telechat_moe.data.sample_log import FILE, content
from telechat_moe.data.timeline import (
    Audit,
    DataSpan,
    LoggedStart,
    StepTimeline,
    TimelineEntry,
    read_lines,
)
from telechat_moe.files import Progress
from telechat_moe.narrowing import is_object
from telechat_moe.reading import MALFORMED, parse_json


def audit(
    output: str | Path, recipe: Any, *, contents: bool = True, progress: Progress | None = None
) -> Audit:
    """Audit a run.

    Args:
        contents: Read the samples, too, and compare their checksums; False: compare positions only.

    Raises:
        BadInputError: There is no log, or the data are not there.
    """
    output = Path(output)
    report = Audit(str(output), "")
    dataset = open_recipe(recipe)
    size = min(recipe.epoch_samples, len(dataset))
    timeline = StepTimeline(report, {dataset.fingerprint(): size})
    for line, event in read_lines(output / FILE, report):
        if event["event"] != "start" and not report.starts:
            report.problems.append(f"line {line}: a {event['event']} before the first start")
        try:
            getattr(timeline, event["event"])(line, event)
        except MALFORMED:
            report.problems.append(f"line {line}: cannot be read")
    steps = timeline.steps()
    _describe(report, timeline, steps, size)
    spans = _spans_of(report, steps, dataset)
    judged_steps = [e for e in steps if report.data[e.span] in spans]
    for number, span in enumerate(report.data):
        span.read_again = contents and span in spans
        entries = [e for e in timeline.entries if e.span == number]
        _each_once(report, entries, span.samples_per_epoch)
    if spans and report.data[timeline.span] in spans:
        _compare_end(report, timeline, recipe, output)
    _check_index(report, dataset)
    if isinstance(dataset, MixedDataset):
        _compare_schedules(report, judged_steps, dataset)
        _count_segments(report, dataset, judged_steps)
    _compare_checkpoints(report, timeline, output)
    _compare_metrics(report, steps, output)
    report.covers = "places of all steps in the data; that every sample of an epoch comes once; checkpoints; metrics"
    if isinstance(dataset, Blend) and spans:
        _compare_sources(report, judged_steps, dataset)
        report.covers += "; samples of each source"
    if contents and spans:
        _compare_contents(report, judged_steps, dataset, progress)
        complete = len(judged_steps) == len(steps)
        which = "every step" if complete else f"{len(judged_steps)} steps"
        report.covers += f"; the token ids of {which}, read again"
        if not complete:
            report.covers += (
                f". Those of {len(steps) - len(judged_steps)} steps are of other data and not judged: --recipe takes the "
                "recipe of these"
            )
    return report


def _describe(
    report: Audit, timeline: StepTimeline, steps: list[TimelineEntry], samples_per_epoch: int
) -> None:
    report.steps = len(steps)
    report.samples = sum(e.count for e in steps)
    report.unread = sum(end - first for e in steps for first, end in e.unread())
    report.skipped = sum(not e.applied for e in steps)
    report.samples_per_epoch = samples_per_epoch
    report.epochs = timeline.end / samples_per_epoch if samples_per_epoch else 0.0
    report.rollbacks = [{"left_out": [e.first, e.end]} for e in timeline.entries if e.step is None]
    for entry in steps:
        if 0 <= entry.start < len(report.starts):
            report.starts[entry.start].kept += 1
            span = report.data[entry.span]
            span.first_step, span.last_step = span.first_step or entry.step or 0, entry.step or 0


def _each_once(report: Audit, entries: list[TimelineEntry], size: int) -> None:
    """Count how often each sample of each epoch was seen or left out by a rollback."""
    if not size or not entries:
        return
    parts = [p for e in entries for p in ([*e.parts, *e.unread()] or [(e.first, e.end)])]
    epochs = -(-max(e.end for e in entries) // size)
    for epoch in range(epochs):
        count = np.zeros(size, np.int32)
        for first, last in parts:
            begin, end = max(first, epoch * size), min(last, (epoch + 1) * size)
            if begin < end:
                count[begin - epoch * size : end - epoch * size] += 1
        reached = min(entries[-1].end - epoch * size, size)
        for name, bad in (("never", count[: max(0, reached)] == 0), ("more than once", count > 1)):
            if bad.any():
                example = int(np.flatnonzero(bad)[0])
                report.problems.append(
                    f"epoch {epoch + 1}: {int(bad.sum())} sample(s) came {name}, for example sample {example}"
                )


def _spans_of(report: Audit, steps: list[TimelineEntry], dataset: Dataset) -> list[DataSpan]:
    """Return the spans whose data are those of the recipe; of several mixtures the first steps tell."""
    spans = [span for span in report.data if span.dataset == dataset.fingerprint()]
    if report.data and not spans:
        report.problems.append(
            "the data are not those of the run (fingerprints differ): files, seed, sizes or masks"
        )
    if not isinstance(dataset, MixedDataset) or len(report.data) == 1:
        return spans
    first = {e.span: e for e in reversed(steps)}
    return [
        report.data[number]
        for number, entry in first.items()
        if report.data[number] in spans
        and _logged(report.starts[entry.start], 1) == dataset.past(1)
    ]


def _compare_end(report: Audit, timeline: StepTimeline, recipe: Any, output: Path) -> None:
    """Check that no sample comes after the epochs of the recipe, and none is missing in a run that is finished."""
    span, place = report.data[timeline.span], timeline.end
    if span.earlier_samples is None:
        return
    end = recipe.runner_config.epochs * span.samples_per_epoch - span.earlier_samples
    if place > end:
        report.problems.append(
            f"{place - end} sample(s) come after the {recipe.runner_config.epochs} epoch(s) of the recipe, which end at "
            f"sample {end}"
        )
        return
    epochs = Epochs(span.samples_per_epoch, recipe.batches.unit, end)
    entries = (e for e in timeline.entries if e.step is not None)
    consumed = sum(e.count if e.is_step else e.end - e.first for e in entries)
    if not recipe.batches.steps(epochs.samples_left(place), consumed):
        report.unread += end - place
        return
    report.to_come = end - place
    try:
        summary = parse_json((output / "summary.json").read_bytes())
        finished = summary["finished"] and summary["steps"] == timeline.last_step
    except (OSError, ValueError, KeyError, TypeError):
        finished = False
    if finished and report.starts[-1].steps:
        report.problems.append(
            f"the run is finished, but {end - place} sample(s) came never, from sample {place} on"
        )


def _logged(start: LoggedStart, sample: int) -> list[Any]:
    """Return the mixture that the log gives a process before a sample; see ``MixedDataset.past``."""
    return [segment for segment in start.mixture or [] if segment[0] < sample]


def _compare_schedules(report: Audit, steps: list[TimelineEntry], dataset: MixedDataset) -> None:
    ends = {e.start: e.end for e in steps}
    for number, end in ends.items():
        start = report.starts[number]
        if _logged(start, end) != dataset.past(end):
            report.problems.append(
                f"line {start.line}: the mixture of its steps is not the recipe's up to sample {end}, where they end"
            )


def _count_segments(
    report: Audit, dataset: MixedDataset, steps: list[TimelineEntry] | None
) -> None:
    """Count the samples of each segment and source, planned and seen, and check that each source goes on without a gap.

    ``steps`` None: the plan alone.
    """
    for number, source in enumerate(dataset.datasets):
        within = dataset.samples_of(number)
        if not np.array_equal(within, np.arange(len(within))):
            text = f"{source.source.prefix}: its samples are not 0, 1, 2, ... in the mixture"
            report.problems.append(text)
    read = np.zeros(len(dataset), bool)
    for entry in steps or ():
        read[entry.places() % len(dataset)] = True
    reached = len(dataset) if steps is None else steps[-1].end if steps else 0
    for start, end, weights in dataset.segments():
        if start >= reached:
            break
        planned, chosen = dataset.counts(np.arange(start, end)), dataset.chosen[start:end]
        counts: list[Any] = np.bincount(chosen[read[start:end]], minlength=len(weights)).tolist()
        counts = [None] * len(counts) if steps is None else counts
        names = [source.source.prefix for source in dataset.datasets]
        keys = ("prefix", "weight", "planned", "seen")
        rows = [dict(zip(keys, row)) for row in zip(names, weights, planned, counts)]  # noqa: B905
        report.mixture.append({"from_sample": start, "to_sample": end, "sources": rows})


def _compare_sources(report: Audit, steps: list[TimelineEntry], dataset: Blend[Any]) -> None:
    for entry in steps:
        if entry.sources is None:
            continue
        planned = dataset.counts(entry.places() % report.samples_per_epoch)
        logged = [*entry.sources, *[0] * (len(planned) - len(entry.sources))]
        if logged != planned:
            report.problems.append(
                f"step {entry.step}: the log says {logged} samples of the sources, the plan gives {planned}"
            )


def _compare_contents(
    report: Audit, steps: list[TimelineEntry], dataset: Dataset, progress: Progress | None
) -> None:
    size = report.samples_per_epoch
    for number, entry in enumerate(steps, 1):
        places = entry.places() % size
        if entry.order is not None:
            places = places[entry.order]
        if content([dataset.batch(places)["input_ids"]]) != entry.content:
            report.problems.append(
                f"step {entry.step}: its token ids are not those of samples {entry.first} to {entry.end - 1}"
            )
        if progress is not None:
            progress("reading samples", number, len(steps))


def _compare_checkpoints(report: Audit, timeline: StepTimeline, output: Path) -> None:
    """Check that every checkpoint continues at the sample at which its step ended, according to the log."""
    after: dict[int, int] = {}
    step = 0
    for entry in timeline.entries:
        step = (entry.step or 0) if entry.is_step else step
        after[step] = entry.end
    for path in sorted((output / "checkpoints").glob("step-*/checkpoint.json")):
        try:
            checkpoint = parse_json(path.read_bytes())
            step, data = int(checkpoint["step"]), checkpoint["state"]["data"]
            sample = timeline.epochs.place_of(data["next_sample"], data["samples_per_epoch"])
            rollbacks = [r["to_step"] for r in checkpoint["state"].get("rollbacks", [])]
        except (OSError, *MALFORMED):
            report.problems.append(f"{path}: cannot be read")
            continue
        if step and step not in after:
            problem = f"step {step}: there is a checkpoint, but the log has no such step"
            report.problems.append(problem)
        elif len(rollbacks) > len(report.rollbacks) and rollbacks[-1] == step:
            continue  # killed after going back and before saying so; a resume will say it
        elif step and after[step] != sample:
            report.problems.append(
                f"step {step}: its checkpoint continues at sample {sample}, the log at {after[step]}"
            )


def _compare_metrics(report: Audit, steps: list[TimelineEntry], output: Path) -> None:
    """Check that metrics.jsonl has the same steps, and marks the same ones as skipped."""
    path = output / "metrics.jsonl"
    if not path.exists():
        return
    recorded: dict[int, bool] = {}
    for line in path.read_bytes().splitlines():
        try:
            record = parse_json(line)
        except ValueError:
            continue
        step = record.get("step") if is_object(record) and record.get("event") == "step" else None
        if isinstance(step, int):
            recorded[step] = bool(record.get("skipped"))
    logged = {e.step: not e.applied for e in steps if e.step is not None}
    for step in sorted(logged.keys() | recorded.keys()):
        if step not in logged:
            report.problems.append(f"step {step}: in metrics.jsonl, but not in {FILE}")
        elif step in recorded and recorded[step] != logged[step]:
            report.problems.append(
                f"step {step}: skipped in one of metrics.jsonl and {FILE}, applied in the other"
            )


def audit_plan(recipe: Any) -> Audit:
    """Audit what a recipe plans: its steps use every sample of each epoch once, over all data-parallel ranks together.

    Raises:
        BadInputError: The data are not there.
    """
    dataset = open_recipe(recipe)
    report = Audit(
        str(recipe.source),
        "the plan only: which samples the recipe and its data give to each step and rank. What the processes read was "
        "not recorded, and is not judged",
    )
    size, epochs = min(recipe.epoch_samples, len(dataset)), recipe.runner_config.epochs
    report.steps, report.samples_per_epoch = recipe.train_steps, size
    report.samples = recipe.batches.consumed(report.steps)
    report.epochs, report.unread = report.samples / size, max(0, size * epochs - report.samples)
    if report.samples > size * epochs:
        report.problems.append(
            f"{report.samples} samples are planned, the data give {size} in each of {epochs} epoch(s)"
        )
    _check_index(report, dataset)
    if isinstance(dataset, MixedDataset):
        _count_segments(report, dataset, None)
    return report


def _parts(dataset: Any) -> Iterator[tuple[Samples, np.ndarray]]:
    """Yield the datasets with indices of which a dataset consists, and their samples that are used."""
    if not isinstance(dataset, Blend):
        yield dataset, np.arange(len(dataset))
        return
    for number, part in enumerate(dataset.datasets):
        within = dataset.samples_of(number)
        if isinstance(part, Passes):
            yield from ((one_pass, samples) for one_pass, _, samples in part.by_part(within))
        else:
            yield part, within


def _check_index(report: Audit, dataset: Any) -> None:
    """Check that different samples are different tokens: the index files list none twice, and none overlap."""
    for part, within in _parts(dataset):
        if isinstance(part, WholeDataset):
            report.problems += part.index_problems()
            continue
        used = part.indices.shuffle[within]
        twice = len(used) - len(np.unique(used))
        row = np.concatenate(
            [[0], np.cumsum(part.source.sequence_lengths[part.indices.documents], dtype=np.int64)]
        )
        places = row[part.indices.samples[:, 0]] + part.indices.samples[:, 1]
        uneven = int((np.diff(places)[:-1] != part.seq_length).sum())
        for count, fault in (
            (twice, "sample(s) are listed twice"),
            (uneven, "cut(s) are not seq_length tokens apart"),
        ):
            if count:
                report.problems.append(f"{part.source.prefix}: {count} {fault} in its index")
