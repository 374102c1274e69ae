"""The versions that the package is tested with: what is said about them, and the suite on the other MindSpore."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from telechat_moe import versions
from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.interop.mindformers_config import PLUGIN
from telechat_moe.interop.mindformers_dryrun import compile_mindformers

ROOT = Path(__file__).parents[1]
OTHER = "2.10.0"
PAIR = {"mindformers": "1.9.0", "mindspore": "2.9.0", "numpy": "1.26.4"}


def here(monkeypatch, **found):
    monkeypatch.setattr(versions, "installed", lambda name: {**PAIR, **found}[name])


@pytest.mark.parametrize(
    "found",
    [{}, {"mindspore": "2.9.1"}, {"numpy": "1.22.0"}],
)
def test_a_pair_that_mindformers_runs_with(found, monkeypatch):
    here(monkeypatch, **found)
    assert versions.mindformers_problem() is None
    versions.require_mindformers()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"mindspore": "2.10.0", "numpy": "2.4.6"}, "mindformers 1.9.0, mindspore 2.10.0, numpy 2"),
        ({"mindformers": None}, "no mindformers, mindspore 2.9.0"),
        ({"mindformers": "1.10.0"}, "mindformers 1.10.0"),
        ({"mindspore": None}, "no mindspore"),
        ({"numpy": "2.0.0"}, "numpy 2.0.0"),
    ],
)
def test_other_pairs_are_refused_with_what_is_found_and_needed(found, said, monkeypatch, capsys):
    here(monkeypatch, **found)
    expected = "needs mindformers 1.9.x, mindspore 2.9.x, numpy 1.x together; found "
    with pytest.raises(BadInputError) as caught:
        versions.require_mindformers()
    for part in (expected, said, "pip install 'telechat-moe[train,mindformers]'"):
        assert part in str(caught.value)
    with pytest.raises(BadInputError, match="MindFormers needs"):
        runpy.run_path(str(next(PLUGIN.glob("telechat_moe_plugin.py"))))
    with pytest.raises(BadInputError, match="MindFormers needs"):
        compile_mindformers("telechat3_moe/pretrain_105b_a4b_4k.yaml", [0])
    assert main(["plugin-path"]) == 0
    printed = capsys.readouterr()
    assert Path(printed.out.strip()).is_dir()
    assert printed.err == f"warning: {caught.value}\n"


def test_a_checkout_before_the_installed_one(tmp_path, monkeypatch):
    assert versions.installed("numpy") == sys.modules["numpy"].__version__
    for name, text in (("mindformers", '__version__ = "7.8.9"\n'), ("no_version", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mindformers", raising=False)
    assert versions.installed("mindformers") == "7.8.9"
    assert versions.installed("no_version") is None
    assert versions.installed("no_such_package") is None


def test_extras_install_what_is_tested():
    text = (ROOT / "pyproject.toml").read_text()
    for version, extra in versions.MINDSPORE.items():
        assert f'\n{extra} = [\n    "mindspore=={version}"' in text
        assert f"TRAIN_{version}" in (ROOT / "Makefile").read_text()
    assert f'mindformers = ["mindformers=={versions.MINDFORMERS}"]' in text


@pytest.mark.slow
@pytest.mark.timeout(45 * 60)
def test_the_suite_on_the_other_mindspore():
    """All of `make test`, without MindFormers, which has no version for it."""
    done = subprocess.run(
        ["make", "test", f"MINDSPORE={OTHER}"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MAKEFLAGS": ""},
    )  # fmt: skip
    end = f"{done.stdout[-4000:]}{done.stderr[-2000:]}"
    assert done.returncode == 0, end
    passed = re.search(r"(\d+) passed", end)
    assert passed, end
    assert int(passed[1]) > 3000, end
    python = ROOT / f".venv-{OTHER}/bin/python"
    said = subprocess.run(
        [python, "-c", "import mindspore, numpy; print(mindspore.__version__, numpy.__version__)"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert said[0] == OTHER
    assert said[1].startswith("2.")
