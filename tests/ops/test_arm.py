"""The library compiled for ARM, its kernels' tests run in an emulated processor: emulation only, no ARM machine.

Each of those tests is the one that runs here, with its float64 bounds; ``arm_library`` has its kernels called there.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from other_library import run_kernel_tests

TOOLS = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
}
# Graphs, which MindSpore runs on this machine, and what takes minutes in emulation.
NOT_THERE = "graph or plain or cells or no_query or no_scores"
TESTS = [f"test_{n}.py" for n in ("accuracy_set", "attention", "gemm", "permute", "routing", "tap")]
TESTS += ["dvm/test_fuzz.py"]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile driver and library."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not here (apt install {package})")
    folder = tmp_path_factory.mktemp("arm")
    driver, library = folder / "arm_calls", folder / "libtelechat_ops.so"
    compiler, source = next(iter(TOOLS)), Path(__file__).with_name("arm_calls.cc")
    subprocess.run([compiler, "-O1", "-Wall", "-Werror", source, "-o", driver, "-ldl"], check=True)
    build = [sys.executable, "-m", "telechat_moe.ops.build", "--out", library]
    subprocess.run(build, check=True, env={**os.environ, "CXX": compiler})
    return f"{driver}{os.pathsep}{library}"


@pytest.mark.slow
@pytest.mark.parametrize("tests", TESTS)
def test_kernels(calls: str, tests: str) -> None:
    done = run_kernel_tests(
        [tests],
        {"ARM_CALLS": calls},
        *("-k", f"not ({NOT_THERE})", "-m", "not torch and not slow"),
        plugin="arm_library",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_it_is_arm_that_computes(calls: str) -> None:
    code = "import arm_library; print(arm_library.native.isa(), arm_library.native.gemm_backend())"
    support = Path(__file__).parents[1] / "support"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ARM_CALLS": calls, "PYTHONPATH": str(support)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["neon", "own"]
