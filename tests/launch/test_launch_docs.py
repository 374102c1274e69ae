"""Every command of docs/operations.md runs, in its order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
import yaml

from telechat_moe.recipe import load

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
STEPS = 4


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(telechat-moe (launch|check)|msrun) ", line)]


@pytest.mark.slow
def test_the_commands_run(tmp_path: Path, data: Path) -> None:
    changes = {
        "train_dataset__data_loader__sizes": f"[{4 * STEPS},0,0]",
        "use_parallel": True,
        "parallel__parallel_mode": 1,
        "parallel__full_batch": True,
        "parallel_config__data_parallel": 2,
        "runner_config__batch_size": 2,
        "model__model_config__batch_size": 2,
    }
    _, name, _, *sets = mini.arguments(data, tmp_path / "run", **changes)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(load(name, sets[1::2]).to_dict()))
    (tmp_path / "hosts").write_text(
        "worker-1 slots=1 addr=10.0.0.1\nworker-2 slots=1 addr=10.0.0.2\n"
    )
    lines = commands()
    assert len(lines) >= 5
    scripts = tmp_path / "bin"
    scripts.mkdir()
    (scripts / "telechat-moe").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m telechat_moe.cli "$@"\n'
    )
    (scripts / "telechat-moe").chmod(0o755)
    path = f"{scripts}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for line in lines:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if "--print" in line:
            assert done.stdout.count("msrun --worker_num=2") == 2
    assert (tmp_path / "run" / "summary.json").exists()
