import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("GLOG_v", "3")  # before mindspore is imported

import mini_recipe as mini
from running import Hold

COMMAND = [sys.executable, "-c", "import sys; from telechat_moe.cli import main; sys.exit(main())"]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Processes of the tests keep graphs in the session's own folder.

    There they neither use what the user's runs have compiled nor push it out.
    """
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mini.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def hold(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Hold:
    """The runs of this test stand still after a step."""
    return Hold(tmp_path_factory.mktemp("hold"), monkeypatch)


@pytest.fixture
def start(data: Path):
    """Start `telechat-moe train` on the mini recipe as a process of its own."""
    processes: list[subprocess.Popen[str]] = []

    def run(output: Path, *flags: str, **changes: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *mini.arguments(data, output, **changes), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=output.parent,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()
