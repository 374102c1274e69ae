"""Paths that a recipe wants written stay below output_dir, unless asked."""

import dataclasses
from pathlib import Path

import pytest

from docs.generate.recipes_page import sections
from telechat_moe.cli import main
from telechat_moe.recipe import RecipeError, load, shipped_names
from telechat_moe.recipe.written import WRITTEN_KEYS, check_written_paths, written_paths

TINY = "telechat3_moe/pretrain_tiny.yaml"
READ = {  # keys that look like paths and are only read
    *(
        "data_dir",
        "data_files",
        "data_path",
        "dataset_dir",
        "dataset_files",
        "input_data",
        "load_file",
    ),
    *("parallel_speed_up_json_path", "path", "paths", "pretrained_model_dir"),
    *("src_strategy_path_or_dir", "strategy_ckpt_load_file", "test_data_path", "train_data_path"),
    "valid_data_path",
}
NO_PATHS = {"mmap_bin_files"}


def test_every_key_that_may_be_a_path_is_known_as_read_or_written() -> None:
    words = ("path", "dir", "file", "url", "folder", "save_to")
    keys = {f.name for _, cls in sections() for f in dataclasses.fields(cls)}
    suspects = {key for key in keys if any(w in key for w in words)} - {"output_dir"}
    suspects -= {k for k in suspects if "profile" in k}  # of MindSpore, no file
    assert suspects - READ - NO_PATHS - WRITTEN_KEYS == set()


def refusals(*overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        check_written_paths(load(TINY, overrides))
    return str(error.value)


OUT = "output_dir=out/run"
PLACE = "callbacks.2.directory"


@pytest.mark.parametrize(
    "path", ["../elsewhere", "out/../../elsewhere", "/etc/cron.d", "out/link/x", "obs://bucket/x"]
)
def test_a_path_that_leads_outside_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to("/tmp")
    refusal_texts = refusals(OUT, f"{PLACE}={path}")
    assert PLACE in refusal_texts
    assert path in refusal_texts
    assert "--allow-outside" in refusal_texts


def test_all_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = [
        PLACE,
        "context.save_graphs_path",
        "parallel.strategy_ckpt_config.save_file",
        "save_file",
    ]
    refusal_texts = refusals(OUT, *(f"{key}=../x" for key in keys))
    assert all(key in refusal_texts for key in keys)


def test_a_path_that_stays_inside_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside = tmp_path / "out" / "run" / "x"
    for path in (inside, "out/run/x", "graphs", "out/run/../run/y"):
        recipe = load(TINY, [OUT, f"{PLACE}={path}"])
        assert (PLACE, str(path)) in set(written_paths(recipe))
        check_written_paths(recipe)
    # The output folder itself is the user's choice, and data are only read.
    check_written_paths(load(TINY, ["output_dir=../x", "load_checkpoint=/data/old"]))


@pytest.mark.parametrize("name", shipped_names())
def test_no_shipped_recipe_writes_outside(name: str) -> None:
    check_written_paths(load(name))


@pytest.mark.parametrize("verb", ["check", "train"])
def test_links_in_a_circle_are_refused_in_words(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert main([verb, "telechat3_moe/pretrain_tiny.yaml", "--set", "output_dir=loop"]) in (1, 3)
    assert "loop" in "".join(capsys.readouterr())
    code = main(["ls", "--json", "loop"])
    assert (code, capsys.readouterr().err) == (
        2,
        "error: --json loop: cannot be written: links in a circle\n",
    )
