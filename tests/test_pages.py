"""Every page of the documentation runs as printed, alone and after the README, in a fresh folder; its YAML and JSON are valid."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import mini_recipe as mini
import pages
import pytest
import yaml
from pages import PAGES, ROOT
from tokenizers import Tokenizer, models

from telechat_moe.cli import main
from telechat_moe.recipe import load

RUNNABLE = [page for page in PAGES if pages.commands(page) and page.name not in pages.ELSEWHERE]
# One worker runs a page alone and after the README: on two, both would want the ports that it prints.
EACH_PART = [
    pytest.param(page, part, id=name, marks=pytest.mark.xdist_group(name))
    for page in RUNNABLE
    for part in range(len(pages.parts(page)))
    for name in [f"{page.stem}{part or ''}"]
]
README = ROOT / "README.md"
TINY = "telechat3_moe/pretrain_tiny.yaml"


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{page.name}:{line}", text)
        for page in PAGES
        for line, tongue, text in pages.blocks(page)
        if tongue == language
    ]


@pytest.mark.parametrize(("place", "text"), blocks("yaml"), ids=lambda x: x[:40])
def test_yaml_is_part_of_a_recipe(place: str, text: str) -> None:
    content = yaml.safe_load(text)
    if "variants" in content:  # the file of a sweep
        return
    settings = flat(content)
    beside = [change for key, _ in settings for change in pages.TOGETHER.get(key, [])]
    load(TINY, [*(f"{key}={json.dumps(value)}" for key, value in settings), *beside])


def flat(content: dict[str, object], above: str = "") -> list[tuple[str, object]]:
    """Return the settings of a recipe's sections, one by one."""
    settings: list[tuple[str, object]] = []
    for key, value in content.items():
        name = f"{above}.{key}" if above else key
        settings += flat(value, name) if isinstance(value, dict) and value else [(name, value)]
    return settings


@pytest.mark.parametrize(("place", "text"), blocks("json"), ids=lambda x: x[:40])
def test_json_is_valid(place: str, text: str) -> None:
    try:
        json.loads(text)
    except json.JSONDecodeError:  # one value a line
        assert [json.loads(line) for line in text.splitlines()], place


def test_every_command_is_in_a_block_that_runs() -> None:
    """A command in a block of another kind needs a cluster, a set-up or files of the reader's own."""
    start = re.compile(r"(\$ )?(telechat-moe|python3?|msrun|make|tar|mkdir) ")
    others = [
        (f"{page.name}", line.strip())
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for _, language, text in pages.blocks(page)
        for line in text.splitlines()
        if language != "sh" and start.match(line.strip())
    ]
    assert others
    assert [(p, c) for p, c in others if not any(c.startswith(x) for x in pages.NOT_RUN)] == []


@pytest.fixture(scope="session")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.short_recipes(tmp_path_factory.mktemp("pages") / "recipes")


def test_the_recipes_of_pages_have_short_ones(recipes: Path) -> None:
    """The texts that make a run short stand in the shipped recipes; what runs the pages is slow."""
    for name, changes in pages.SHORT.items():
        assert all(short in (recipes / name).read_text("utf-8") for short in changes.values())


@pytest.fixture(scope="session")
def after_readme(tmp_path_factory: pytest.TempPathFactory, recipes: Path) -> Path:
    """Return a folder in which a reader has run the README: what `make train` does, and the five minutes."""
    folder = pages.fresh_folder(tmp_path_factory.mktemp("pages") / "readme")
    plan = subprocess.run(
        ["make", "-n", "--no-print-directory", "train"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    lines = [line for line in plan if re.match(r"\S*bin/telechat-moe ", line)]
    assert len(lines) == 2
    for line in lines:
        text = re.sub(r"^\S*bin/", "", line)
        succeed(pages.Command(0, text), folder, recipes)
    for command in pages.commands(README):
        if not command.text.startswith("make "):  # .ci/run runs these
            succeed(command, folder, recipes)
    return folder


def succeed(command: pages.Command, folder: Path, recipes: Path) -> str:
    process = pages.run(command, folder, recipes)
    report = f"{command.line}: {command.text}\n{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    assert process.returncode in command.codes, f"exit code {process.returncode} of line {report}"
    return process.stdout + process.stderr


@pytest.mark.slow
@pytest.mark.mindspore
@pytest.mark.parametrize("when", ["alone", "after the README"])
@pytest.mark.parametrize(("page", "part"), EACH_PART)
def test_a_page_runs_as_printed(
    page: Path, part: int, when: str, tmp_path: Path, recipes: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "clone"
    if when == "alone":
        pages.fresh_folder(folder)
    else:
        shutil.copytree(request.getfixturevalue("after_readme"), folder, symlinks=True)
        if page == README:
            return
    printed = ""
    for command in pages.parts(page)[part]:
        if not any(command.text.startswith(words) for words in pages.NOT_RUN):
            printed += succeed(command, folder, recipes)
    pages.AFTERWARDS.get(page.name, lambda folder, printed: None)(folder, printed)


def test_make_train_ends_with_how_to_use_the_command() -> None:
    dry = ["make", "-n", "--no-print-directory", "train"]  # a make around this one would add lines
    plan = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "/bin/activate" in plan.stdout.splitlines()[-1]


def test_ci_begins_with_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    first = [c.text for c in pages.commands(README) if c.text.startswith("make ")]
    assert first == ["make train", "make test"]
    assert "\n".join(["", "make clean", *first, ""]) in script, "before anything else is installed"


def python_blocks() -> list[tuple[str, str]]:
    return [
        (place, text) for place, text in blocks("python") if place.partition(":")[0] != "align.md"
    ]


@pytest.mark.mindspore
@pytest.mark.parametrize(("place", "text"), python_blocks(), ids=lambda x: x[:40])
def test_python_runs(place: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(text, place, "exec"), {})
    printed = capsys.readouterr().out
    if place.startswith("ops.md"):  # the instructions; the header depends on the cache
        page = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
        shown = re.findall(r"prints\n\n```\n(.*?)```", page, re.S)[0]
        printed_rows, shown_rows = (
            [line.split()[2:] for line in x.splitlines() if line.startswith("    ")]
            for x in (printed, shown)
        )
        assert printed_rows == shown_rows
        assert shown.splitlines()[0] in printed


def test_the_error_of_the_readme_is_what_a_user_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cp", TINY, "mine.yaml"]) == 0
    path = tmp_path / "mine.yaml"
    path.write_text(path.read_text().replace("pipeline_stage:", "pipline_stage:"))
    data = tmp_path / "output/data"  # as the README has built them before
    data.mkdir(parents=True)
    mini.write_data(data)
    Tokenizer(models.WordLevel({"<|endoftext|>": 0})).save(str(data / "tokenizer.json"))
    capsys.readouterr()
    assert main(["check", "mine.yaml"]) == 1
    message = capsys.readouterr().out.strip()
    assert message in README.read_text(encoding="utf-8")
