"""Runs on a schedule of weights: killed within a segment and gone on, with another future, and what the audit proves."""

import json
import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
from running import Hold, steps_in, until

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main

FIRST = "{from_sample: 0, weights: [3, 1]}"
SECOND = "{from_sample: 10, weights: [0, 1]}"  # within a step
SCHEDULE = f"[{FIRST}, {SECOND}, {{from_sample: 30, weights: [1, 1]}}]"
OTHER_FUTURE = f"[{FIRST}, {SECOND}, {{from_sample: 24, weights: [5, 1]}}]"
OTHER_PAST = (
    f"[{FIRST}, {{from_sample: 11, weights: [0, 1]}}, {{from_sample: 30, weights: [1, 1]}}]"
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Two sources, each with validation data."""
    root = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("web", "code")):
        (root / name).mkdir()
        mini.write_data(root / name, seed=seed)
    return root


def arguments(root: Path, output: Path, schedule: str, **changes: object) -> list[str]:
    given = {
        "train_dataset__data_loader__config__data_path": f"['{root}/web/train', '{root}/code/train']",
        "telechat_moe__mixture": schedule,
        "telechat_moe__evaluation__data_path": "null",
        "telechat_moe__evaluation__interval": 6,
        "callbacks__2__keep_checkpoint_max": 20,
    }
    return mini.arguments(root, output, **given | changes)


def records(output: Path, event: str) -> list[dict]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["event"] == event]


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in records(output, "step")]


def audited(output: Path, *flags: str) -> tuple[int, dict]:
    report = output.parent / "audit.json"
    code = main(["data", "audit", str(output), "--json", str(report), *flags])
    return code, json.loads(report.read_text())


@pytest.fixture(scope="module")
def done(tmp_path_factory, sources) -> Path:
    output = tmp_path_factory.mktemp("mixed") / "run"
    assert main(arguments(sources, output, SCHEDULE)) == 0
    return output


def test_every_source_is_evaluated(done, sources):
    """The loss of all is the mean of those of the sources, which have equally many samples here."""
    found = records(done, "evaluation")
    assert [record["step"] for record in found] == [0, 6, 12]
    for record in found:
        each = record["loss_by_source"]
        assert set(each) == {f"{sources}/web/valid", f"{sources}/code/valid"}
        sizes = [len((sources / name / "valid.bin").read_bytes()) for name in ("web", "code")]
        shares = [(size // 2 - 1) // 16 for size in sizes]
        mean = sum(s * x for s, x in zip(shares, each.values(), strict=True)) / sum(shares)
        assert record["loss"] == pytest.approx(mean, rel=1e-12)
        assert len(set(each.values())) == 2


def test_a_source_is_evaluated_as_if_alone(tmp_path, sources, done):
    output = tmp_path / "run"
    valid = {"telechat_moe__evaluation__data_path": f"['{sources}/code/valid']"}
    assert main(arguments(sources, output, SCHEDULE, **valid)) == 0
    together = [r["loss_by_source"][f"{sources}/code/valid"] for r in records(done, "evaluation")]
    assert [record["loss"] for record in records(output, "evaluation")] == together
    assert losses(output) == losses(done)


def test_the_audit_counts_by_segment(done, sources, capsys):
    code, found = audited(done)
    assert (code, found["problems"]) == (0, [])
    seen = [
        (s["from_sample"], s["to_sample"], [(x["planned"], x["seen"]) for x in s["sources"]])
        for s in found["mixture"]
    ]
    assert seen == [
        (0, 10, [(8, 8), (2, 2)]),
        (10, 30, [(0, 0), (20, 20)]),
        (30, 48, [(9, 9), (9, 9)]),
    ]
    out = capsys.readouterr().out
    assert f"{sources}/code/train" in out
    assert "samples of each source" in out


def test_another_future(tmp_path, done, sources, capsys):
    """From a checkpoint at sample 24 with other weights from there on, more samples, and the losses of a run that had them."""
    output, whole = tmp_path / "run", tmp_path / "whole"
    longer = {"train_dataset__data_loader__sizes": "[56,0,0]", "lr_schedule__total_steps": 14}
    assert main(arguments(sources, whole, OTHER_FUTURE, **longer)) == 0
    shutil.copytree(done, output)
    for path in checkpoint.list_checkpoints(output / "checkpoints"):
        if int(path.name.split("-")[1]) > 6:
            shutil.rmtree(path)
    capsys.readouterr()
    assert main([*arguments(sources, output, OTHER_PAST, **longer), "--resume"]) == 3
    said = capsys.readouterr().err
    assert "saw 24 samples of another mixture" in said
    assert steps_in(output / "samples.jsonl") == 12  # nothing was lost by that
    assert main([*arguments(sources, output, OTHER_FUTURE, **longer), "--resume"]) == 0
    assert losses(output)[6:] == losses(whole)[6:]
    code, found = audited(output)
    assert (code, found["problems"]) == (0, [])
    assert (found["samples"], found["undone"]) == (56, 6)
    assert [s["from_sample"] for s in found["mixture"]] == [0, 10, 24]

    log = output / "samples.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    start = json.loads(lines[0])
    start["mixture"][1][0] = 11
    log.write_text(json.dumps(start) + "\n" + "".join(lines[1:]))
    problem = "line 1: the mixture of its steps is not the recipe's up to sample 24, where they end"
    assert audited(output, "--no-contents") == (1, audited(output)[1] | {"problems": [problem]})
    step = json.loads(lines[2])
    step["sources"] = [step["sources"][0] + 1, step["sources"][1] - 1]
    log.write_text("".join([*lines[:2], json.dumps(step) + "\n", *lines[3:]]))
    code, found = audited(output)
    assert code == 1
    assert found["problems"] == [
        "step 2: the log says [4, 0] samples of the sources, the plan gives [3, 1]"
    ]


@pytest.mark.slow
def test_killed_within_segments(tmp_path, sources, start, hold: Hold):
    """Killed with SIGKILL in every segment: the losses of a run that was left alone, and no sample lost."""
    output, whole = tmp_path / "run", tmp_path / "whole"
    longer = {"train_dataset__data_loader__sizes": "[96,0,0]"}
    assert main(arguments(sources, whole, SCHEDULE, **longer)) == 0
    given = arguments(sources, output, SCHEDULE, **longer)
    changes = dict(item.split("=", 1) for item in given if "=" in item)
    changes = {key.replace(".", "__"): value for key, value in changes.items()}
    for wanted in (4, 6, 17):
        hold.at(wanted)
        process = start(output, "--resume", **changes)
        until(lambda wanted=wanted: steps_in(output / "metrics.jsonl") >= wanted, process)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    hold.release()
    process = start(output, "--resume", **changes)
    assert process.wait() == 0
    assert losses(output) == losses(whole)
    code, found = audited(output)
    assert (code, found["problems"], found["samples"]) == (0, [], 96)
    assert len(found["starts"]) == 4
