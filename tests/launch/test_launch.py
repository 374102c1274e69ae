"""Launching: the processes die, hang, are stopped; several machines; what the printed commands do."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
from running import Hold, interrupt, left_over, named, rank, steps_in, until, wait_for_step

from telechat_moe import processes
from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.launch.commands import free_port
from telechat_moe.recipe import load

STEPS = 24
TWO = {**mini.DP2_EP2, "train_dataset__data_loader__sizes": f"[{4 * STEPS},0,0]"}


def launch(data: Path, output: Path, *flags: str, **changes: object) -> list[str]:
    """Return the arguments of `telechat-moe launch` for the mini recipe on two processes."""
    _, recipe, _, *sets = mini.arguments(data, output, **{**TWO, **changes})
    return ["launch", recipe, *sets, *flags]


def curve(output: Path) -> np.ndarray:
    """Return (step, loss, gradient norm) of every step."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return np.array([(r["step"], r["loss"], r["grad_norm"]) for r in lines if r["event"] == "step"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run that nothing interrupts, started with umask 0 and bound to cores; what it said is in ``said``."""
    output = tmp_path_factory.mktemp("launch") / "run"
    with pytest.MonkeyPatch.context() as patch:
        hold = Hold(output.parent, patch)
        hold.at(1)  # until the watch has seen its processes
        before, watch = os.umask(0), Watch(output, hold)
        try:
            with (output.parent / "said").open("w") as said, redirect_stderr(said):
                assert main(launch(data, output, "--bind")) == 0
        finally:
            os.umask(before)
            watch.end()
    (output.parent / "seen.json").write_text(json.dumps(watch.seen))
    assert len(curve(output)) == STEPS
    return output


@pytest.fixture
def prepared(tmp_path: Path, whole: Path) -> Path:
    """A new output folder with the graphs of the run on two processes."""
    output = tmp_path / "run"
    output.mkdir()
    shutil.copytree(whole / ".job", output / ".job")
    return output


class Watch:
    """Looks at the processes of a held run from a thread: where they listen, on which cores they run."""

    def __init__(self, output: Path, hold: Hold) -> None:
        self.output, self.hold, self.over = output, hold, threading.Event()
        self.seen = {"listen": [], "cores": []}
        self.thread = threading.Thread(target=self._look)
        self.thread.start()

    def _look(self) -> None:
        while not self.over.wait(0.2):
            listen, cores = set(map(tuple, self.seen["listen"])), []
            for process in psutil.process_iter(["cmdline"]):
                words = " ".join(process.info["cmdline"] or [])
                if str(self.output) not in words or "telechat_moe.run" not in words:
                    continue
                try:
                    found = process.net_connections("tcp")
                    listen |= {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}
                    if "msrun" not in words and process.environ().get("MS_ROLE") == "MS_WORKER":
                        cores.append(process.cpu_affinity())
                except psutil.Error:
                    continue
            self.seen["listen"] = sorted(listen)
            if len(cores) == 2:
                self.seen["cores"] = sorted(cores)
            if listen and self.seen["cores"]:
                self.hold.release()

    def end(self) -> None:
        self.over.set()
        self.thread.join()


Strike = Callable[[Path, int, Callable[[], object]], None]


@pytest.fixture
def strike(hold: Hold) -> Iterator[Strike]:
    """Does something to a run once it has done a step; the run stands still until then."""
    over, threads = threading.Event(), []

    def strike(output: Path, step: int, act: Callable[[], object]) -> None:
        def wait() -> None:
            until(lambda: over.is_set() or steps_in(output / "metrics.jsonl") >= step)
            if not over.is_set():
                act()
            hold.release()

        hold.at(step)
        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    yield strike
    over.set()
    for thread in threads:
        thread.join()


# ------------------------------------------------------------------------------ one machine


def loose_files(folder: Path) -> list[Path]:
    """Return what group or others can write."""
    paths = [p for p in [folder, *folder.rglob("*")] if not p.is_symlink()]
    return [p for p in paths if p.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]


@pytest.mark.slow
def test_files_of_a_run_are_not_writable_by_others(whole: Path) -> None:
    names = {p.name for p in whole.rglob("*")}
    assert {"worker_0.log", "checkpoint.json", "recipe.yaml", "control"} <= names
    assert not loose_files(whole)


@pytest.mark.slow
def test_a_run_listens_on_its_own_address_only(whole: Path) -> None:
    seen = json.loads((whole.parent / "seen.json").read_text())
    assert seen["listen"]
    assert {address for address, _ in seen["listen"]} == {"127.0.0.1"}


@pytest.mark.slow
def test_bound_processes_share_no_core(whole: Path) -> None:
    first, second = json.loads((whole.parent / "seen.json").read_text())["cores"]
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(first) & set(second)
    assert set(first) | set(second) <= os.sched_getaffinity(0)
    said = (whole.parent / "said").read_text()
    assert "ranks 0-1: bound at the end as at the start\n" in said
    assert len(re.findall(r"^rank \d: bound to CPUs .* verified, \d+ threads$", said, re.M)) == 2


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be bound in two ways")
def test_a_binding_that_somebody_changes_in_a_run_is_reported(
    prepared: Path, data: Path, strike: Strike, capsys: pytest.CaptureFixture[str]
) -> None:
    def move() -> None:
        everywhere = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        command = ["taskset", "-apc", everywhere, str(rank(prepared, 1))]
        subprocess.run(command, check=True, capture_output=True)

    strike(prepared, 4, move)
    assert main(launch(data, prepared, "--bind")) == 0
    printed = capsys.readouterr().err
    # The plan first; what was verified after the start, if the run was still there at the second look.
    assert re.search(r"^rank 0: CPUs [\d,-]+, NUMA node \d \(no NPU\)$", printed, re.MULTILINE)
    [change] = re.findall(r"^binding changed: .*$", printed, re.MULTILINE)
    assert re.match(r"binding changed: rank 1: threads .*python.* may run on CPUs ", change)
    assert "bound at the end as at the start" not in printed


def test_the_resolved_recipe_is_the_recipe(whole: Path, data: Path) -> None:
    _, name, *rest = launch(data, whole)
    recipe = load(name, rest[1::2])
    resolved = load(whole / ".job" / "recipe.yaml")
    assert resolved.to_dict() == recipe.to_dict()


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_run_goes_on(
    prepared: Path, data: Path, whole: Path, strike: Strike, capsys: pytest.CaptureFixture[str]
) -> None:
    strike(prepared, 8, lambda: os.kill(rank(prepared, 1), signal.SIGKILL))
    code = main(launch(data, prepared, "--restart", "1"))
    printed = capsys.readouterr().err
    assert code == 0, printed
    assert re.search(
        rf"rank 1 \(process \d+\) was killed by SIGKILL in step \d+ on {socket.gethostname()};",
        printed,
    )
    assert "worker_1.log" in printed
    assert "restart 1 (0 more without a new checkpoint)" in printed
    assert re.search(r"resumed from \S+/step-0000000\d at step", printed)
    assert (prepared / "log" / "attempt_1" / "worker_1.log").exists()
    np.testing.assert_array_equal(curve(prepared), curve(whole))
    assert not left_over(prepared)


@pytest.mark.slow
def test_a_report_of_a_killed_run_names_rank_step_and_signal(
    prepared: Path, data: Path, strike: Strike, tmp_path: Path
) -> None:
    strike(prepared, 8, lambda: os.kill(rank(prepared, 1), signal.SIGKILL))
    line = launch(data, prepared)
    assert main(line) == 1
    target, settings = tmp_path / "report.json", line[2:]
    assert main(["report", line[1], *settings, "--json", str(target)]) == 0
    run = json.loads(target.read_text())["run"]
    assert run["first_error"]["rank"] == 1
    assert re.match(
        r"rank 1 .* was killed by SIGKILL in step \d+ on", run["first_error"]["message"]
    )
    assert run["first_error"]["position"].startswith("step ")
    assert run["last_step"] >= 8
    assert not run["finished"]


@pytest.mark.slow
def test_a_process_that_hangs_is_named_and_the_run_goes_on(
    prepared: Path,
    data: Path,
    whole: Path,
    strike: Strike,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(processes, "SILENCE_S", 5.0)
    strike(prepared, 8, lambda: os.kill(rank(prepared, 0), signal.SIGSTOP))
    code = main(launch(data, prepared, "--restart", "1"))
    printed = capsys.readouterr().err
    assert code == 0, printed
    assert re.search(
        r"rank 0 \(process \d+\) hangs in step \d+ on \S+: its state is stopped", printed
    )
    assert re.search(r"last lines of \S+worker_0.log:\n.*step +\d+", printed, re.S)
    np.testing.assert_array_equal(curve(prepared), curve(whole))
    assert not left_over(prepared)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "how"),
    [
        (signal.SIGSTOP, "hangs: its state is stopped, it has not moved for 5 s"),
        (signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
def test_the_scheduler_is_named_as_such(
    prepared: Path,
    data: Path,
    strike: Strike,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sent: signal.Signals,
    how: str,
) -> None:
    monkeypatch.setattr(processes, "SILENCE_S", 5.0)
    pid, noticed = prepared / ".job/control/scheduler.pid", threading.Event()

    def act() -> None:
        os.kill(int(pid.read_text()), sent)
        noticed.wait(60)  # otherwise a fast run ends before the stopped scheduler is noticed

    strike(prepared, 8, act)
    try:
        assert main(launch(data, prepared)) == 1
    finally:
        noticed.set()
    printed = capsys.readouterr().err
    assert re.search(
        rf"error: MindSpore's scheduler \(process \d+\) {how} in step \d+ on ", printed
    ), printed
    assert "AllReduce launch failed" not in printed
    assert not left_over(prepared)


@pytest.mark.slow
def test_without_restarts_the_run_ends_and_says_how_to_go_on(
    prepared: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two restarts in a row without a new checkpoint are too many for --restart 1; here the run dies at birth."""
    (prepared / ".job" / "rank_1.mindir").unlink()
    assert main(launch(data, prepared, "--restart", "1")) == 1
    printed = capsys.readouterr().err
    assert printed.count("rank 1 failed in step 1") == 2
    assert printed.count("restart 1 ") == 1
    assert "restart 2" not in printed
    assert "there is no checkpoint in" in printed
    assert "Traceback" in (prepared / "log" / "worker_1.log").read_text()


@pytest.mark.slow
def test_a_worker_s_message_and_exit_code_are_the_launch_s(
    tmp_path: Path, prepared: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = mini.flipped_weights(tmp_path, mini.arguments(data, prepared))
    changes = {"load_checkpoint": str(broken)}
    assert main(launch(data, prepared, "--restart", "3", **changes)) == 3
    printed = capsys.readouterr().err
    assert f"broken checkpoint {broken}" in printed
    assert "checksum differs" in printed
    assert "restart 1" not in printed  # it would say the same again


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_everything(
    prepared: Path, data: Path, whole: Path, hold: Hold
) -> None:
    hold.at(5)
    process = subprocess.Popen(
        [sys.executable, "-m", "telechat_moe.cli", *launch(data, prepared, "--restart", "2")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_step(prepared, 5, process)
    interrupt(prepared, process)
    hold.release()
    said, _ = process.communicate()
    assert process.returncode == 130, said
    done = len(curve(prepared))
    assert 5 <= done < STEPS
    found = checkpoint.latest(prepared / "checkpoints")
    assert found is not None
    assert found.step == done
    assert not left_over(prepared)
    # ... and goes on, as one process does, too.
    assert main(launch(data, prepared, "--resume")) == 0
    np.testing.assert_array_equal(curve(prepared), curve(whole))


def test_a_second_launch_is_refused(
    prepared: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        assert main(launch(data, prepared, "--master-port", str(port))) == 2
        assert f"port {port} of 127.0.0.1 cannot be used" in capsys.readouterr().err
    from telechat_moe.launch.job import only_launch

    with only_launch(prepared):
        assert main(launch(data, prepared)) == 2
    assert "another launch trains into it" in capsys.readouterr().err
    assert not (prepared / "metrics.jsonl").exists()


@pytest.mark.slow
def test_one_process_is_launched_too(tmp_path: Path, data: Path) -> None:
    _, recipe, _, *sets = mini.arguments(data, tmp_path / "run")
    assert main(["launch", recipe, *sets]) == 0
    single = ["train", recipe, "--plain", *sets, "--set", f"output_dir={tmp_path}/single"]
    before = os.umask(0)
    try:
        assert main(single) == 0
    finally:
        os.umask(before)
    assert not loose_files(tmp_path / "single")
    np.testing.assert_array_equal(curve(tmp_path / "run"), curve(tmp_path / "single"))


# ------------------------------------------------------------------------------ refused before anything starts


def test_paths_that_lead_outside_are_refused_unless_asked(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"callbacks__2__directory": str(tmp_path / "elsewhere")}
    _, recipe, _, *sets = mini.arguments(data, tmp_path / "run", **changes)
    command = ["launch", recipe, "--through", "mindformers", *sets]
    assert main(command) == 3
    assert "callbacks.2.directory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*command, "--print", "--allow-outside"]) == 0
    assert "--allow-outside" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "changes", "message"),
    [
        ({}, {}, "this is one, without msrun; start msrun --worker_num=2 --local_worker_num=2"),
        (
            {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "3"},
            {},
            "msrun started 3; start msrun --worker_num=2",
        ),
        (
            {"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "2"},
            {
                "use_parallel": False,
                "parallel_config__data_parallel": 1,
                "parallel_config__expert_parallel": 1,
            },
            "laid out for 1 device",
        ),
    ],
)
def test_processes_that_are_not_the_recipe_s_devices_are_refused(
    tmp_path: Path,
    data: Path,
    environment: dict[str, str],
    changes: dict[str, object],
    message: str,
) -> None:
    _, recipe, *sets = launch(data, tmp_path / "run", **changes)
    process = subprocess.run(
        [sys.executable, "-m", "telechat_moe.run", recipe, *sets],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 3
    assert message in process.stderr
    assert "use_parallel" in process.stderr


# ------------------------------------------------------------------------------ printed commands


def printed(out: str) -> list[tuple[str, list[str]]]:
    """Return (comments, words of the command) of each host."""
    comments = re.findall(r"((?:^#.*\n)+)^(?!#)(.*)$", out, re.MULTILINE)
    return [(said.rstrip("\n"), shlex.split(line)) for said, line in comments]


def test_the_commands_of_two_hosts_are_printed(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=1 addr=10.0.0.1\nb slots=1 addr=10.0.0.2\n")
    output = tmp_path / "run $(touch pwned)"
    flags = ("--nodes", str(hosts), "--print", "--bind=auto", "--resume", "--master-port", "8222")
    assert main(launch(data, output, *flags)) == 0
    found = printed(capsys.readouterr().out)
    there = "\n# each process chooses its cores there, by the topology of that host"
    said = [f"# on a: ranks 0 to 0{there}", f"# on b: ranks 1 to 1{there}"]
    assert [comment for comment, _ in found] == said
    for number, (_, words) in enumerate(found):
        msrun = words.index(str(Path(sys.executable).parent / "msrun"))
        assert words[:2] == ["cd", str(Path.cwd())]
        assert words[msrun + 1 :] == [
            *("--worker_num=2", "--local_worker_num=1", f"--node_rank={number}"),
            *("--master_addr=10.0.0.1", "--master_port=8222", f"--log_dir={output}/log"),
            *("--join=True", "--cluster_time_out=300", "--tail_worker_log=0"),
            *("python", "-u", "-m", "telechat_moe.run", f"{output}/.job/recipe.yaml"),
            *("--through=own", "--local-processes=1", "--resume", "--bind-cores"),
        ]
    assert load(output / ".job" / "recipe.yaml").output_dir == str(output)
    assert not list(output.glob("log"))


@pytest.mark.slow
def test_a_printed_command_trains_without_us(
    prepared: Path, data: Path, whole: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A shell runs it; a value of the recipe that looks like a command stays text; old control files are not taken for new."""
    name = prepared.with_name("run $(touch pwned)")
    prepared.rename(name)
    assert main(launch(data, name, "--print")) == 0
    line = capsys.readouterr().out.splitlines()[1]
    (name / ".job" / "control" / "rank_1.done").touch()
    (name / ".job" / "control" / "end-1").touch()
    process = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert process.returncode == 0, process.stdout + process.stderr
    np.testing.assert_array_equal(curve(name), curve(whole))
    assert not list(tmp_path.rglob("pwned"))
    assert not Path("pwned").exists()


@pytest.mark.slow
def test_msrun_alone_compiles_and_trains(tmp_path: Path, data: Path, whole: Path) -> None:
    _, recipe, *sets = launch(data, tmp_path / "run")
    command = [
        *(str(Path(sys.executable).parent / "msrun"), "--worker_num=2", "--local_worker_num=2"),
        *(f"--master_port={free_port()}", f"--log_dir={tmp_path}/log", "--join=True"),
        *("python", "-m", "telechat_moe.run", recipe, *sets),
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "compiled 2 of 2 ranks" in (tmp_path / "log" / "worker_0.log").read_text()
    np.testing.assert_array_equal(curve(tmp_path / "run"), curve(whole))


# ------------------------------------------------------------------------------ two machines


def run_quietly(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Path]:
    """A hostfile of two network namespaces with a cable between them."""
    a, b = (f"tm{os.getpid()}{x}" for x in "ab")
    ip = "ip"
    steps = [
        *((ip, "netns", "add", x) for x in (a, b)),
        (
            ip,
            "link",
            "add",
            f"v{a}",
            "netns",
            a,
            "type",
            "veth",
            "peer",
            "name",
            f"v{b}",
            "netns",
            b,
        ),
        *(
            (ip, "-n", x, "addr", "add", f"10.213.7.{i}/24", "dev", f"v{x}")
            for i, x in ((1, a), (2, b))
        ),
        *((ip, "-n", x, "link", "set", f"v{x}", "up") for x in (a, b)),
        *((ip, "-n", x, "link", "set", "lo", "up") for x in (a, b)),
    ]
    try:
        for step in steps:
            if not run_quietly(*step):
                pytest.skip(f"no permission for network namespaces ({' '.join(step)} failed)")
        hosts = tmp_path / "hosts"
        hosts.write_text(f"{a} slots=1 addr=10.213.7.1\n{b} slots=1 addr=10.213.7.2\n")
        yield hosts
    finally:
        for x in (a, b):
            run_quietly(ip, "netns", "del", x)


def through(hosts: Path) -> tuple[str, ...]:
    return ("--nodes", str(hosts), "--remote-shell", "ip netns exec {host} sh -c")


def listening(host: str) -> set[str]:
    process = subprocess.run(
        ["ip", "netns", "exec", host, "ss", "-Hltn"], capture_output=True, text=True, check=False
    )
    return {line.split()[3].rpartition(":")[0] for line in process.stdout.splitlines()}


@pytest.mark.slow
def test_a_process_on_another_machine_is_named_and_all_machines_go_on(
    machines: Path,
    prepared: Path,
    data: Path,
    whole: Path,
    strike: Strike,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a, b = (line.split()[0] for line in machines.read_text().splitlines())
    seen: dict[str, set[str]] = {a: set(), b: set()}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            for host, found in seen.items():
                found |= listening(host)

    def kill() -> None:
        until(lambda: seen[a])
        os.kill(rank(prepared, 1), signal.SIGKILL)

    looking = threading.Thread(target=look)
    looking.start()
    strike(prepared, 8, kill)
    code = main(launch(data, prepared, "--restart", "1", *through(machines)))
    over.set()
    looking.join()
    printed = capsys.readouterr().err
    assert code == 0, printed
    assert re.search(rf"rank 1 \(process \d+\) was killed by SIGKILL in step \d+ on {b};", printed)
    assert "restart 1" in printed
    np.testing.assert_array_equal(curve(prepared), curve(whole))
    assert not left_over(prepared)
    assert seen[a] <= {"10.213.7.1"}
    assert seen[b] <= {"10.213.7.2"}
    assert seen[a]


@pytest.mark.slow
def test_a_machine_that_falls_silent_or_is_cut_off_ends_all(
    machines: Path,
    prepared: Path,
    data: Path,
    strike: Strike,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second host's remote shell is killed: its agent ends its processes, the launcher those of the first."""
    b = machines.read_text().splitlines()[1].split()[0]

    def cut() -> None:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "telechat_moe.launch.host_agent" in words:
                status = Path(f"/proc/{process.pid}/net/fib_trie").read_text()
                if re.search(r"10\.213\.7\.2\s", status):  # 10.213.7.255 is the first one's, too
                    process.kill()

    strike(prepared, 8, cut)
    code = main(launch(data, prepared, *through(machines)))
    printed = capsys.readouterr().err
    assert code == 1, printed
    assert f"host {b}: its agent ended with exit code" in printed
    assert not left_over(prepared)


def test_machines_that_do_not_share_the_folder_or_cannot_start_are_named(
    machines: Path, prepared: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (line.split()[0] for line in machines.read_text().splitlines())
    # The second host has another /tmp: a mount of its own hides the output folder.
    hide = f"ip netns exec {{host}} sh -c 'case $(ip netns identify) in {b}) mount -t tmpfs none {prepared};; esac; exec sh -c \"$1\"' sh"
    flags = ("--nodes", str(machines), "--remote-shell", hide)
    assert main(launch(data, prepared, *flags)) == 3
    printed = capsys.readouterr().err
    assert f"host {b} does not see {prepared}/.job/control" in printed
    assert "output_dir must be one folder that all hosts see" in printed
    flags = ("--nodes", str(machines), "--remote-shell", "sh -c 'echo no route >&2; exit 255'")
    assert main(launch(data, prepared, *flags)) == 1
    printed = capsys.readouterr().err
    assert f"host {a}: its agent ended with exit code 255:\n  no route" in printed
    assert not left_over(prepared)


def test_a_port_that_is_used_on_the_first_host_is_refused_there(
    machines: Path, prepared: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = machines.read_text().split()[0]
    code = "import socket, time; s = socket.socket(); s.bind(('10.213.7.1', 8118)); s.listen(); print(1, flush=True); time.sleep(9999)"
    command = ["ip", "netns", "exec", a, sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        user.stdout.readline()
        try:
            assert main(launch(data, prepared, *through(machines))) == 2
        finally:
            user.kill()
    printed = capsys.readouterr().err
    assert f"host {a}: port 8118 of 10.213.7.1 cannot be used" in printed


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_nothing_on_any_machine(
    machines: Path, prepared: Path, data: Path, hold: Hold
) -> None:
    hold.at(5)
    words = [*launch(data, prepared), *through(machines)]
    with (prepared / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "telechat_moe.cli", *words], stderr=said, text=True
        )
    wait_for_step(prepared, 5, process)
    assert len(named(prepared)) > 4
    process.kill()
    process.wait()
    assert not left_over(prepared)
