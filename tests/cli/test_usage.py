"""What a user sees who mistypes: the verb's own usage, the nearest spelling, and what to do."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_random_lines import LEAVES

from telechat_moe.cli import main
from telechat_moe.cli.verb import VerbParser
from telechat_moe.recipe import load

TINY = "telechat3_moe/pretrain_tiny.yaml"
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("line", "usage", "message"),
    [
        ("chek mine.yaml", "telechat-moe [-h]", "did you mean check?"),
        ("data biuld", "telechat-moe data [-h]", "did you mean build?"),
        ("train --resme x.yaml", "telechat-moe train [-h]", "unrecognized arguments: --resme; did you mean --resume?"),
        ("ls --jsn=-", "telechat-moe ls [-h]", "did you mean --json?"),
        ("plan layout x --devices two", "telechat-moe plan layout [-h]", "invalid int value: 'two'"),
        ("launch x --through theirs", "telechat-moe launch [-h]", "invalid choice: 'theirs'"),
        ("align merge a b", "telechat-moe align [-h]", "merge was removed: `align REFERENCE TARGET` joins the shards"),
        ("align map a b c", "telechat-moe align [-h]", "--map-out FILE writes it"),
        ("align convert a b", "telechat-moe align [-h]", "`align inspect DUMP --out OUT`"),
        ("cp a b c", "telechat-moe cp [-h]", "unrecognized arguments: c"),
    ],
)  # fmt: skip
def test_a_usage_error_shows_the_verb_s_usage(
    line: str, usage: str, message: str, capsys: Capture
) -> None:
    assert main(line.split()) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"usage: {usage}")
    assert message in text
    assert " --help` explains all arguments." in text


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("planned.yaml", ""),
        ("telechat3_moe/pretrain_tinny.yaml", TINY),
        ("pretrain_tiny", TINY),
        ("n" * 5000, ""),
    ],
)
def test_only_a_near_name_is_suggested_for_a_file_that_is_absent(
    name: str, suggestion: str, capsys: Capture
) -> None:
    assert main(["show", name]) == 3
    text = capsys.readouterr().err
    assert "; expected a file, or a recipe that `telechat-moe ls` lists" in text
    assert ("did you mean" in text) == bool(suggestion)
    assert suggestion in text


@pytest.mark.parametrize("words", [words for words, _ in LEAVES], ids=" ".join)
def test_every_verb_takes_json(words: Sequence[str]) -> None:
    verb = dict(LEAVES)[tuple(words)]
    assert "--json" in VerbParser(verb)._option_string_actions


def test_plugin_path_writes_json(capsys: Capture) -> None:
    assert main(["plugin-path"]) == 0
    path = capsys.readouterr().out.strip()
    assert main(["plugin-path", "--json", "-"]) == 0
    assert f'"path": "{path}"' in capsys.readouterr().out


def test_data_build_takes_settings_of_its_recipe(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text.txt").write_text("one\n" * 50)
    (tmp_path / "more.txt").write_text("two\n" * 50)
    line = ["data", "build", "--out", str(tmp_path / "data"), "--set", "seed=7"]
    assert main(line) == 2
    assert "name it with --recipe" in capsys.readouterr().err
    paths = f"telechat_moe.corpus.paths=['{tmp_path}/text.txt', '{tmp_path}/more.txt']"
    settings = ["--set", paths, "--set", "telechat_moe.corpus.valid_fraction=0.5", "--json", "-"]
    code = main([*line, "--recipe", TINY, *settings])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert '"seed": 7' in output.out


def test_equal_lines_are_counted_as_one_text(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "equal.jsonl").write_text('{"text": "the same line"}\n' * 50)
    line = [
        "data",
        "build",
        "--corpus",
        str(tmp_path / "equal.jsonl"),
        "--out",
        str(tmp_path / "data"),
    ]
    assert main(line) == 3
    assert "50 documents, 1 of them distinct" in capsys.readouterr().err


def test_a_copy_gets_an_output_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """So README's commands work where `make train` has left its run in output/."""
    monkeypatch.chdir(tmp_path)
    assert main(["cp", TINY, "mine.yaml", "--output-dir", 'a "b": c']) == 0
    assert load("mine.yaml").output_dir == 'a "b": c'
    assert main(["cp", TINY, "same.yaml"]) == 0
    assert load("same.yaml").output_dir == load(TINY).output_dir
    Path("bare.yaml").write_text("seed: 1\n")
    assert main(["cp", "bare.yaml", "other.yaml", "--output-dir", "x"]) == 3
    assert "needs one line output_dir:" in capsys.readouterr().err


def test_a_layout_s_label_names_optimizer_sharding(capsys: Capture) -> None:
    name = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
    assert main(["layouts", name]) == 0
    assert "dp4 tp8 pp8 sp ep4 zero1, 256 devices" in capsys.readouterr().out
    assert main(["layouts", name, "--set", "parallel.enable_parallel_optimizer=False"]) == 0
    assert "dp4 tp8 pp8 sp ep4, 256 devices" in capsys.readouterr().out


def test_no_warning_of_a_library_is_shown(tmp_path: Path) -> None:
    """Losses that overflow as they are added, which NumPy reports on standard error."""
    for name, last in (("a", 1.0), ("b", 1e308)):
        rows = [{"event": "step", "step": i, "loss": last, "grad_norm": 1.0} for i in range(1, 99)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code = "import sys; from telechat_moe.cli import main; sys.exit(main())"
    line = ["align", "loss", "a.jsonl", "b.jsonl"]
    command = [sys.executable, "-c", code, *line]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode in (1, 4)
    assert process.stderr == ""
    verbose = [sys.executable, "-W", "default", *command[1:]]
    shown = subprocess.run(verbose, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "RuntimeWarning: overflow" in shown.stderr
