"""kill -9 at random moments over four ranks: what is there is complete, and the run goes on with the same bits."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from mini_recipe import SPREAD

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore


from telechat_moe.checkpoint import checkpoint

STEPS = 40
RANKS = 4
SETTINGS = {
    **SPREAD,
    "parallel_config__data_parallel": 2,
    "parallel_config__model_parallel": 2,
    "parallel_config__use_seq_parallel": True,
    "parallel_config__expert_parallel": 2,
    "runner_config__batch_size": 2,
    "model__model_config__batch_size": 2,
    "train_dataset__data_loader__sizes": f"[{4 * STEPS},0,0]",
    "callbacks__2__save_checkpoint_steps": 2,
}
MEASURED = ("loss", "lm_loss", "aux_loss", "grad_norm", "learning_rate", "expert_load_by_layer")


def lines(output: Path) -> list[dict]:
    path = output / "metrics.jsonl"
    raw = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in raw if line.endswith(b"\n")]


def curve(output: Path) -> dict[int, str]:
    """Return what was measured in each step, every bit of it."""
    found = [r for r in lines(output) if r["event"] == "step"]
    assert len({r["step"] for r in found}) == len(found)
    return {r["step"]: json.dumps([r[key] for key in MEASURED]) for r in found}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run that nothing happens to."""
    import mini_recipe as mini

    from telechat_moe.cli import main

    output = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert main(mini.arguments(data, output, **SETTINGS)) == 0
    assert list(curve(output)) == list(range(1, STEPS + 1))
    return output


def moment(rng: random.Random, output: Path, process: subprocess.Popen[str]) -> None:
    """Wait for a random moment after the first steps of a process: three in four are close to a save."""
    before = len(lines(output))
    event = rng.choice(["save", "save", "save", "step"])
    wanted = before + rng.randint(2, 9)
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        found = lines(output)
        # What a resumed run cuts off at its start makes the file shorter; any growth will do.
        if len(found) < before:
            before, wanted = len(found), len(found) + rng.randint(2, 9)
        if len(found) >= wanted and found[-1]["event"] == event:
            break
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.06) if event == "save" else rng.uniform(0, 0.3))


def kill(rng: random.Random, output: Path, process: subprocess.Popen[str]) -> None:
    """Kill a rank, or all and their parents at once."""
    control = output / ".job" / "control"
    pids = {f"rank {r}": int((control / f"rank_{r}.pid").read_text()) for r in range(RANKS)}
    who = rng.choice([*pids, "all"])
    if who == "all":
        family = psutil.Process(process.pid).children(recursive=True)
        for victim in [process.pid, *(child.pid for child in family)]:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
    else:
        os.kill(pids[who], signal.SIGKILL)


def check(output: Path, expected: dict[int, str]) -> int:
    """Check what a kill left; return the step to go on from."""
    root = output / "checkpoints"
    for path in checkpoint.list_checkpoints(root):
        checkpoint.verify(path)
    for step, measured in curve(output).items():
        assert measured == expected[step], f"step {step}"
    newest = checkpoint.list_checkpoints(root)
    return checkpoint.load(newest[0]).step if newest else 0


def run_with_kills(
    output: Path, job: Path, data: Path, start, seed: int, kills: int, expected: dict[int, str]
) -> int:
    """Train to the end, again and again, until so many kills were survived; return those that hit a save."""
    rng, hits, done = random.Random(seed), 0, 0
    while done < kills:
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(job, output / ".job")
        finished = False
        while not finished:
            before = check(output, expected)
            process = start(output, "--resume", **SETTINGS)
            if done < kills:
                moment(rng, output, process)
            if done < kills and process.poll() is None:
                kill(rng, output, process)
                done += 1
                hits += any((output / "checkpoints").glob(".saving-*"))
            text, _ = process.communicate(timeout=240)
            if before and process.returncode != -signal.SIGKILL:
                assert f"at step {before}" in text, text
            finished = process.returncode == 0
        assert curve(output) == expected
        assert check(output, expected) == STEPS
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_kills(seed: int, tmp_path: Path, data: Path, start, uninterrupted: Path) -> None:
    job = uninterrupted / ".job"
    hits = run_with_kills(tmp_path / "run", job, data, start, seed, 10, curve(uninterrupted))
    assert hits, "no kill hit a save"
