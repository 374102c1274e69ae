"""Small records for tests: ranks that are alike but for noise, and what is put into them."""

import numpy as np

from telechat_moe.tools.diagnose.records import Records

STEPS = 80


def alike(ranks: int = 16, stages: int = 1, seed: int = 0) -> Records:
    """Return records of ranks that are alike: computing 0.8 s with 1 % of noise, 0.1 s on the host, four ranks to a host."""
    rng = np.random.default_rng(seed)
    shape = (ranks, STEPS)

    def around(mean: float, share: float) -> np.ndarray:
        return (mean * (1 + share * rng.standard_normal(shape))).astype(np.float32)

    rows, work = around(1000, 0.02), around(5000, 0.02)
    columns = {
        "data": around(0.01, 0.1),
        "host": around(0.1, 0.02),
        "compute": around(0.8, 0.01) + 1e-4 * (rows - 1000) + 2e-5 * (work - 5000),
        "save": np.zeros(shape, np.float32),
        "gc": np.zeros(shape, np.float32),
        "delay": np.zeros(shape, np.float32),
        "paused": np.zeros(shape, np.float32),
        "faults": np.zeros(shape, np.float32),
        "clock": around(1.8, 0.001),
        "remote": np.zeros(shape, np.float32),
        "rows": rows,
        "work": work,
    }
    number = np.arange(ranks)
    grid = {"row": number // 4, "column": number % 4}
    for axis in grid:
        columns[f"comm.{axis}"] = around(0.05, 0.02)
    return Records(
        source="a test",
        ranks=number,
        steps=np.arange(10, 10 + STEPS),
        columns=columns,
        stage=number * stages // ranks,
        host=number // 4,
        hosts=[f"node{i}" for i in range(max(1, ranks // 4))],
        groups=grid,
    )


def pulses(seconds: float, period: int = 8) -> np.ndarray:
    """Return seconds in every ``period``-th step."""
    late = np.zeros(STEPS, np.float32)
    late[3::period] = seconds
    return late
