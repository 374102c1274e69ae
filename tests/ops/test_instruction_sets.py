"""The kernels' tests with each instruction set by force; what the processor lacks is skipped by name."""

import os
import subprocess
import sys

import numpy as np
import pytest
from other_library import run_kernel_tests

from telechat_moe.ops import native

CHOICE = "not torch and not slow"
SOME = "own or types or special or ulp or bytes or values_and_gradients or any_width or collide"


def check(isa: str, tests: list[str], *options: str, **environment: str) -> None:
    """Run tests below tests/ops with an instruction set."""
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")
    done = run_kernel_tests(tests, {"ISA": isa, **environment}, *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("isa", native.ISAS)
def test_some_kernels_without_onednn(isa: str) -> None:
    some = ["test_gemm.py", "test_attention.py", "test_tap.py", "dvm/test_programs.py"]
    check(isa, some, "-k", SOME, "-m", f"not mindspore and {CHOICE}", GEMM="own")


@pytest.mark.slow
@pytest.mark.parametrize("gemm", ["onednn", "own"])
@pytest.mark.parametrize("isa", native.ISAS)
def test_every_kernel(isa: str, gemm: str) -> None:
    """But MindSpore's own: its sums have other bounds where oneDNN has fewer instructions."""
    check(isa, ["."], "-k", "not plain", "-m", CHOICE, GEMM=gemm)


def log_sums() -> bytes:
    """The bits of sums over rows."""
    x = np.random.default_rng(0).standard_normal((50, 5000)).astype(np.float32)
    loss, lse = np.empty(1, np.float32), np.empty((50, 2), np.float32)
    label, mask = np.zeros(50, np.int32), np.ones(50, np.float32)
    native.Kernel("CrossEntropy", {"z_loss": 0.0})([x, label, mask], [loss, lse])
    return lse.tobytes()


def test_the_set_that_is_forced_computes() -> None:
    """Vectors of another width add in another order."""
    code = "import sys; import test_instruction_sets as t; t.native.use_isa(sys.argv[1]); print(t.native.isa(), t.log_sums().hex())"
    found = {}
    for isa in native.isas():
        done = subprocess.run(
            [sys.executable, "-c", code, isa],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        name, found[isa] = done.stdout.split()
        assert name == isa
    found.pop("amx", None)  # its vectors are those of avx512
    assert len(set(found.values())) == len(found)


LACKING = next(isa for isa in reversed(native.ISAS) if isa not in native.isas())


@pytest.mark.parametrize(
    ("isa", "says"),
    [
        ("sse9", "'sse9' is none: scalar, avx2, avx512, amx or neon expected"),
        (LACKING, f"this processor has no {LACKING}, its best is"),
        ("scalar", "the operators already use|this processor has no scalar"),
    ],
)
def test_a_set_that_cannot_be_is_refused(isa: str, says: str) -> None:
    log_sums()
    before = native.isa()
    with pytest.raises(native.NativeError, match=says):
        native.use_isa(isa)
    assert native.isa() == before
