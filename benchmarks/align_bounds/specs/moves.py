"""Specify the operators that only move elements."""

from typing import Any

import numpy as np

from benchmarks.align_bounds.inputs import Sample, Source
from benchmarks.align_bounds.specs.table import exact


def _block(s: Source) -> Any:
    return s.x(s.rows(64), 8, 8)


for _name, _more, _function, _torch in (
    ("reshape", lambda x: (64, -1), lambda x, *n: x.reshape(n), lambda t, x, *n: x.reshape(n)),
    ("flatten", lambda x: (1, 2), lambda x, a, b: x.reshape(len(x), 64), "flatten"),
    ("unflatten", lambda x: (1, [2, 4]), lambda x, d, n: x.reshape(-1, 2, 4, 8), "unflatten"),
    ("transpose", lambda x: (0, 2), lambda x, a, b: np.swapaxes(x, a, b), "transpose"),
    ("permute", lambda x: (2, 0, 1), lambda x, *n: x.transpose(n), lambda t, x, *n: x.permute(*n)),
    ("t", lambda x: (), lambda x: np.swapaxes(x, -1, -2), lambda t, x: x.mT),
    ("unsqueeze", lambda x: (1,), lambda x, d: x[:, None], "unsqueeze"),
    ("squeeze", lambda x: (0,), lambda x, d: x, "squeeze"),
    ("expand", lambda x: (2, *x.shape), lambda x, *n: np.stack([x, x]), lambda t, x, *n: x.expand(*n)),
    ("repeat", lambda x: (1, 2, 1), lambda x, *n: np.concatenate([x, x], 1), lambda t, x, *n: x.repeat(*n)),
    ("chunk", lambda x: (2, 1), lambda x, n, d: [x[:, :4], x[:, 4:]], "chunk"),
    ("split", lambda x: ([3, 5], 1), lambda x, n, d: [x[:, :3], x[:, 3:]], "split"),
    ("unbind", lambda x: (1,), lambda x, d: [x[:, i] for i in range(8)], "unbind"),
    ("flip", lambda x: (1,), lambda x, d: x[:, ::-1], lambda t, x, d: x.flip(d)),
    ("roll", lambda x: (3, 0), lambda x, n, d: np.concatenate([x[-3:], x[:-3]]), "roll"),
    ("pad", lambda x: ((1, 2),), lambda x, n: np.concatenate([0 * x[..., :1], x, 0 * x[..., :2]], -1), "pad"),
    ("tril", lambda x: (), lambda x: x * (np.arange(8)[:, None] >= np.arange(8)), "tril"),
    ("triu", lambda x: (), lambda x: x * (np.arange(8)[:, None] <= np.arange(8)), "triu"),
):  # fmt: skip
    exact(
        _name, lambda s, more=_more: (lambda x: Sample([x, *more(x)]))(_block(s)), _function, _torch
    )
exact(
    "repeat_interleave",
    lambda s: Sample([s.x(s.rows(64), 32), 2, 0]),
    lambda x, n, d: x[np.arange(2 * len(x)) // 2],
    "repeat_interleave",
)
exact(
    "view_as",
    lambda s: Sample([s.x(64, 32), s.x(32, 64)]),
    lambda x, y: x.reshape(y.shape),
    lambda t, x, y: x.view_as(y),
)
exact(
    "expand_as",
    lambda s: Sample([s.x(1, 64), s.x(s.rows(64), 64)]),
    lambda x, y: np.repeat(x, len(y), 0),
    lambda t, x, y: x.expand_as(y),
)
exact(
    "cat",
    lambda s: Sample([[s.x(s.rows(64), 16), s.x(s.rows(64), 48)], 1]),
    lambda x, d: np.concatenate(x, d),
    "cat",
)
exact(
    "stack",
    lambda s: Sample([[s.x(s.rows(64), 32), s.x(s.rows(64), 32)], 1]),
    lambda x, d: np.stack(x, d),
    "stack",
)
