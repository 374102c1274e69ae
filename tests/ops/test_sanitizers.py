"""The kernel-level tests on a checked build: bounds by AddressSanitizer, undefined behaviour, scratch memory full of NaN."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from other_library import run_kernel_tests

SHORT = ["test_attention.py", "dvm/test_programs.py", "test_tap.py", "test_copy.py"]
SHORT += ["../plan/search/test_pipeline.py", "../plan/search/test_placement.py"]
CHOICE = ["-m", "not mindspore and not torch and not slow", "-k", "not no_scores_in_memory"]


def run_sanitized(
    library: Path, tests: list[str | Path], **environment: str
) -> subprocess.CompletedProcess[str]:
    runtime = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        for name in ("libasan.so", "libubsan.so")
    ]
    environment |= {
        "LD_PRELOAD": ":".join(r.stdout.strip() for r in runtime),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "OTHER_LIBRARY": str(library),
    }
    return run_kernel_tests(tests, environment, *CHOICE)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if platform.system() != "Linux":
        pytest.skip("the sanitizers' runtimes are found on Linux only")
    path = tmp_path_factory.mktemp("sanitized") / "libtelechat_ops.so"
    done = subprocess.run(
        [sys.executable, "-m", "telechat_moe.ops.build", "--sanitize", "--out", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.slow
def test_kernels(library):
    done = run_sanitized(library, SHORT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout


@pytest.mark.slow
def test_a_planted_overflow_is_found(library, tmp_path):
    """The sanitizer is really on: a gather from a table that is longer than its memory."""
    script = tmp_path / "test_planted.py"
    script.write_text(
        "import ctypes\nimport numpy as np\nfrom telechat_moe.ops import native\n"
        "def test_planted():\n"
        "    lib = native.load()\n"
        "    extra = ctypes.c_void_p(lib.telechat_attributes_new())\n"
        "    ints = np.zeros(4, np.int64)[:2].copy()\n"
        "    libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p\n"
        "    short = libc.malloc(ctypes.c_size_t(8))\n"
        "    lib.telechat_attributes_list(extra, b'x', short, 1000)\n",
        encoding="utf-8",
    )
    done = run_sanitized(library, [script])
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stdout + done.stderr


@pytest.mark.slow
def test_every_operator(library):
    done = run_sanitized(library, ["."])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
