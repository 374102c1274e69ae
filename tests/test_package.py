"""What an install must bring along beside the modules."""

import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from setuptools import distutils  # type: ignore[attr-defined]

from telechat_moe import __version__

ROOT = Path(__file__).parents[1]


def test_every_file_of_the_package_is_installed():
    found = distutils.core.run_setup(str(ROOT / "setup.py"), stop_after="init")
    listed = subprocess.run(
        ["git", "ls-files", "telechat_moe", "ops", "tools", "recipes"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    missing = []
    for name in listed:
        path = Path(name)
        package = ".".join(path.parent.parts)
        package = package if package.startswith("telechat_moe") else f"telechat_moe.{package}"
        patterns = [
            f"{p}.{g}".replace("/", ".") for p, globs in found.package_data.items() for g in globs
        ]
        installed = any(fnmatch(f"{package}.{path.name}", pattern) for pattern in patterns)
        if path.suffix == ".py" and package in found.packages:
            installed = True
        if not installed:
            missing.append(name)
    assert missing == []


def test_the_wheel_the_command_and_the_changelog_have_one_version():
    wheel = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()[-1]  # fmt: skip
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [wheel, *re.findall(r"(?m)^## (\d+\.\d+\.\d+)", changelog)][:2] == [__version__] * 2


def test_both_native_libraries_are_installed(tmp_path):
    """A compiler that only creates what it is asked for stands in for g++."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = -dumpmachine ] && exec uname -m\nwhile [ "$1" != "-o" ]; do shift; done\n: > "$2"\n',
        encoding="utf-8",
    )
    compiler.chmod(0o755)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT, env={**os.environ, "CXX": str(compiler)}, capture_output=True, check=True,
    )  # fmt: skip
    found = [str(p.relative_to(tmp_path / "lib")) for p in tmp_path.glob("lib/**/*.so")]
    assert sorted(found) == [
        "telechat_moe/ops/libtelechat_ops.so",
        "telechat_moe/tools/plan/native/libtelechat_planner.so",
    ]
