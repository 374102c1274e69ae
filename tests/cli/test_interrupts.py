"""Ctrl-C at any moment: exit code 130, one line, and nothing is left behind."""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import mini_recipe as mini
import mini_sweep
import psutil
import pytest
from moments import COMMAND, WAYS, Ending, interrupt
from running import until

from telechat_moe import interruption
from telechat_moe.cli.output import write_text
from telechat_moe.errors import UsageError

WORKS = {
    "holds the interpreter": "sum(range(10**12))",
    "sleeps": "time.sleep(1000)",
    "imports": "exec('try:\\n time.sleep(1000)\\nexcept BaseException:\\n os.abort()')",
    "has children": """
        code = "import subprocess; subprocess.run(['sleep', '1000'], start_new_session=True)"
        subprocess.run([sys.executable, "-c", code], start_new_session=True)
    """,
    "writes": """
        with interruption.unfinished("half"), interruption.unfinished("folder"):
            Path("half").write_text("a"); Path("folder/deep").mkdir(parents=True)
            tempfile.mkdtemp()
            READY.touch()
            time.sleep(1000)
    """,
    "computes in threads": """
        for _ in range(3):
            threading.Thread(target=lambda: sum(range(10**12))).start()
    """,
    "ends": "atexit.register(time.sleep, 1000)",
}


def program(folder: Path, work: str) -> list[str]:
    """Return a command whose work is this code; it says in the file `ready` when it has begun."""
    text = textwrap.indent(textwrap.dedent(work).strip("\n"), "    ")
    begin = "" if "READY" in work else "    READY.touch()\n"
    (folder / "program.py").write_text(
        "import atexit, os, signal, subprocess, sys, tempfile, threading, time\n"
        "from pathlib import Path\nfrom telechat_moe import interruption\nREADY = Path('ready')\n"
        f"def work():\n{begin}{text}\n    return 0\nsys.exit(interruption.run(work))\n"
    )
    return [sys.executable, str(folder / "program.py")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("work", WORKS)
def test_any_work_ends_at_once(work: str, way: str, tmp_path: Path):
    ending = interrupt(tmp_path, program(tmp_path, WORKS[work]), way, tmp_path / "ready")
    assert ending.problems() == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("program.py", "ready", "stderr", "stdout", "tmp")
    ]
    assert ending.err in ("interrupted\n", "interrupted as it ended; all of it is done\n")
    assert ending.wait_s < 10


STOPS = """
    asked = []
    signal.signal(interruption.REQUEST, lambda number, frame: asked.append(time.monotonic()))
    interruption.can_stop()
    READY.touch()
    while not asked:
        time.sleep(0.01)
    time.sleep({seconds})
    Path("saved").touch()
    print("interrupted: saved", file=sys.stderr)
    os._exit(130)
"""


@pytest.mark.parametrize("way", ["group", "command", "terminate"])
def test_work_that_can_stop_in_order_does(way: str, tmp_path: Path):
    command = program(tmp_path, STOPS.format(seconds=0.7))
    ending = interrupt(tmp_path, command, way, tmp_path / "ready")
    assert (ending.problems(), ending.err) == ([], "interrupted: saved\n")
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(("apart_s", "saves"), [(0.0, True), (0.8, False)])
def test_a_second_signal_ends_at_once(apart_s: float, saves: bool, tmp_path: Path):
    """But `timeout` sends the first one twice, to its child and to the group."""
    process = subprocess.Popen(
        program(tmp_path, STOPS.format(seconds=2)), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGINT)
    time.sleep(apart_s + 0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130
    assert error == ("interrupted: saved\n" if saves else "interrupted\n")
    assert (tmp_path / "saved").exists() == saves


def test_what_the_user_can_do_is_said(tmp_path: Path):
    work = "interruption.advise('the same command goes on')\nREADY.touch()\ntime.sleep(1000)"
    ending = interrupt(tmp_path, program(tmp_path, work), "group", tmp_path / "ready")
    assert ending.err == "interrupted; the same command goes on\n"


@pytest.mark.parametrize("code", [0, 1, 3, 130])
def test_the_exit_code_is_the_work_s(code: int, tmp_path: Path):
    command = program(tmp_path, f"print('out')\nreturn {code}")
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (code, "out\n", "")


def test_work_that_is_killed_is_said_to_be(tmp_path: Path):
    command = program(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 5
    assert process.stderr.startswith("error: the process was killed by SIGKILL")


def test_work_dies_with_its_parent(tmp_path: Path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed parent leaves an empty folder there
    process = subprocess.Popen(program(tmp_path, "time.sleep(1000)"), cwd=tmp_path, env=env)
    until((tmp_path / "ready").exists)
    (work,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert work.wait(timeout=60) is None


def test_a_signal_to_the_work_alone_is_passed_on(tmp_path: Path):
    process = subprocess.Popen(
        program(tmp_path, "time.sleep(1000)"), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    until((tmp_path / "ready").exists)
    (work,) = psutil.Process(process.pid).children()
    work.terminate()
    assert (process.communicate()[1], process.returncode) == ("interrupted\n", 130)


def test_without_a_place_for_temporary_files_it_works(tmp_path: Path):
    env = {**os.environ, "TMPDIR": str(tmp_path / "missing")}
    command = program(tmp_path, "print('out')")
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)  # fmt: skip
    assert process.stdout == "out\n"


@pytest.mark.parametrize("after_s", [0.4, 0.6, 0.9])
def test_a_short_command(after_s: float, tmp_path: Path):
    """From 0.2 s on it is the package's; before, Python itself is starting."""
    ending = interrupt(tmp_path, [*COMMAND, "check", "telechat3_moe/pretrain_tiny.yaml"], "group", after_s)  # fmt: skip
    if not ending.ended_before:
        told = ((130, "interrupted\n"), (130, "interrupted as it ended; all of it is done\n"))
        assert (ending.code, ending.err) in (
            *told,
            (1, ""),
        )  # 1: it had said that the data are missing
    assert ending.left == []


def test_nothing_is_declared_where_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    interruption.can_stop()
    interruption.advise("nothing")
    with interruption.unfinished(tmp_path / "x"):
        pass
    assert not list(tmp_path.iterdir())


def test_outputs_are_whole_or_absent(tmp_path: Path):
    """A report replaces one, follows links, and is written into pipes."""
    target, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(target)
    for text in ("one", "two"):
        write_text("--html ", str(link), lambda text=text: text)
        assert target.read_text() == text
        assert link.is_symlink()
    read, write = os.pipe()
    write_text("--html ", f"/dev/fd/{write}", lambda: "piped")
    assert os.read(read, 10) == b"piped"
    with pytest.raises(UsageError, match="cannot be written"):
        write_text("--html ", str(tmp_path), lambda: "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "page.html"]


# ------------------------------------------------------------------------------- whole verbs

TWO = {**mini.SPREAD, "parallel_config__model_parallel": 2}


def words(verb: str, folder: Path, data: Path) -> list[str]:
    """Return the arguments of a verb that runs a while."""
    train = mini.arguments(
        data, folder / "out", **(TWO if verb in ("train-two", "train-again") else {})
    )
    recipe, sets = train[1], train[3:]
    if verb == "sweep":
        return [verb, str(mini_sweep.write(folder, mini_sweep.sweep(data, output_dir=str(folder / "out"), variants={"few": mini_sweep.VARIANTS["few"]})))]  # fmt: skip
    return {
        "train": [*train, "--no-graph-cache"],
        "train-two": train,
        "train-again": train,
        "dryrun": ["dryrun", recipe, "--html", "page.html", "--json", "report.json"],
        "data": ["data", "build", "--recipe", recipe],
        "capture": ["align", "capture", recipe, *sets, "--out", "dump"],
    }[verb]


MOMENTS = {
    "train": 18,
    "train-two": 6,
    "train-again": 6,
    "dryrun": 6,
    "data": 5,
    "capture": 5,
    "sweep": 4,
}


class Whole:
    """Runs of verbs that nothing interrupts."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data, self.folder = data, folder
        self.took: dict[str, float] = {}

    def prepare(self, verb: str, folder: Path) -> None:
        """Spare a run the compilation of its graphs, if it is one again."""
        if verb == "train-again":
            self.seconds("train-two")
            shutil.copytree(self.folder / "train-two/out/.job", folder / "out/.job")

    def seconds(self, verb: str) -> float:
        """Return how long a verb takes."""
        if verb not in self.took:
            folder = self.folder / verb
            folder.mkdir()
            self.prepare(verb, folder)
            command, began = [*COMMAND, *words(verb, folder, self.data)], time.monotonic()
            process = subprocess.run(
                command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
            )
            self.took[verb] = time.monotonic() - began
            if verb == "train":  # the recipe lets the model write no sample
                summary = f"done: {folder}/out/loss.png, summary.json, checkpoints\n"
                assert process.stdout == summary
        return self.took[verb]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(data, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "number"), [(v, i) for v, n in MOMENTS.items() for i in range(n)])
def test_any_moment(verb: str, number: int, data: Path, whole: Whole, tmp_path: Path):
    """50 moments, spread over what the verbs take: imports, compiling, steps, saving, the end."""
    took = whole.seconds(verb)
    whole.prepare(verb, tmp_path)
    share = (number + random.Random(f"{verb} {number}").random()) / MOMENTS[verb]
    command = [*COMMAND, *words(verb, tmp_path, data)]
    ending = interrupt(tmp_path, command, WAYS[number % len(WAYS)], max(took * share, 0.5))
    assert found(ending, tmp_path) == []


def found(ending: Ending, folder: Path) -> list[str]:
    """Return what is wrong with how a verb ended."""
    problems = ending.problems(kept=[".partial"])  # of `data build`, which goes on from there
    outputs = [name for name in ("dump", "page.html", "report.json") if (folder / name).exists()]
    if outputs and "as it ended" not in ending.err and ending.code:
        problems.append(f"half written: {outputs}")
    return problems
