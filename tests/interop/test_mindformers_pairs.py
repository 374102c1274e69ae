"""MindFormers 1.9.0 and 2.1.0 train our model to the same numbers, by the launcher that is the same file in both."""

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import mindformers_runs as runs
import numpy as np
import pytest
from test_mindformers_stock import STOCK

from telechat_moe.interop.mindformers_config import PLUGIN
from telechat_moe.versions import PAIRS

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
ROOT = Path(__file__).parents[2]
STEPS = 12
LAUNCHER = "2529c40e05646282d6a8435bf11b44ffaf969dc3e05d69132a7bee2f549b6659"
"""SHA-256 of run_mindformer.py in MindFormers' branches r1.9.0 and r2.0.0 and its master of July 2026."""


@pytest.fixture(scope="module")
def second() -> Path:
    """Return the folder of programs of the other pair's environment, which the Makefile makes."""
    version = PAIRS[1].mindspore
    ready = ["make", f"MINDSPORE={version}", f".venv-{version}/.ready-test"]
    subprocess.run(ready, cwd=ROOT, check=True)
    return ROOT / f".venv-{version}/bin"


def trained(
    folder: Path, programs: Path, processes: int
) -> tuple[list[runs.Curve], dict[str, np.ndarray]]:
    """Train a small recipe with an environment's programs; return what each process printed, and all that was saved."""
    from safetensors.numpy import load_file

    folder.mkdir()
    recipe = runs.write_recipe(
        folder,
        processes,
        train_dataset__data_loader__sizes=f"[{STEPS * 4 * processes},0,0]",
        callbacks__2__save_checkpoint_steps=STEPS,
    )
    if STOCK.exists():
        assert hashlib.sha256(STOCK.read_bytes()).hexdigest() == LAUNCHER
        command = [str(STOCK), "--config", str(recipe), "--register_path", str(PLUGIN)]
        command += ["--use_legacy_format", "False"] if processes == 1 else []
    else:
        command = ["-m", "telechat_moe.run", str(recipe), "--through", "mindformers"]
    start = runs.msrun(processes, folder) if processes > 1 else []
    text = runs.run([*start, "python", *command], folder, programs=programs)
    logs = [folder / f"log/worker_{i}.log" for i in range(processes)] if processes > 1 else []
    saved: dict[str, np.ndarray] = {}
    for path in sorted((folder / "trained/checkpoint").rglob("*.safetensors")):
        name = path.relative_to(folder).as_posix()
        saved |= {f"{name}: {k}": v for k, v in load_file(path).items()}
    return [runs.curve(log.read_text()) for log in logs] or [runs.curve(text)], saved


@pytest.mark.parametrize("processes", [1, 2])
def test_both_pairs_train_the_same(processes: int, second: Path, tmp_path: Path) -> None:
    first, saved = trained(tmp_path / "first", Path(sys.executable).parent, processes)
    other, saved_by_other = trained(tmp_path / "other", second, processes)
    assert len(first) == len(other) == processes
    for a, b in zip(first, other, strict=True):
        assert len(a.loss) == STEPS
        for column, expected in zip(b, a, strict=True):
            np.testing.assert_array_equal(column, expected)
    assert saved.keys() == saved_by_other.keys()
    assert len(saved) > 100
    for name, tensor in saved.items():
        np.testing.assert_array_equal(tensor, saved_by_other[name], err_msg=name)
