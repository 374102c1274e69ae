"""The versions that the package is tested with: what is said about them, and the suite on the other pair."""

import faulthandler
import inspect
import json
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
from telechat_moe.graph import simulated_device
from telechat_moe.interop.mindformers_config import PLUGIN
from telechat_moe.interop.mindformers_dryrun import compile_mindformers

ROOT = Path(__file__).parents[1]
ONE, OTHER = versions.PAIRS
RECIPE = "telechat3_moe/pretrain_tiny.yaml"
CLEAN = {
    k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "MAKE", "MFLAGS", "VENV"))
}
"""The environment without the settings of the `make` and the pytest that run this."""
PAIR = {"mindformers": "1.9.0", "mindspore": "2.9.0", "numpy": "1.26.4"}


def here(monkeypatch, **found):
    monkeypatch.setattr(versions, "installed", lambda name: {**PAIR, **found}[name])


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"mindspore": "2.9.1"},
        {"numpy": "1.22.0"},
        {"mindformers": "2.1.0", "mindspore": "2.10.0"},
    ],
)
def test_a_pair_that_mindformers_runs_with(found, monkeypatch, capsys):
    here(monkeypatch, **found)
    versions.require_mindformers()
    versions.warn_of_mindformers()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"mindspore": "2.10.0", "numpy": "2.4.6"}, "mindformers 1.9.0, mindspore 2.10.0, numpy 2"),
        ({"mindformers": "2.1.0"}, "mindformers 2.1.0, mindspore 2.9.0"),
        ({"mindformers": "2.0.0", "mindspore": "2.10.0"}, "mindformers 2.0.0, mindspore 2.10.0"),
        ({"mindformers": None}, "no mindformers, mindspore 2.9.0"),
        ({"mindformers": "1.10.0"}, "mindformers 1.10.0"),
        ({"mindspore": None}, "no mindspore"),
        ({"numpy": "2.0.0"}, "numpy 2.0.0"),
    ],
)
def test_other_pairs_are_refused_with_what_is_found_and_needed(found, said, monkeypatch, capsys):
    here(monkeypatch, **found)
    with pytest.raises(BadInputError) as caught:
        versions.require_mindformers()
    for part in (
        "mindformers 1.9.x with mindspore 2.9.x, or mindformers 2.1.x with mindspore 2.10.x; found ",
        *(said, ONE.install, OTHER.install),
    ):
        assert part in str(caught.value)
    with pytest.raises(BadInputError, match="MindFormers runs with"):
        runpy.run_path(str(next(PLUGIN.glob("telechat_moe_plugin.py"))))
    with pytest.raises(BadInputError, match="MindFormers runs with"):
        inspect.unwrap(compile_mindformers)(RECIPE, [0])  # in this process, whose versions are set
    assert main(["plugin-path"]) == 0
    printed = capsys.readouterr()
    assert Path(printed.out.strip()).is_dir()
    assert printed.err == f"warning: {caught.value}\n"
    for use, warning in (("mindformers", printed.err), ("mindformers-2.1", ""), ("dryrun", "")):
        assert main(["check", RECIPE, "--for", use]) in (0, 1)  # what it finds in the recipe
        assert capsys.readouterr().err == warning


@pytest.mark.parametrize(
    ("found", "use", "version"),
    [
        ({"mindformers": None}, "mindformers", "1.9.0"),
        ({"mindformers": "2.1.3"}, "mindformers", "2.1.0"),
        ({"mindformers": "2.0.0"}, "mindformers", "2.1.0"),
        ({"mindformers": "2.2.0"}, "mindformers", "2.1.0"),
        ({}, "mindformers", "1.9.0"),
        ({}, "mindformers-2.1", "2.1.0"),
        ({"mindformers": "2.1.0"}, "mindformers-1.9", "1.9.0"),
    ],
)
def test_check_says_by_which_version_it_judges(found, use, version, monkeypatch, capsys):
    here(monkeypatch, **found)
    assert main(["check", RECIPE, "--for", use, "--set", "telechat_moe={}"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{RECIPE}: ok for mindformers {version}"


def test_numpy_2_is_refused_where_bfloat16_is_needed(monkeypatch):
    here(monkeypatch)
    versions.require_bfloat16()
    here(monkeypatch, numpy="2.4.6")
    with pytest.raises(BadInputError, match=r"found numpy 2.4.6, expected 1.26: pip install"):
        simulated_device.library()


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
    for pair in versions.PAIRS:
        assert f'\n{pair.extra} = [\n    "mindspore=={pair.mindspore}",\n    "numpy<2"' in text
    assert f'mindformers = ["mindformers=={ONE.mindformers}"]' in text


@pytest.mark.parametrize("pair", versions.PAIRS)
def test_the_command_that_installs_a_pair_is_that_of_the_makefile(pair):
    lines = subprocess.run(
        ["make", "-n", "-B", "test", f"MINDSPORE={pair.mindspore}", "VENV=none"],
        cwd=ROOT, capture_output=True, text=True, env=CLEAN, check=True,
    ).stdout  # fmt: skip
    installs = [line.split("-check ")[1] for line in lines.splitlines() if "pip install" in line]
    extras, *commands = (line.removeprefix("pip install ") for line in pair.install.split(" && "))
    documented = set(extras.removesuffix("]'").partition("[")[2].split(","))
    installed = set(installs[1].removesuffix("]'").partition("[")[2].split(","))
    assert installed - {"test", "dev"} == documented
    assert installs[2:] == commands


@pytest.fixture(scope="module")
def numpy_2(tmp_path_factory):
    """The environment of a process that finds NumPy 2 before the installed one."""
    folder = tmp_path_factory.mktemp("numpy")
    command = ["pip", "install", "-q", "--no-deps", "--target", str(folder), "numpy>=2,<3"]
    subprocess.run([sys.executable, "-m", *command], check=True)
    return {**CLEAN, "PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_rooms_without_mindspore_on_numpy_2(numpy_2):
    rooms = [f"tests/{room}" for room in ("recipe", "data", "align", "plan")]
    marks = "not slow and not mindspore and not mindformers and not torch"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", marks, *rooms]
    done = subprocess.run(command, cwd=ROOT, env=numpy_2, capture_output=True, text=True)
    end = done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode == 0, end
    assert int(re.findall(r"(\d+) passed", end)[0]) > 1500, end


@pytest.mark.slow
def test_the_planner_computes_the_same_bits_on_numpy_2(numpy_2, tmp_path):
    command = f"plan layout {RECIPE.replace('tiny', '105b_a4b_4k')} --devices 256 --device ascend-910b --memory 55GiB"
    found = []
    for name, environment in (("1", None), ("2", numpy_2)):
        file = tmp_path / name
        subprocess.run(
            [sys.executable, "-m", "telechat_moe.cli", *command.split(), "--json", str(file)],
            env=environment, check=True, capture_output=True,
        )  # fmt: skip
        found.append({**json.loads(file.read_text()), "seconds": 0})
    assert found[0] == found[1]


VENV = ROOT / f".venv-{OTHER.mindspore}/bin"


def passed(command: list[str]) -> int:
    """Run tests on the other pair, in the environment that the Makefile makes; return how many passed."""
    faulthandler.cancel_dump_traceback_later()  # that of a single test; the mark has a limit for all
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=CLEAN)
    end = f"{run.stdout[-4000:]}{run.stderr[-2000:]}"
    assert run.returncode == 0, end
    count = re.search(r"(\d+) passed", end)
    assert count, end
    code = "import mindspore as s, numpy as n; from telechat_moe.versions import installed as i; "
    code += "print(s.__version__, i('mindformers'), n.__version__, i('hyper_parallel'))"
    printed = subprocess.run([VENV / "python", "-c", code], capture_output=True, text=True).stdout
    assert printed.split() == [OTHER.mindspore, OTHER.mindformers, "1.26.4", "None"]
    return int(count[1])


@pytest.mark.slow
@pytest.mark.timeout(45 * 60)
def test_the_suite_on_the_other_pair():
    assert passed(["make", "test", f"MINDSPORE={OTHER.mindspore}"]) > 3000


@pytest.mark.slow(group="mindformers21")
@pytest.mark.timeout(45 * 60)
def test_the_long_tests_of_mindformers_on_the_other_pair():
    """They train, resume, compile and observe; where the versions differ, they say so."""
    ready = ["make", f"MINDSPORE={OTHER.mindspore}", f"{VENV.parent.name}/.ready-test"]
    subprocess.run(ready, cwd=ROOT, check=True, env=CLEAN)
    group = ["-n", "2", "--dist", "loadgroup", "--slow-group", "mindformers"]
    assert passed([str(VENV / "python"), "-m", "pytest", "-q", *group]) > 20


# ------------------------------------------------------------------------------ CANN


def cann(folder: Path, version: str) -> Path:
    (folder / "compiler").mkdir(parents=True, exist_ok=True)
    info = f"Version={version}\nversion_dir=8.5\ntimestamp=20251204\n"
    (folder / "compiler" / "version.info").write_text(info)
    return folder


@pytest.mark.mindspore
@pytest.mark.parametrize("version", ["8.5.0", "9.0.1", "8.2.RC1.10", "8.1.RC1", "7.7.0.1.238"])
def test_a_cann_fits_where_mindspore_does_not_warn(version, tmp_path, monkeypatch):
    """Judged as MindSpore's own check of it does, which needs the package."""
    checks = pytest.importorskip("mindspore.run_check._check_version")
    warnings = []
    monkeypatch.setattr(checks.logger, "warning", warnings.append)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(cann(tmp_path, version)))
    checks.AscendEnvChecker(None).check_version()
    problem = versions.cann_problem()
    assert (problem is None) == (warnings == [])
    assert versions.cann_version() == version
    if problem is not None:
        assert problem.startswith("MindSpore 2.")
        assert f"found {version} in {tmp_path}. Install" in problem


def test_cann_is_found_where_its_installer_puts_it(tmp_path, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert versions.cann_version(tmp_path) is None
    assert versions.cann_problem(tmp_path) is None
    cann(tmp_path / "ascend-toolkit" / "latest", "1.0")
    assert versions.cann_version(tmp_path) == "1.0"
    assert (versions.cann_problem(tmp_path) is None) == (versions.cann_lines() == [])
