"""Runs whose moments are swapped, on two processes and in one, have every bit of the same runs without: what is saved, kills, skipped steps."""

import os
import shutil
import signal
from itertools import accumulate
from pathlib import Path

import psutil
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

import mini_recipe as mini
from mini_recipe import DP2_EP2, PP2
from running import Hold, rank, wait_for_ends, wait_for_step
from test_expert_moves import DP4
from test_growing_runs import SETTINGS
from test_sharded_average import ZERO, equal, train
from test_sharded_train import BESIDE, records

from benchmarks.ranks import transfers
from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.graph.execute import Job
from telechat_moe.graph.swapped_states import groups_of
from telechat_moe.ops import native
from telechat_moe.recipe import load
from telechat_moe.tools.align.capture import mindspore as capture

STEPS = 6
RUN = {
    "train_dataset__data_loader__sizes": f"[{4 * STEPS},0,0]",
    "callbacks__2__save_checkpoint_steps": 1,
    "callbacks__2__keep_checkpoint_max": 20,
}
SKIPS = {
    "use_skip_data_by_global_norm": True,
    "monitor_config": "{global_norm_spike_threshold: 1.1, global_norm_spike_count_threshold: 6}",
}
ACTIVATIONS = {
    "runner_config__batch_size": 1,
    "model__model_config__batch_size": 1,
    "runner_config__gradient_accumulation_steps": 2,
    "callbacks__1__gradient_accumulation_steps": 2,
    "swap_config__swap": True,
}
PIPELINE = {**PP2, "telechat_moe__sharding__pipeline_schedule": "zb-h1"}
ALONE = {
    **RUN,
    "runner_config__batch_size": 2,
    "model__model_config__batch_size": 2,
    "runner_config__gradient_accumulation_steps": 2,
    "callbacks__1__gradient_accumulation_steps": 2,
    "telechat_moe__ema__decay": 0.75,
}
CASES = {
    "averaged": {**RUN, **DP2_EP2, **ZERO, "telechat_moe__ema__decay": 0.75},
    "skipped": {**RUN, **DP2_EP2, **SKIPS},
    "activations": {**RUN, **DP2_EP2, **ACTIVATIONS},
    "beside": {**RUN, **BESIDE},
    "pipeline": {**RUN, **PIPELINE},
    "growing": {**SETTINGS, **DP2_EP2},
    "moving": {**RUN, **DP4, "telechat_moe__moe__placement": "{every: 1, window: 1}"},
}


def swapping(output: Path) -> dict[str, object]:
    """Return what swaps the moments of a run into a folder of its output."""
    (output / "pool").mkdir(parents=True, exist_ok=True)
    return {"optimizer__swap": True, "telechat_moe__swap__pool_folder": str(output / "pool")}


def same(one: Path, other: Path) -> None:
    """Hold the steps and all checkpoints of two runs equal to the last bit."""
    keys = ("step", "loss", "grad_norm")
    curves = [[[r[k] for k in keys] for r in records(o, "step")] for o in (one, other)]
    assert curves[0] == curves[1]
    found, expected = (checkpoint.list_checkpoints(o / "checkpoints") for o in (one, other))
    assert [p.name for p in found] == [p.name for p in expected]
    assert len(found) > 1
    for a, b in zip(found, expected, strict=True):
        equal(checkpoint.load(a).tensors, checkpoint.load(b).tensors)


@pytest.mark.parametrize("case", CASES)
def test_swapping_changes_no_bit(case: str, data: Path, tmp_path: Path) -> None:
    kept = train(data, tmp_path / "kept", **CASES[case])
    output = tmp_path / "swapped"
    swapped = train(data, output, **CASES[case], **swapping(output))
    same(swapped, kept)
    assert not list((swapped / "pool").iterdir())
    for found in Job.read(swapped / ".job").swapped:
        assert found is not None
        assert {s.name.partition(".")[0] for s in found.states} == {"adam_m", "adam_v"}
        assert (found.tensors > 0) == (case == "activations")
    skips = {"skipped": range(1, STEPS)}.get(case, [0])
    assert len(records(swapped, "guard")) in skips
    if case == "moving":
        assert records(swapped, "move") == records(kept, "move") != []


def resumes_either_way(data: Path, output: Path, kept: Path, case: dict[str, object]) -> None:
    """Resume a killed run with swapping, and a copy of it without."""
    again = output.with_name("again")
    shutil.copytree(output, again)
    train(data, output, "--resume", **case, **swapping(output))
    same(output, kept)
    train(data, again, "--resume", **case)
    same(again, kept)


def test_killed_and_resumed_bit_for_bit(data: Path, start, tmp_path: Path, hold: Hold) -> None:
    """A kill leaves nothing in the pool's folder; a resumed run goes on with or without swapping."""
    case, output = CASES["averaged"], tmp_path / "run"
    kept, pool = train(data, tmp_path / "kept", **case), output / "pool"
    hold.at(3)
    process = start(output, **case, **swapping(output))
    wait_for_step(output, 3, process)
    pids = [rank(output, r) for r in (0, 1)]
    for pid in pids:
        links = [str(f.readlink()) for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()]
        assert any(str(pool) in link and "deleted" in link for link in links)
    os.kill(pids[1], signal.SIGKILL)
    hold.release()
    assert process.wait() == 1
    wait_for_ends(pids)
    assert not list(pool.iterdir())
    resumes_either_way(data, output, kept, case)


@pytest.mark.parametrize("case", [RUN, ALONE, {**RUN, **SKIPS}], ids=["one", "several", "skipped"])
def test_one_process_changes_no_bit(case: dict[str, object], data: Path, tmp_path: Path) -> None:
    kept = train(data, tmp_path / "kept", **case)
    output, library = tmp_path / "swapped", native.load()
    library.telechat_swap_trial(0.0, 1)  # write the copies down
    try:
        same(train(data, output, **case, **swapping(output)), kept)
        copies = transfers(library.telechat_swap_times)
    finally:
        library.telechat_swap_trial(0.0, 0)
    assert not list((output / "pool").iterdir())
    saved = checkpoint.list_checkpoints(output / "checkpoints")[0]
    updates = STEPS - len(records(output, "guard"))
    assert len(copies) == 2 * updates * len(checkpoint.load(saved).tensors["optimizer"])
    there = {c.tag // 2: c.bytes for c in copies}
    pairs = [there[i] + there[i + 1] for i in range(0, len(there), 2)]
    groups = [sum(pairs[i] for i in group) for group in groups_of(pairs)]
    events = [(c.started, c.bytes) if c.tag % 2 else (c.goes_on, -c.bytes) for c in copies]
    most = max(accumulate(size for _, size in sorted(events)))
    assert most <= max(sum(groups[i : i + 3]) for i in range(len(groups))) < sum(pairs)


def test_one_process_killed_and_resumed_bit_for_bit(
    data: Path, start, tmp_path: Path, hold: Hold
) -> None:
    output = tmp_path / "run"
    kept, pool = train(data, tmp_path / "kept", **ALONE), output / "pool"
    hold.at(3)
    process = start(output, **ALONE, **swapping(output))
    wait_for_step(output, 3, process)
    (work,) = psutil.Process(process.pid).children()
    links = [str(f.readlink()) for f in Path(f"/proc/{work.pid}/fd").iterdir()]
    assert any(str(pool) in link and "deleted" in link for link in links)
    process.kill()
    hold.release()
    process.wait()
    assert not list(pool.iterdir())
    resumes_either_way(data, output, kept, ALONE)


@pytest.mark.parametrize(("limit", "said"), [(1, "and this process swaps"), (64, "")])
def test_one_process_has_a_pool_with_a_limit(
    limit: int, said: str, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    large = {**RUN, "model__model_config__vocab_size": 20000, "optimizer__swap": True}
    given = mini.arguments(data, tmp_path / "run", **large, telechat_moe__swap__pool_mib=limit)
    assert main(given) == (3 if said else 0)
    assert said in capfd.readouterr().err


def test_a_pool_without_room_is_an_error_before_the_first_step(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    large = {**CASES["averaged"], "model__model_config__vocab_size": 20000}
    given = {**large, **swapping(tmp_path / "run"), "telechat_moe__swap__pool_mib": 1}
    assert main(mini.arguments(data, tmp_path / "run", **given)) == 3
    assert "pool_mib: 1, and rank 0 swaps" in capfd.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_capture_refuses_swapped_moments(data: Path, tmp_path: Path) -> None:
    given = mini.arguments(data, tmp_path / "run", **DP2_EP2, optimizer__swap=True)
    recipe = load(given[1], given[4::2])
    with pytest.raises(BadInputError, match=r"optimizer\.swap True: a capture reads moments"):
        capture._sharded(recipe, tmp_path, range(1), capture.VALUES, capture.Filter(), None)
