"""Faults of data and random numbers."""

import numpy as np

from benchmarks.align_faults.classes.common import (
    add,
)
from benchmarks.align_faults.faults import (
    argument,
    forward,
    rms,
)
from benchmarks.align_faults.kernels import (
    rounded,
)

IDS = lambda s: s.op == "embedding" and not s.is_backward  # noqa: E731
LOSS = lambda s: s.op == "cross_entropy" and not s.is_backward  # noqa: E731
add(
    "another batch",
    "data",
    "wrong index",
    "given",
    IDS,
    argument(0, lambda x, ins, e, k, r: (x + r.integers(1, 30, x.shape)) % 32),
)
add(
    "tokens shifted by one",
    "data",
    "permutation | wrong index",
    "given",
    IDS,
    argument(0, lambda x, ins, e, k, r: np.roll(x, 1)),
)
add(
    "labels shifted by one",
    "data",
    "permutation | wrong index",
    "given",
    LOSS,
    argument(1, lambda x, ins, e, k, r: np.roll(x, 1)),
)
add(
    "labels of another batch",
    "data",
    "wrong index | permutation",
    "given",
    LOSS,
    argument(1, lambda x, ins, e, k, r: (x + r.integers(1, 30, x.shape)) % 32),
)
add(
    "weights of another seed",
    "data",
    "wrong tensor | unknown",
    "given",
    lambda s: forward({"linear", "grouped_matmul", "embedding"})(s) and s.step == 0,
    argument(
        1,
        lambda w, ins, e, k, r: rounded(
            r.normal(size=w.shape).astype(np.float32) * rms(w), "bfloat16"
        ),
    ),
)
add(
    "one label wrong",
    "data",
    "single element | wrong index",
    "given",
    LOSS,
    argument(1, lambda x, ins, e, k, r: np.where(np.arange(len(x)) == 0, (x + 1) % 32, x)),
)
add(
    "weight of the step before",
    "data",
    "stale weight",
    "given",
    lambda s: forward({"linear", "rms_norm", "grouped_matmul"})(s) and s.step == 1,
    argument(1, lambda w, ins, e, k, r: e.before(w, k)),
    steps=2,
)
