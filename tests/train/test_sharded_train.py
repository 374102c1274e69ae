"""Training in several processes: the numbers of one process, a change of layout, and what happens when one dies."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from mini_recipe import DP2_EP2, SPREAD, TP2_PP2

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
from running import Hold, interrupt, left_over, rank, until, wait_for_ends, wait_for_step
from saved import assert_near

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.launch.commands import LaunchNode, free_port
from telechat_moe.launch.host_processes import HostProcesses
from telechat_moe.processes import Control, RankDiedError

STEPS = 40
SAME = {
    "train_dataset__data_loader__sizes": f"[{4 * STEPS},0,0]",
    "telechat_moe__evaluation__interval": 20,
}
BESIDE = {
    **DP2_EP2,
    "runner_config__batch_size": 1,
    "model__model_config__batch_size": 1,
    "runner_config__gradient_accumulation_steps": 2,
    "callbacks__1__gradient_accumulation_steps": 2,
    "telechat_moe__sharding__dispatcher": "alltoallv",
    "telechat_moe__sharding__overlap_exchange": True,
}
TP2 = {
    **SPREAD,
    "parallel_config__model_parallel": 2,
    "parallel_config__use_seq_parallel": True,
}
BOUND = 1e-5


def records(output: Path, event: str) -> list[dict[str, float]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["event"] == event]


def curve(output: Path) -> np.ndarray:
    """Return (step, loss, gradient norm) of every step."""
    return np.array([(r["step"], r["loss"], r["grad_norm"]) for r in records(output, "step")])


def newest(output: Path) -> checkpoint.Checkpoint:
    found = checkpoint.latest(output / "checkpoints")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The run in a single process."""
    output = tmp_path_factory.mktemp("one") / "run"
    assert main(mini.arguments(data, output, **SAME)) == 0
    return output


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The run on two processes, with an expert group of two."""
    output = tmp_path_factory.mktemp("two") / "run"
    assert main(mini.arguments(data, output, **SAME, **DP2_EP2)) == 0
    return output


@pytest.fixture
def prepared(tmp_path: Path, two: Path) -> Path:
    """A new output folder with the graphs of the run on two processes."""
    output = tmp_path / "run"
    shutil.copytree(two / ".job", output / ".job")
    return output


@pytest.mark.slow
def test_two_processes_compute_what_one_does(one: Path, two: Path) -> None:
    np.testing.assert_allclose(curve(two), curve(one), rtol=BOUND)
    evaluations = [[r["loss"] for r in records(o, "evaluation")] for o in (two, one)]
    np.testing.assert_allclose(*evaluations, rtol=BOUND)
    np.testing.assert_allclose(*(losses[0] for losses in evaluations), rtol=1e-6)  # equal weights


@pytest.mark.slow
def test_two_processes_write_what_one_does(one: Path, two: Path) -> None:
    hidden = {".job", ".pieces", "log"}
    assert {p.name for p in two.iterdir()} - hidden == {p.name for p in one.iterdir()} - hidden
    assert not (two / ".pieces").exists()
    summary = json.loads((two / "summary.json").read_text())
    assert summary["finished"] is True
    assert summary["checkpoint"] == f"checkpoints/step-{STEPS:08d}"
    assert_near(newest(two).tensors, newest(one).tensors, 1e-3)


@pytest.mark.slow
def test_a_killed_process_ends_all_and_another_layout_goes_on(
    prepared: Path, data: Path, start, hold: Hold, one: Path
) -> None:
    hold.at(8)
    process = start(prepared, **SAME, **DP2_EP2)
    wait_for_step(prepared, 8, process)
    until(lambda: checkpoint.list_checkpoints(prepared / "checkpoints"), process)
    pids = [rank(prepared, r) for r in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    hold.release()
    text, _ = process.communicate()
    assert process.returncode == 1, text
    assert f"rank 1 (process {pids[1]}) was killed by SIGKILL in step" in text, text
    assert "Traceback" not in text
    wait_for_ends(pids)
    assert not left_over(prepared)
    assert newest(prepared).step < STEPS
    assert f"the last good checkpoint is {newest(prepared).path} (checksums verified)" in text
    # From the last good checkpoint in another layout, then to the end of the same curve.
    assert main([*mini.arguments(data, prepared, **SAME, **TP2), "--resume"]) == 0
    np.testing.assert_allclose(curve(prepared), curve(one), rtol=BOUND)


@pytest.mark.slow
def test_ctrl_c_saves_and_a_single_process_goes_on(
    prepared: Path, data: Path, start, hold: Hold, one: Path
) -> None:
    hold.at(5)
    process = start(prepared, **SAME, **DP2_EP2)
    wait_for_step(prepared, 5, process)
    interrupt(prepared, process)
    hold.release()
    text, _ = process.communicate()
    assert process.returncode == 130, text
    assert "Traceback" not in text
    done = len(curve(prepared))
    assert newest(prepared).step == done < STEPS
    assert main([*mini.arguments(data, prepared, **SAME), "--resume"]) == 0
    np.testing.assert_allclose(curve(prepared), curve(one), rtol=BOUND)


@pytest.mark.slow
def test_a_process_that_cannot_start_ends_all(
    prepared: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (prepared / ".job" / "rank_1.mindir").unlink()
    assert main(mini.arguments(data, prepared, **SAME, **DP2_EP2)) == 1
    said = capsys.readouterr().err
    assert "error: rank 1 failed in step 1" in said
    assert "worker_1.log" in said


def on_two_processes(folder: Path, script: Path, **options) -> HostProcesses:
    node = LaunchNode(local=2, total=2, port=free_port())
    program = [str(script), str(folder / "job")]
    return HostProcesses(folder / "job", node, folder / "log", program, **options)


WORKER = """
import os, signal, sys, time
from pathlib import Path
from telechat_moe.processes import Control, die_with_parent
die_with_parent()
rank, control = int(os.environ.get("RANK_ID", -1)), Control(Path(sys.argv[1], "control"))
if os.environ["MS_ROLE"] == "MS_WORKER":
    control.begin(f"rank_{rank}")
    control.set_position(rank, "step 5, in the graph" if rank == 0 else "step 5, reading data")
    if rank == 1:
        while control.read("rank_0.at") is None:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(100)
"""


def test_a_process_that_hangs_is_named_and_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    control = Control.fresh(tmp_path / "job")
    cluster = on_two_processes(tmp_path, script, silence_s=3)
    with pytest.raises(RankDiedError) as error:
        cluster.run()
    pids = [int(control.read(f"rank_{rank}.pid") or 0) for rank in (0, 1)]
    assert f"rank 1 (process {pids[1]}) hangs: its state is stopped" in str(error.value)
    assert "rank 0: step 5, in the graph, rank 1: step 5, reading data" in str(error.value)
    wait_for_ends(pids)
    assert not left_over(tmp_path)


@pytest.mark.slow
def test_a_rank_that_hangs_in_training_is_named(
    prepared: Path, data: Path, start, hold: Hold
) -> None:
    hold.at(8)
    process = start(prepared, **SAME, **DP2_EP2)
    wait_for_step(prepared, 8, process)
    pids = [rank(prepared, r) for r in (0, 1)]
    os.kill(pids[1], signal.SIGSTOP)
    hold.release()
    text, _ = process.communicate()
    assert process.returncode == 1, text
    assert f"rank 1 (process {pids[1]}) hangs in step" in text
    assert f"the last good checkpoint is {newest(prepared).path}" in text
    wait_for_ends(pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "says"),
    [(signal.SIGKILL, "was killed by SIGKILL in step"), (signal.SIGSTOP, "hangs in step")],
)
def test_a_rank_that_leaves_rows_on_their_way_is_named(
    tmp_path: Path, data: Path, start, hold: Hold, sign: signal.Signals, says: str
) -> None:
    """The other rank has started exchanges, and waits for them."""
    output = tmp_path / "run"
    hold.at(8)
    process = start(output, **SAME, **BESIDE)
    wait_for_step(output, 8, process)
    pids = [rank(output, r) for r in (0, 1)]
    os.kill(pids[1], sign)
    hold.release()
    text, _ = process.communicate()
    assert process.returncode == 1, text
    assert f"rank 1 (process {pids[1]}) {says}" in text
    wait_for_ends(pids)


@pytest.mark.slow
def test_a_broken_checkpoint_is_passed_over_and_only_broken_ones_are_refused(
    prepared: Path, two: Path, data: Path, one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("checkpoints", "metrics.jsonl"):
        copy = shutil.copytree if (two / name).is_dir() else shutil.copy
        copy(two / name, prepared / name)
    arguments = [*mini.arguments(data, prepared, **SAME, **DP2_EP2), "--resume"]
    folders = checkpoint.list_checkpoints(prepared / "checkpoints")
    truncate(folders[0])
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert f"broken checkpoint {folders[0]}" in said
    assert "truncated" in said
    assert f"resumed from {folders[1]}" in said
    np.testing.assert_allclose(curve(prepared), curve(one), rtol=BOUND)
    for folder in checkpoint.list_checkpoints(prepared / "checkpoints"):
        truncate(folder)
    assert main(arguments) == 3
    assert "are broken" in capsys.readouterr().err


def truncate(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    os.truncate(path, path.stat().st_size - 100)


@pytest.mark.slow
def test_four_processes_with_two_stages_go_on_and_so_does_one(
    prepared: Path, data: Path, start, hold: Hold, one: Path
) -> None:
    for step, changes, flags in ((5, DP2_EP2, ()), (20, TP2_PP2, ("--resume",))):
        hold.at(step)
        process = start(prepared, *flags, **SAME, **changes)
        wait_for_step(prepared, step, process)
        interrupt(prepared, process)
        hold.release()
        text, _ = process.communicate()
        assert process.returncode == 130, text
    assert len(curve(prepared)) < STEPS
    assert main([*mini.arguments(data, prepared, **SAME), "--resume"]) == 0
    np.testing.assert_allclose(curve(prepared), curve(one), rtol=BOUND)


def test_a_process_that_dies_at_birth_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK_ID'] == '1' and os.environ['MS_ROLE'] == 'MS_WORKER':\n"
        "    sys.exit('no room for me')\n"
        "from telechat_moe.processes import die_with_parent\n"
        "die_with_parent()\n"
        "time.sleep(100)\n"
    )
    Control.fresh(tmp_path / "job")
    cluster = on_two_processes(tmp_path, script, out=sys.stderr)
    with pytest.raises(RankDiedError, match=r"(?s)rank . did not start.*|no room for me"):
        cluster.run()


@pytest.mark.slow
def test_a_message_of_a_process_is_the_message_of_the_command(
    tmp_path: Path, prepared: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = mini.flipped_weights(tmp_path, mini.arguments(data, prepared))
    changes = {**SAME, "load_checkpoint": str(broken)}
    job = prepared / ".job"
    assert main(mini.arguments(data, prepared, **changes, **DP2_EP2)) == 3
    assert f"broken checkpoint {broken}" in capsys.readouterr().err
    assert job.exists()


def test_another_target_is_refused(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {**DP2_EP2, "context__device_target": "Ascend"}
    assert main(mini.arguments(data, tmp_path / "run", **SAME, **changes)) == 3
    assert "context.device_target: Ascend" in capsys.readouterr().err
