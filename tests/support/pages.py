"""The pages of the documentation as a reader has them: their blocks, a fresh folder, and short runs.

In an ``sh`` block stand commands that run as printed, in order, in a clone's root. A command whose comment says ``exit code N``
or ``N or M`` ends with these. ``bash``: commands that need a cluster, a set-up or files of the reader's own (``NOT_RUN``). No language: output.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORTER = 50
"""A run of the tiny recipes has this many times fewer steps than the shipped one, and so has the number of each checkpoint."""

SHORT: dict[str, dict[str, str]] = {
    "telechat3_moe/pretrain_tiny.yaml": {
        "- 4000 ": "- 80 ",
        "warmup_steps: 100": "warmup_steps: 1",
        "learning_rate: 3.e-3": "learning_rate: 3.e-4",  # else five steps tip a token to another expert
        "save_checkpoint_steps: 200": "save_checkpoint_steps: 4",
        "interval: 100": "interval: 10",
        "batches: 16": "batches: 1",
        "max_new_tokens: 64": "max_new_tokens: 2",
    },
    "telechat3_moe/finetune_tiny.yaml": {
        "- 1600 ": "- 32 ",
        "warmup_steps: 20": "warmup_steps: 1",
        "save_checkpoint_steps: 100": "save_checkpoint_steps: 2",
        "interval: 50": "interval: 2",
        "batches: 16": "batches: 1",
        "max_new_tokens: 32": "max_new_tokens: 2",
    },
    "sweeps/telechat3_moe/pilot.yaml": {
        "sizes=[2400, 0, 0]": "sizes=[16, 0, 0]",
        "warmup_steps=30": "warmup_steps=1",
        "save_checkpoint_steps=150": "save_checkpoint_steps=2",
        "interval=50": "interval=1",
        "batches=24": "batches=1",
        "seeds: [1, 2, 3]": "seeds: [1]",
    },
}
"""Texts of the shipped recipes and what stands there in a short run."""

QUICK: dict[str, str] = {
    "python -m benchmarks.ops --quick": " --only cross-entropy --threads 1",
}
"""What is appended to a benchmark's command so that it takes seconds; of an option that is there twice the last one counts."""

NOT_RUN: dict[str, str] = {
    "make ": ".ci/run begins with the README's, and runs the others after them",
    "telechat-moe launch eight.yaml": "eight NPUs",
    "telechat-moe launch cluster.yaml": "256 NPUs",
    'python -c "import mindspore; mindspore.set_device': "an NPU",
    "msrun --worker_num=256": "256 NPUs",
    "run_mindformer.py": "continues the line above",
    "telechat-moe align gpu_dump npu_dump": "dumps of the reader's own",
    "telechat-moe align golden npu_dump": "dumps of the reader's own",
    "telechat-moe align fp32_dump bf16_dump": "dumps of the reader's own",
    "telechat-moe align run_a run_b": "dumps of the reader's own",
    "telechat-moe align run_a/checkpoints": "runs of the reader's own",
    "telechat-moe align loss base1": "curves of the reader's own",
    "telechat-moe align phases mine.yaml": "runs of the reader's own",
    "telechat-moe dryrun planned.yaml": "five minutes, the claim plan-confirm; test_dryrun_plans.py confirms smaller plans",
    "telechat-moe dryrun telechat3_moe/pretrain_105b_a4b_4k.yaml --run": "five minutes; test_run_graphs.py does it with smaller recipes",
    "sh benchmarks/peers/mindtorch.sh msenv": "test_mindtorch.py runs it and the three below",
    "telechat-moe align capture --torch benchmarks/peers/plain_torch.py": "test_mindtorch.py",
    "telechat-moe align torch_run mindspore_run": "test_mindtorch.py",
    "pip install": "`make test-torch` installs it",
}
"""Commands by their beginning, and why the test of the pages does not run them."""

ELSEWHERE = {
    "data.md": "tests/data/test_data_docs.py",  # corpora of the reader's own
}
"""Pages whose commands another test runs."""

ANEW = {"align.md": "## Two "}
"""Pages whose sections with such a heading begin anew, in a fresh folder; each part is a test, since together they take long."""

COLUMNS = "[input_ids, labels, loss_mask, position_ids, attention_mask]"
TOGETHER: dict[str, list[str]] = {
    "runner_config.gradient_accumulation_steps": ["callbacks.1.gradient_accumulation_steps=4"],
    "telechat_moe.mixture": [
        "train_dataset.data_loader.config.data_path=[web/train, code/train]",
        "telechat_moe.evaluation.data_path=null",
    ],
    "telechat_moe.packing.window": [
        f"train_dataset.input_columns={COLUMNS}",
        f"train_dataset.construct_args_key={COLUMNS}",
    ],
    "callbacks": ["model.model_config.moe_router_enable_expert_bias=False"],
    "swap_config.swap": ["model.model_config.num_hidden_layers=8"],
}
"""Settings that the YAML of a page needs beside one of its own."""


def _checkpoints(folder: Path, printed: str) -> None:
    saved = folder / "output/checkpoints/step-00000020"
    assert any(saved.iterdir())
    for copy in ("merged", "whole"):
        for path in saved.iterdir():
            assert (folder / copy / saved.name / path.name).read_bytes() == path.read_bytes()


AFTERWARDS: dict[str, Callable[[Path, str], None]] = {"checkpoints.md": _checkpoints}
"""What must be there when a page was run: called with the folder and all that was printed."""


@dataclass(frozen=True)
class Command:
    """A command of a page: its line number, its text and the exit codes that its comment promises."""

    line: int
    text: str
    codes: tuple[int, ...] = (0,)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Return line, language and text of a page's code blocks."""
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^( *)```(\w*)\n(.*?)^ *```$", text, re.S | re.M)
    return [
        (text[: m.start()].count("\n") + 2, m[2], re.sub(rf"^{m[1]}", "", m[3], flags=re.M))
        for m in fences
    ]


def commands(page: Path) -> list[Command]:
    """Return the commands of a page's ``sh`` blocks, continued lines joined."""
    listed: list[Command] = []
    for first, language, text in blocks(page):
        if language != "sh":
            continue
        number = first
        for line in re.split(r"(?<!\\)\n", text.rstrip("\n")):
            codes = re.search(r"#.*\bexit code (\d+)(?: or (\d+))?", line)
            if line.strip():
                promised = tuple(int(code) for code in codes.groups() if code) if codes else (0,)
                listed.append(Command(number, line, promised))
            number += line.count("\n") + 1
    return listed


def parts(page: Path) -> list[list[Command]]:
    """Return the commands of a page, in parts that do not need each other."""
    begin = ANEW.get(page.name)
    lines = page.read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines, start=1) if begin and line.startswith(begin)]
    ends = [*starts, len(lines) + 1]
    listed = commands(page)
    return [
        [command for command in listed if first <= command.line < end]
        for first, end in zip([0, *starts], ends, strict=True)
    ]


def short_recipes(folder: Path) -> Path:
    """Copy the shipped recipes, those of long runs on a laptop with short ones."""
    shutil.copytree(ROOT / "recipes", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in SHORT.items():
        path = folder / name
        text = path.read_text(encoding="utf-8")
        for shipped, short in changes.items():
            assert text.count(shipped) == 1, f"{name}: {shipped!r}"
            text = text.replace(shipped, short)
        path.write_text(text, encoding="utf-8")
    return folder


def fresh_folder(folder: Path) -> Path:
    """Make a folder like a clone's root before anything was run in it."""
    folder.mkdir(parents=True)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in {line.split("/")[0] for line in listed}:
        (folder / name).symlink_to(ROOT / name)
    stock = ROOT / "tests/fixtures/mindformers/run_mindformer.py"
    if stock.exists():
        (folder / stock.name).symlink_to(stock)
    return folder


def scaled(text: str) -> str:
    """Return a command with the numbers of the short run's checkpoints.

    A step that the shipped recipe does not save has none: that is a mistake of the page.
    """

    def step(match: re.Match[str]) -> str:
        steps, left = divmod(int(match[1]), SHORTER)
        assert not left, f"{match[0]}: the recipe saves no such step"
        return f"step-{steps:08d}"

    text = text.replace("--steps 0-99", f"--steps 0-{1000 // SHORTER - 1}")
    return re.sub(r"step-(\d{8})", step, text)


def run(command: Command, folder: Path, recipes: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a reader would, in a shell of its own."""
    support = Path(__file__).parent
    text = scaled(command.text)
    for line, options in QUICK.items():
        if text.startswith(line):
            text = text.partition("  #")[0] + options
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(support / "short_recipes"),
        "TELECHAT_MOE_RECIPES": str(recipes),
    }
    return subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
