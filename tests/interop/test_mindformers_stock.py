"""MindFormers' unmodified launcher trains our model by the command of docs/mindformers.md."""

import importlib.util
from pathlib import Path

import mindformers_runs as runs
import pages
import pytest

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
ROOT = Path(__file__).parents[2]
STOCK = ROOT / "tests/fixtures/mindformers/run_mindformer.py"
REPOSITORY = "https://gitcode.com/mindspore/mindformers"
STEPS = 4


def small(folder: Path) -> Path:
    """Write a small recipe under the page's name for it."""
    path = runs.write_recipe(
        folder / "small",
        train_dataset__data_loader__sizes=f"[{STEPS * 4},0,0]",
        callbacks__2__save_checkpoint_steps=STEPS,
        lr_schedule__warmup_steps=1,
        output_dir="./output",
    )
    return path.replace(folder / "mindformers.yaml")


@pytest.mark.skipif(
    not STOCK.exists(),
    reason=f"{STOCK.relative_to(ROOT)} is not here: copy it from branch r2.0.0 (as in v1.9.0) of {REPOSITORY}",
)
def test_stock_script(tmp_path: Path) -> None:
    """MindFormers' unmodified script trains our model, to the losses of our own door."""
    recipe = small(tmp_path)
    lines = [c.text for c in pages.commands(ROOT / "docs/mindformers.md")]
    (line,) = (line for line in lines if "run_mindformer.py" in line)
    line = line.replace("run_mindformer.py", str(STOCK))
    line = line.replace("telechat-moe", "python -m telechat_moe.cli")
    stock = runs.curve(runs.run(["bash", "-c", line], tmp_path))
    (own,) = runs.through_mindformers(recipe, 1, "--set", "output_dir=own")
    assert len(stock.loss) == STEPS
    for a, b in zip(stock, own, strict=True):
        assert a.tolist() == b.tolist()
