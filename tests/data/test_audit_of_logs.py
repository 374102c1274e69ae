"""The audit of logs that are written here: those of older versions, and of runs that read samples twice or never."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mini_recipe as mini
import numpy as np
import pytest

from telechat_moe.data.audit import Audit, audit
from telechat_moe.data.recipe import open_recipe
from telechat_moe.data.sample_log import content
from telechat_moe.recipe import Recipe, load

Start = dict[str, Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mini.write_data(tmp_path_factory.mktemp("data"))


def recipe(data: Path, output: Path, size: int, batch: int, epochs: int = 1, **more: Any) -> Recipe:
    words = mini.arguments(
        data,
        output,
        runner_config__batch_size=batch,
        model__model_config__batch_size=batch,
        runner_config__epochs=epochs,
        train_dataset__data_loader__sizes=f"[{size},0,0]",
        **more,
    )
    return load(words[1], words[4::2])


def audited(r: Recipe, parts: Sequence[tuple[Start, Sequence[tuple[int, Sequence[int]]]]]) -> Audit:
    """Audit a log: of each process its start, and the first place and the samples of each of its steps."""
    dataset, output, step = open_recipe(r), Path(r.output_dir), 0
    output.mkdir(exist_ok=True)
    lines: list[dict[str, Any]] = []
    for start, steps in parts:
        given = {"dataset": dataset.fingerprint(), "layout": "one device", "rollbacks": []}
        step = start["step"]
        lines.append({"event": "start", **given, **start})
        for first, samples in steps:
            step += 1
            text = content([dataset.batch(np.array(samples))["input_ids"]])
            line = {"step": step, "first": first, "count": len(samples), "content": text}
            lines.append({"event": "step", **line, "applied": True})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (output / "samples.jsonl").write_text(text)
    return audit(output, r)


def old(step: int, place: int, size: int, batch: int) -> Start:
    """Return a start as versions wrote it whose epochs were whole steps."""
    return {
        "step": step,
        "next_sample": place,
        "samples_per_epoch": size // batch * batch,
        "global_batch": batch,
    }


def steps(begin: int, end: int, batch: int, size: int) -> list[tuple[int, list[int]]]:
    """Return steps over places, sample for sample."""
    return [(at, [n % size for n in range(at, at + batch)]) for at in range(begin, end, batch)]


def finished(r: Recipe, step: int) -> None:
    Path(r.output_dir).mkdir(exist_ok=True)
    (Path(r.output_dir) / "summary.json").write_text(json.dumps({"finished": True, "steps": step}))


def test_samples_read_again_after_the_epochs(data: Path, tmp_path: Path) -> None:
    """A finished run of 40 samples that was resumed with another batch."""
    parts = [
        (old(0, 0, 40, 2), steps(0, 40, 2, 40)),
        (old(20, 40, 40, 1), steps(40, 60, 1, 40)),
    ]
    found = audited(recipe(data, tmp_path / "run", 40, 1), parts)
    (problem,) = found.problems
    assert "20 sample(s) come after the 1 epoch(s) of the recipe, which end at sample 40" in problem


def test_samples_never_read(data: Path, tmp_path: Path) -> None:
    """A run that was finished by its steps, with 30 of 80 samples unread; before, they are to come."""
    r = recipe(data, tmp_path / "run", 80, 4)
    parts = [
        (old(0, 0, 80, 2), steps(0, 30, 2, 80)),
        (old(15, 30, 80, 4), steps(30, 50, 4, 80)),
    ]
    found = audited(r, parts)
    assert (found.problems, found.to_come, found.unread) == ([], 30, 0)
    finished(r, 20)
    (problem,) = audited(r, parts).problems
    assert "30 sample(s) came never, from sample 50 on" in problem
    finished(r, 15)  # of the time before
    assert audited(r, parts).problems == []


@pytest.mark.parametrize("lost", [False, True])
def test_epochs_that_were_counted_in_whole_steps(data: Path, tmp_path: Path, lost: bool) -> None:
    """Of 41 samples 39 are read in steps of three, and the next epoch begins at place 39; now it begins at 41."""
    r = recipe(data, tmp_path / "run", 41, 3, epochs=3)
    first = steps(0, 78, 3, 39)
    new = old(26, 39 + 41, 41, 3) | {"samples_per_epoch": 41, "unit": 3, "earlier_samples": 0}
    second = steps(82, 121 - 3 * lost, 3, 41)
    finished(r, 39 - lost)
    parts = [(old(0, 0, 41, 3), first[:20]), (old(20, 60, 41, 3), first[20:]), (new, second)]
    found = audited(r, parts)
    assert found.unread == (4 if lost else 6)
    assert len(found.problems) == lost
    assert found.samples == 117 - 3 * lost


def test_a_smaller_batch_reads_what_did_not_fill_a_step(data: Path, tmp_path: Path) -> None:
    new = {"samples_per_epoch": 40, "unit": 1, "earlier_samples": 0}
    parts = [
        (old(0, 0, 40, 3), steps(0, 39, 3, 40)),
        (old(13, 39, 40, 1) | new, steps(39, 40, 1, 40)),
    ]
    r = recipe(data, tmp_path / "run", 40, 1)
    finished(r, 14)
    found = audited(r, parts)
    assert (found.problems, found.samples, found.unread) == ([], 40, 0)
    # The same samples once more, or none between, are found.
    for begin, said in ((38, "1 come twice"), (40, "1 are lost")):
        again = old(13, begin, 40, 1) | new
        found = audited(r, [parts[0], (again, steps(begin, begin + 1, 1, 40))])
        assert any(said in problem for problem in found.problems)


@pytest.mark.parametrize("unit", [None, 2])
def test_a_growing_batch_over_the_end_of_an_epoch(
    data: Path, tmp_path: Path, unit: int | None
) -> None:
    """Steps of two micro-batches of two: 9 samples give four of them, and a step may be of two epochs."""
    more = {
        "runner_config__gradient_accumulation_steps": 2,
        "callbacks__1__gradient_accumulation_steps": 2,
        "telechat_moe__step_batch_size_schedule": "'0:2 32:4'",
    }
    r = recipe(data, tmp_path / "run", 9, 2, epochs=2, **more)
    places = [[0, 1], [2, 3, 4, 5], [6, 7, 0, 1], [2, 3, 4, 5]]
    start = old(0, 0, 9, 4) | {"samples_per_epoch": 8 if unit is None else 9}
    firsts = [0, 2, 6, 10 if unit is None else 11]
    if unit is not None:
        start |= {"unit": unit, "earlier_samples": 0}
    finished(r, 4)
    found = audited(r, [(start, list(zip(firsts, places, strict=True)))])
    assert (found.problems, found.samples) == ([], 14)
    assert found.unread == 1 + 3


def test_an_epoch_of_another_length(data: Path, tmp_path: Path) -> None:
    start = old(0, 0, 40, 2) | {"samples_per_epoch": 36}
    found = audited(recipe(data, tmp_path / "run", 40, 2), [(start, steps(0, 4, 2, 40))])
    assert "an epoch had 36 samples, the recipe and its data give 40" in found.problems[0]
