"""What a run begins with: every combination of `load_checkpoint`, `resume_training`, output_dir and flags."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.checkpoint import checkpoint
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.recipe import load
from telechat_moe.train.start import RunStart, start_of

DOCS = Path(__file__).parents[2] / "docs/checkpoints.md"
OUTPUT = ("fresh", "holds a run")
FLAG = ("none", "--resume", "--overwrite")
LOAD = ("empty", "missing", "checkpoint", "checkpoints folder", "Hugging Face")
RESUME = ("False", "True", "name", "path")
TINY = "telechat3_moe/pretrain_tiny.yaml"


def rows() -> list[tuple[list[str], str]]:
    """Return the rows of the table in the docs: four conditions and what happens."""
    text = DOCS.read_text(encoding="utf-8").partition("| `output_dir` | flag |")[2]
    found: list[tuple[list[str], str]] = []
    for line in text.splitlines()[2:]:
        if not line.startswith("|"):
            break
        *given, happens = (cell.strip().replace("`", "") for cell in line.strip("|").split("|"))
        found.append((given, happens))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with checkpoints of the steps 1 and 2, and a Hugging Face folder."""
    root = tmp_path_factory.mktemp("start")
    tensors = {"model": {"norm.weight": np.ones(4, np.float32)}}
    for run, step in product(("mine", "other"), (1, 2)):
        checkpoint.save(root / run / "checkpoints", step, tensors, {"run": run})
    (root / "hf").mkdir()
    (root / "hf/config.json").write_text("{}")
    return root


def begin(place: Path, output: str, flag: str, given: str, resume: str) -> RunStart:
    other = place / "other/checkpoints"
    path = {
        **{"empty": "", "missing": place / "nothing", "Hugging Face": place / "hf"},
        **{"checkpoint": other / "step-00000002", "checkpoints folder": other},
    }[given]
    word = {"name": "step-00000002", "path": other / "step-00000002"}.get(resume, resume)
    folder = place / ("mine" if output == "holds a run" else "fresh")
    settings = [f"load_checkpoint={str(path)!r}", f"resume_training={word}", f"output_dir={folder}"]
    return start_of(load(TINY, settings), resume="resume" in flag, overwrite="over" in flag)


def happens(place: Path, start: RunStart) -> str:
    if start.kind == "random":
        return "random weights, step 0"
    if start.kind == "weights":
        return "its weights, step 0"
    assert start.path is not None
    assert start.path.name == "step-00000002"
    assert start.continues_run == start.path.is_relative_to(place / "mine")
    return "that run goes on" if start.continues_run else "step, optimizer and data go on from it"


@pytest.mark.parametrize("case", list(product(OUTPUT, FLAG, LOAD, RESUME)), ids=", ".join)
def test_the_table_of_the_docs(place: Path, case: tuple[str, ...]) -> None:
    """The first row that fits says what happens."""
    expected = next(
        said
        for given, said in rows()
        if all(g in ("any", c) for g, c in zip(given, case, strict=True))
    )
    if expected.startswith("refused"):
        with pytest.raises(BadInputError if "(3)" in expected else UsageError):
            begin(place, *case)
    else:
        assert happens(place, begin(place, *case)) == expected


def test_every_row_is_needed() -> None:
    cases = list(product(OUTPUT, FLAG, LOAD, RESUME))
    first = [
        next(
            i
            for i, (given, _) in enumerate(rows())
            if all(g in ("any", c) for g, c in zip(given, case, strict=True))
        )
        for case in cases
    ]
    assert set(first) == set(range(len(rows())))


def test_an_older_checkpoint_of_the_same_run_is_not_gone_back_to(place: Path) -> None:
    settings = [f"output_dir={place}/mine", "resume_training=step-00000001"]
    with pytest.raises(UsageError, match=r"newest step-00000002"):
        start_of(load(TINY, settings))


def test_the_note_says_what_is_not_read(place: Path) -> None:
    assert "load_checkpoint" in begin(place, "holds a run", "--resume", "missing", "True").note
    assert not begin(place, "holds a run", "--resume", "empty", "False").note


def test_the_folder_of_a_run_is_not_its_checkpoints(place: Path) -> None:
    with pytest.raises(BadInputError, match=re.escape(f"did you mean '{place}/other/checkpoints'")):
        start_of(load(TINY, [f"load_checkpoint={place}/other", f"output_dir={place}/fresh"]))


def test_a_pretrained_model_s_weights_are_loaded_where_nothing_else_is(place: Path) -> None:
    settings = [f"pretrained_model_dir={place}/hf", f"output_dir={place}/fresh"]
    assert start_of(load(TINY, settings)).kind == "random"
    (place / "hf/model.safetensors").write_bytes(b"")
    start = start_of(load(TINY, settings))
    (place / "hf/model.safetensors").unlink()
    assert (start.kind, start.key, start.path) == ("weights", "pretrained_model_dir", place / "hf")
