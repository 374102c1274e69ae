"""Runs of one recipe through MindFormers' Trainer and through ours, and what they printed."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[0]))
import mini_recipe as mini

from telechat_moe.recipe import load

STEPS = 50
LINE = re.compile(
    r"step:\[ *(\d+)/ *\d+\], loss:\[([^/]+)/.*?lr: ([^,]+),.*?global_norm: \[([^\]]+)\]"
)
DATA_PARALLEL = {
    "use_parallel": True,
    "parallel.parallel_mode": 0,
    "parallel.gradients_mean": True,
    "parallel_config.data_parallel": 2,
}


class Curve(NamedTuple):
    """Losses, learning rates and global norms of a run, by step."""

    loss: np.ndarray
    rate: np.ndarray
    norm: np.ndarray


def write_recipe(folder: Path, processes: int = 1, **changes: object) -> Path:
    """Write a small recipe with every part of the model and its data; return the file."""
    data = folder / "data"
    if not data.exists():
        data.mkdir(parents=True)
        mini.write_data(data)
    values: dict[str, object] = {
        **mini.OVERRIDES,
        "model.model_config.num_nextn_predict_layers": 1,
        "train_dataset.data_loader.sizes": f"[{STEPS * 4 * processes}, 0, 0]",
        "train_dataset.data_loader.config.data_path": f"['1', '{data}/train']",
        "lr_schedule.warmup_steps": 5,
        "callbacks.2.save_checkpoint_steps": 25,
        "output_dir": str(folder / "trained"),
        **(DATA_PARALLEL if processes > 1 else {}),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    recipe = load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in values.items()])
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.given))
    return path


def environment(programs: Path | None = None) -> dict[str, str]:
    """Return the environment of a run with an installation's programs, by default this one's."""
    path = f"{programs or Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "GLOG_v": "3", "PATH": path}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(command: list[str], cwd: Path, check: bool = True, programs: Path | None = None) -> str:
    """Run a command in a folder; return everything it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(programs),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def msrun(processes: int, cwd: Path) -> list[str]:
    """Return the beginning of a command for some processes, whose logs go to ``cwd/log``."""
    return [
        *("msrun", f"--worker_num={processes}", f"--local_worker_num={processes}"),
        *("--master_addr=127.0.0.1", f"--master_port={free_port()}"),
        *(f"--log_dir={cwd / 'log'}", "--join=True"),
    ]


def through_mindformers(recipe: Path, processes: int = 1, *flags: str) -> list[Curve]:
    """Train through MindFormers' Trainer; return what each process printed."""
    command = ["python", "-m", "telechat_moe.run", str(recipe), "--through", "mindformers", *flags]
    cwd = recipe.parent
    if processes == 1:
        return [curve(run(command, cwd))]
    run([*msrun(processes, cwd), *command], cwd)
    return [curve((cwd / f"log/worker_{i}.log").read_text()) for i in range(processes)]


def curve(text: str) -> Curve:
    """Read MindFormers' loss monitor."""
    rows = {int(m[1]): [float(m[i]) for i in (2, 3, 4)] for m in LINE.finditer(text)}
    assert rows, text[-4000:]
    return Curve(*np.array([rows[step] for step in sorted(rows)]).T)


def mean(curves: list[Curve]) -> Curve:
    """Return the mean loss of processes; rates and norms are the same in all."""
    for other in curves[1:]:
        np.testing.assert_array_equal(other.norm, curves[0].norm)
        np.testing.assert_array_equal(other.rate, curves[0].rate)
    return curves[0]._replace(loss=np.mean([c.loss for c in curves], 0))


def through_ours(recipe: Path, output: Path, *flags: str) -> Curve:
    """Train with ``telechat-moe train``."""
    code = "import sys; from telechat_moe.cli import main; sys.exit(main())"
    run(
        [
            sys.executable,
            "-c",
            code,
            "train",
            str(recipe),
            "--plain",
            "--set",
            f"output_dir={output}",
            *flags,
        ],
        recipe.parent,
    )
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if line["event"] == "step"]
    return Curve(
        *(np.array([s[key] for s in steps]) for key in ("loss", "learning_rate", "grad_norm"))
    )
