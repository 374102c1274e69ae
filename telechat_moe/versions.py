"""The versions that this package is tested with, and those that are here. Imports none of the packages."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

from telechat_moe.errors import BadInputError

MINDSPORE = {"2.9.0": "train", "2.10.0": "train210"}
"""Tested versions of MindSpore, each with the extra that installs it."""
MINDFORMERS = "1.9.0"
MINDFORMERS_NEEDS = {"mindformers": "1.9", "mindspore": "2.9", "numpy": "1"}
"""What MindFormers 1.9.0 runs with: its own metadata exclude MindSpore 2.10 and NumPy 2."""


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


def mindformers_problem() -> str | None:
    """Return why MindFormers cannot run in this environment and what to do; None if it can."""
    versions = {package: installed(package) for package in MINDFORMERS_NEEDS}
    if all(f"{versions[name]}.".startswith(f"{want}.") for name, want in MINDFORMERS_NEEDS.items()):
        return None
    needs = ", ".join(f"{name} {want}.x" for name, want in MINDFORMERS_NEEDS.items())
    present = ", ".join(f"{name} {has}" if has else f"no {name}" for name, has in versions.items())
    return (
        f"MindFormers needs {needs} together; found {present}. "
        "Install them into an environment of their own: pip install 'telechat-moe[train,mindformers]'"
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
