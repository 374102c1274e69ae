"""The versions that this package is tested with, and those that are here. Imports none of the packages."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from telechat_moe.errors import BadInputError


class VersionPair(NamedTuple):
    """Versions of MindFormers and MindSpore that run together, under NumPy 1.

    Attributes:
        extra: The extra of this package that installs MindSpore.
        install: The command that installs both.
    """

    mindformers: str
    mindspore: str
    extra: str
    install: str


PAIRS = (
    VersionPair("1.9.0", "2.9.0", "train", "pip install 'telechat-moe[train,mindformers]'"),
    VersionPair(
        "2.1.0",
        "2.10.0",
        "train210",
        "pip install 'telechat-moe[train210,mindformers21]' && pip install --no-deps mindformers==2.1.0",
    ),
)
"""Tested pairs. 2.1.0's own metadata ask for MindSpore 2.11 and hyper-parallel, which its graph mode does not import."""


def installed(package: str) -> str | None:
    """Return the version of what ``import package`` would find, a checkout too; None if nothing."""
    from importlib.metadata import PackageNotFoundError, version  # a tenth of the command's start

    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    declared = re.search(
        r'^__version__ = "(.+)"$', Path(spec.origin).read_text("utf-8"), re.MULTILINE
    )
    try:
        return declared[1] if declared else version(package)
    except PackageNotFoundError:
        return None


def _line(version: str) -> str:
    """Return a version without its last number, which does not matter."""
    return version.rpartition(".")[0]


def mindformers_version() -> str:
    """Return the tested version of MindFormers that is installed, or of its major number; 1.9.0 if none is."""
    major = (installed("mindformers") or "1").partition(".")[0]
    return next((p.mindformers for p in PAIRS if p.mindformers.startswith(f"{major}.")), "1.9.0")


def mindformers_problem() -> str | None:
    """Return why MindFormers cannot run in this environment and what to do; None if it can."""
    versions = {name: installed(name) or "" for name in ("mindformers", "mindspore", "numpy")}
    lines = _line(versions["mindformers"]), _line(versions["mindspore"])
    tested = [(_line(pair.mindformers), _line(pair.mindspore)) for pair in PAIRS]
    if lines in tested and versions["numpy"].startswith("1."):
        return None
    needs = ", or ".join(f"mindformers {a}.x with mindspore {b}.x" for a, b in tested)
    present = ", ".join(
        f"{name} {version}" if version else f"no {name}" for name, version in versions.items()
    )
    return (
        f"MindFormers runs with numpy 1.x and {needs}; found {present}. "
        f"Install one pair into an environment of its own: {'; or '.join(p.install for p in PAIRS)}"
    )


def require_bfloat16() -> None:
    """Check that MindSpore has bfloat16 here: its wheels are compiled with NumPy 1 and have none under NumPy 2.

    Raises:
        BadInputError: What was found, what is expected, and how to install it.
    """
    numpy = installed("numpy")
    if numpy and not numpy.startswith("1."):
        raise BadInputError(
            f"MindSpore is compiled with NumPy 1 and has no bfloat16 under NumPy 2; found numpy {numpy}, "
            "expected 1.26: pip install 'numpy<2'"
        )


def warn_of_mindformers() -> None:
    """Say on stderr that MindFormers cannot run here, if so: what is asked for is right for another machine."""
    if problem := mindformers_problem():
        sys.stderr.write(f"warning: {problem}\n")


def require_mindformers() -> None:
    """Check that MindFormers can run here, before anything imports it.

    Raises:
        BadInputError: What was found, what is expected, and how to install it.
    """
    problem = mindformers_problem()
    if problem:
        raise BadInputError(problem)


# ------------------------------------------------------------------------------ CANN

ASCEND = Path("/usr/local/Ascend")
"""Where Huawei's installers put driver and CANN."""


def cann_folder(root: Path = ASCEND) -> Path | None:
    """Return the folder of CANN that MindSpore would use; None if there is none."""
    from os import environ

    named = environ.get("ASCEND_HOME_PATH")  # set by CANN's set_env.sh, read by MindSpore
    folders = [Path(named)] if named else []
    folders += [root / name / "latest" for name in ("cann", "ascend-toolkit", "nnae")]
    folders += [root / name for name in ("latest", "cann")]
    return next((path for path in folders if _version_file(path) is not None), None)


def _version_file(folder: Path) -> Path | None:
    """Return the file in which a folder of CANN names its version; MindSpore reads the first."""
    files = [folder / name / "version.info" for name in ("compiler", "runtime", "toolkit")]
    return next((path for path in files if path.is_file()), None)


def version_in(path: Path | None) -> str | None:
    """Return what a ``version.info`` of CANN or of the driver says after ``Version=``; None if it cannot be read."""
    try:
        text = path.read_text("utf-8", "replace") if path is not None else ""
    except OSError:
        return None
    match = re.search(r"^[Vv]ersion\s*=\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else None


def cann_version(root: Path = ASCEND) -> str | None:
    """Return the version of CANN; None if none is installed."""
    folder = cann_folder(root)
    return version_in(_version_file(folder)) if folder is not None else None


def cann_lines() -> list[str]:
    """Return the lines of CANN, such as ``8.5``, that the installed MindSpore names as its own; empty if it names none."""
    spec = find_spec("mindspore")
    if spec is None or spec.origin is None:
        return []
    path = Path(spec.origin).parent / "run_check" / "_check_version.py"
    text = path.read_text("utf-8") if path.exists() else ""
    _, _, checker = text.partition("class AscendEnvChecker")
    match = re.search(r"self\.version = \[([^\]]*)\]", checker)
    return re.findall(r'"([\d.]+)"', match[1]) if match else []


def cann_problem(root: Path = ASCEND) -> str | None:
    """Return why the installed CANN does not fit the installed MindSpore; None if it does, or if either is not known.

    MindSpore itself only warns, and then fails where an operator is missing.
    """
    version, lines = cann_version(root), cann_lines()
    line = ".".join((version or "").split(".")[:2])
    if version is None or not lines or line in lines:
        return None
    return (
        f"MindSpore {installed('mindspore')} runs with CANN {', '.join(lines)}; found {version} in {cann_folder(root)}. "
        "Install a CANN of these lines, or the MindSpore that fits"
    )
