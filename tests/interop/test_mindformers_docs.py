"""Every command of docs/mindformers.md runs, in its order, on a smaller model and fewer steps."""

import importlib.util
import re
from pathlib import Path

import mindformers_runs as runs
import pytest
import yaml

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


def commands() -> list[str]:
    page = (ROOT / "docs/mindformers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", page, re.S)
    return [line for block in blocks for line in block.splitlines() if line]


def small(folder: Path) -> None:
    """Put a small recipe in the place of the page's."""
    path = runs.write_recipe(
        folder / "small",
        train_dataset__data_loader__sizes=f"[{STEPS * 4},0,0]",
        callbacks__2__save_checkpoint_steps=STEPS,
        lr_schedule__warmup_steps=1,
        output_dir="./output",
    )
    recipe = yaml.safe_load(path.read_text())
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))


@pytest.mark.slow
def test_commands_of_the_page(tmp_path: Path) -> None:
    lines = commands()
    assert len(lines) >= 8
    for line in lines:
        if line.startswith("telechat-moe data build"):
            small(tmp_path)  # its data is there already
            continue
        if "run_mindformer.py" in line:
            continue  # test_stock_script
        text = line.replace("step-00001000", f"step-{STEPS:08d}")
        text = text.replace("--master_port=8118", f"--master_port={runs.free_port()}")
        text = text.replace("telechat-moe", "python -m telechat_moe.cli")
        runs.run(["bash", "-c", text], tmp_path)
    assert (tmp_path / f"handed-back/iteration_{STEPS:08d}/common.json").exists()
    assert sorted(p.name for p in (tmp_path / "two/checkpoint").iterdir()) == ["rank_0", "rank_1"]
    summary = tmp_path / "taken-over/summary.json"
    assert yaml.safe_load(summary.read_text())["steps"] == STEPS


@pytest.mark.skipif(
    not STOCK.exists(),
    reason=f"{STOCK.relative_to(ROOT)} is not here: copy it from tag v1.9.0 of {REPOSITORY}",
)
def test_stock_script(tmp_path: Path) -> None:
    """MindFormers' unmodified script trains our model, to the losses of our own door."""
    small(tmp_path)
    (line,) = (line for line in commands() if "run_mindformer.py" in line)
    line = line.replace("run_mindformer.py", str(STOCK))
    line = line.replace("telechat-moe", "python -m telechat_moe.cli")
    stock = runs.curve(runs.run(["bash", "-c", line], tmp_path))
    (own,) = runs.through_mindformers(tmp_path / "mine.yaml", 1, "--set", "output_dir=own")
    assert len(stock.loss) == STEPS
    for a, b in zip(stock, own, strict=True):
        assert a.tolist() == b.tolist()
