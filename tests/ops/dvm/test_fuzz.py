"""The virtual machine against the oracle on random programs."""

import sys
from pathlib import Path

import numpy as np
import pytest

import telechat_moe.ops.dvm as dvm
from telechat_moe.ops import native

sys.path.insert(0, str(Path(__file__).parent))
from random_programs import largest, random_program, worst

CI, LONG = 2_000, 1_000_000
MOST = 100_000_000


def check(seed):
    program, arrays = random_program(np.random.default_rng(seed))
    compiled = dvm.Compiled(program)
    found = compiled(*arrays)
    ratio = worst(program, arrays, found)
    assert ratio <= 1, f"seed {seed}: {ratio:.1f} times the tolerance\n{program}\n" + (
        dvm.explain(program) + "\n" + compiled.disassemble(*[a.shape for a in arrays])
    )
    return compiled, arrays, found


def test_random_programs():
    for seed in range(CI):
        check(seed)


def test_threads_change_no_bit():
    before = native.threads()
    try:
        for seed in range(300):
            native.set_threads(1)
            compiled, arrays, one = check(seed)
            native.set_threads(3)
            for a, b in zip(one, compiled(*arrays), strict=True):
                assert a.tobytes() == b.tobytes(), f"seed {seed}"
    finally:
        native.set_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_million_random_programs(part):
    """About 400 a second on one core."""
    for seed in range(CI + part * LONG // 10, CI + (part + 1) * LONG // 10):
        program, arrays = random_program(np.random.default_rng(seed))
        if largest(program, arrays) < MOST:  # one in some thousands needs 36 GB in the oracle
            check(seed)
