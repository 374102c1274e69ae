"""Specify the matrix products."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.align_bounds.inputs import Machine, Sample, Source
from benchmarks.align_bounds.specs.table import spec


def _factors(left: Any, right: Any) -> Callable[[Source], Sample]:
    """Draw two matrices; ``left`` and ``right`` take rows, inner length and columns."""

    def make(s: Source) -> Sample:
        k, columns = s.length(16, 64, 256, 1024), s.length(16, 64)
        return Sample(
            s.factors(left(s.rows(columns), k, columns), right(s.rows(columns), k, columns))
        )

    return make


def _linear_sample(s: Source) -> Sample:
    k, columns = s.length(16, 64, 256, 1024), s.length(16, 64)
    return Sample([*s.factors((s.rows(columns), k), (columns, k)), s.x(columns)])


def _addmm_sample(s: Source) -> Sample:
    k, columns = s.length(16, 64, 256), s.length(16, 64)
    return Sample([s.x(columns), *s.factors((s.rows(columns), k), (k, columns))])


def _grouped_sample(s: Source) -> Sample:
    k, columns, groups = s.length(16, 64, 256), s.length(16, 64), 4
    rows = s.rows(columns)
    ends = np.sort(s.ids(rows + 1, groups))
    ends[-1] = rows
    x, w = s.factors((rows, k), (groups, k, columns))
    return Sample([x, w], {"group_list": ends})


def _grouped(m: Machine, x: Any, w: Any, group_list: Any) -> Any:
    begins = [0, *group_list[:-1]]
    return np.concatenate(
        [m.matmul(x[b:e], w[i]) for i, (b, e) in enumerate(zip(begins, group_list, strict=True))]
    )


spec(
    "matmul",
    _factors(lambda r, k, c: (r, k), lambda r, k, c: (k, c)),
    lambda m, a, b: m.matmul(a, b),
    torch="matmul",
)
spec(
    "rmatmul",
    _factors(lambda r, k, c: (k, c), lambda r, k, c: (r, k)),
    lambda m, a, b: m.matmul(b, a),
)
spec("linear", _linear_sample, lambda m, x, w, b: m.matmul(x, w.T) + b, torch="linear")
spec("addmm", _addmm_sample, lambda m, c, a, b: m.matmul(a, b) + c, torch="addmm")
spec(
    "outer",
    lambda s: Sample(s.factors((64,), (s.rows(64),))),
    lambda m, a, b: a[:, None] * b,
    torch="outer",
)
spec(
    "einsum",
    lambda s: Sample(["bshd,bthd->bhst", *s.factors((2, 32, 2, 64), (2, s.rows(128), 2, 64))]),
    lambda m, e, a, b: m.matmul(a.transpose(0, 2, 1, 3), b.transpose(0, 2, 3, 1)),
    torch="einsum",
)
spec("grouped_matmul", _grouped_sample, _grouped)
