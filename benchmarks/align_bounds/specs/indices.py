"""Specify the operators that gather, scatter and sort."""

from typing import Any

import numpy as np

from benchmarks.align_bounds.inputs import Machine, Sample, Source
from benchmarks.align_bounds.specs.table import exact, few, spec


def _table(s: Source) -> Sample:
    return Sample([s.ids(40, s.rows(64)), s.x(40, 64)])


def _along_sample(s: Source) -> Sample:
    return Sample([s.x(s.rows(32), 48), 1, s.ids(48, s.rows(32), 32)])


def _scatter_sample(s: Source) -> Sample:
    rows = s.rows(32)
    return Sample([s.x(rows, 32), 1, s.ids(32, rows, 24), s.x(rows, 24)])


def _scatter_add(m: Machine, x: Any, dim: int, index: Any, src: Any) -> Any:
    out = x.astype(m.work)
    places = range(index.shape[1])
    for j in places[::-1] if m.order == "backward" else places:
        rows = np.arange(len(x))
        out[rows, index[:, j]] = m.r(out[rows, index[:, j]] + src[:, j])
    return out


def _index_add(m: Machine, x: Any, dim: int, index: Any, source: Any) -> Any:
    out = x.astype(m.work)
    order = range(len(index))
    for i in order[::-1] if m.order == "backward" else order:
        out[index[i]] = m.r(out[index[i]] + source[i])
    return out


def _distinct(s: Source) -> Sample:
    x = s.x(s.rows(64), 64)
    return Sample([x, 4])


def _topk(x: Any, k: int) -> Any:
    order = np.lexsort((np.arange(x.shape[-1])[::-1] * np.ones_like(x), x))[..., ::-1][..., :k]
    return [np.take_along_axis(x, order, -1), order]


exact("embedding", _table, lambda i, w: w[i], "embedding")
exact("gather", _along_sample, lambda x, d, i: np.take_along_axis(x, i, 1), "gather")
exact(
    "index_select",
    lambda s: Sample([s.x(40, 64), 0, s.ids(40, s.rows(64))]),
    lambda x, d, i: x[i],
    "index_select",
)
exact(
    "getitem",
    lambda s: Sample([s.x(s.rows(64), 64), (slice(1, None), slice(0, 32))]),
    lambda x, k: x[1:, :32],
    lambda t, x, k: x[k],
)


def _assigned(x: Any, key: Any, value: Any) -> Any:
    out = x.copy()
    out[key] = value
    return out


def _assigned_torch(t: Any, x: Any, key: Any, value: Any) -> Any:
    out = x.clone()
    out[key] = value
    return out


exact(
    "setitem",
    lambda s: Sample([s.x(s.rows(64), 64), (slice(1, None), slice(0, 32)), s.x(32)]),
    _assigned,
    _assigned_torch,
)
exact(
    "masked_select",
    lambda s: Sample([s.x(s.rows(64), 64), s.mask(s.rows(64), 64)]),
    lambda x, c: x[c],
    "masked_select",
)
exact(
    "narrow",
    lambda s: Sample([s.x(s.rows(64), 64), 1, 3, 40]),
    lambda x, d, b, n: x[:, b : b + n],
    "narrow",
)
exact("select", lambda s: Sample([s.x(4, s.rows(64), 64), 0, 2]), lambda x, d, i: x[i], "select")
exact(
    "one_hot",
    lambda s: Sample([s.ids(16, s.rows(16)), 16]),
    lambda i, n: np.arange(n) == i[:, None],
    "one_hot",
)


def _placed(x: Any, dim: int, index: Any, src: Any) -> Any:
    out = x.copy()
    out[np.arange(len(x))[:, None], index] = src
    return out


def _distinct_sample(s: Source) -> Sample:
    rows = s.rows(32)
    index = np.argsort(s.rng.random((rows, 32)), 1)[:, :24]
    return Sample([s.x(rows, 32), 1, index, s.x(rows, 24)])


exact("scatter", _distinct_sample, _placed, "scatter")
spec("scatter_add", _scatter_sample, _scatter_add, torch="scatter_add")
spec(
    "index_add",
    lambda s: Sample(
        [s.x(s.rows(128), 64), 0, s.ids(s.rows(128), s.rows(64)), s.x(s.rows(64), 64)]
    ),
    _index_add,
    torch="index_add",
)
exact(
    "bincount",
    lambda s: Sample([s.ids(300, s.size)]),
    lambda i: np.array([(i == v).sum() for v in range(i.max() + 1)]),
    "bincount",
)
exact("nonzero", lambda s: Sample([s.mask(s.rows(64), 64)]), np.argwhere, "nonzero")
spec("topk", _distinct, torch="topk")
spec("sort", lambda s: Sample([s.x(s.rows(64), 64), -1]), torch="sort")
spec(
    "argsort",
    lambda s: Sample([s.x(s.rows(64), 64), -1]),
    lambda m, x, d: np.argsort(x, d, kind="heapsort"),
    torch="argsort",
)
spec("argmax", few(16, 128), lambda m, x, d: x.argmax(d), torch="argmax")
