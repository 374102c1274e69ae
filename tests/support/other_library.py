"""The native kernels' tests in a process of their own, with another library or a lower instruction set.

Also the plugin of pytest in that process: ``OTHER_LIBRARY`` names the library, ``ISA`` the instruction set,
``GEMM`` what multiplies matrices.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from telechat_moe.ops import native

TESTS = Path(__file__).parent.parent
BY_ITSELF = ("test_sanitizers.py", "test_instruction_sets.py", "test_arm.py")
"""Files below tests/ops that start such processes."""


def run_kernel_tests(
    tests: Sequence[str | Path],
    environment: Mapping[str, str],
    *options: str,
    plugin: str = "other_library",
) -> subprocess.CompletedProcess[str]:
    """Run tests, named from tests/ops, with ``environment`` beside this process's."""
    command = [sys.executable, "-m", "pytest", "-qsx", "-p", plugin, "-p", "no:cacheprovider"]
    for name in BY_ITSELF:
        command += ["--ignore", str(TESTS / "ops" / name)]
    return subprocess.run(
        [*command, *options, *[str(TESTS / "ops" / t) for t in tests]],
        env={**os.environ, "PYTHONPATH": str(TESTS / "support"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


if "OTHER_LIBRARY" in os.environ:
    native.LIBRARY = Path(os.environ["OTHER_LIBRARY"])
if "ISA" in os.environ:
    native.use_isa(os.environ["ISA"])
if "GEMM" in os.environ:
    native.load().telechat_use_gemm(os.environ["GEMM"].encode())
