"""Operators that gather, scatter, sort and choose."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from telechat_moe.narrowing import is_sequence
from telechat_moe.tools.align.operators.approx import Approx, Array, scatter_add, where
from telechat_moe.tools.align.operators.elementwise import floating, integers, plain, whole
from telechat_moe.tools.align.operators.registry import Arguments, NotJudgedError, op
from telechat_moe.tools.align.operators.shapes import arranged, move, moves


@op(
    "embedding Embedding",
    "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False "
    "sparse=False",
    exact=True,
)
def _embedding(a: Arguments) -> Any:
    index, table = (a.input, a.weight) if whole(a.input) else (a.weight, a.input)
    if a.max_norm or a.scale_grad_by_freq:
        raise NotJudgedError("an embedding that scales rows by their norm or frequency")
    rows = integers(index)
    result = move(table, lambda x: x[rows], True)
    if a.padding_idx is None or not isinstance(result, Approx):
        return result
    padding = (rows == int(a.padding_idx) % plain(table).shape[0])[..., None]
    return where(np.broadcast_to(padding, result.shape), result.stop(), result)


@op(
    "gather GatherD take_along_dim gather_elements gather_d",
    "input dim index | sparse_grad=False batch_dims=0",
    exact=True,
)
def _gather(a: Arguments) -> Any:
    """Compute ``torch.gather(x, dim, index)``, or MindSpore's ``gather(x, indices, axis)``, which takes rows."""
    number = np.ndim(plain(a.index)) == 0 and np.ndim(plain(a.dim)) > 0
    if number or isinstance(a.index, int | float) or not isinstance(a.dim, int):
        rows, axis = integers(a.dim), int(plain(a.index))
        return move(a.input, lambda x: x.take(rows, axis), True)
    index, dim = integers(a.index), int(a.dim)

    def take(x: Array) -> Array:
        key = [slice(0, n) for n in index.shape]
        key[dim % x.ndim] = slice(None)
        return np.take_along_axis(x[tuple(key)], index, dim)

    return move(a.input, take, True)


def _index_of(index: Any) -> tuple[Any, ...]:
    """Return an index as NumPy takes it."""
    key: Sequence[Any] = index if is_sequence(index) else [index]
    if any(isinstance(part, Approx) for part in key):
        raise NotJudgedError("an index of floating point")
    return tuple(_bool_or_int(part) for part in key)


@op("setitem", "input key value", exact=True)
def _setitem(a: Arguments) -> Any:
    """Compute ``x[key] = value``; a position that the key names twice may hold any of its values."""
    key = _index_of(a.key)
    size = int(plain(a.input).size)
    places: Array = np.arange(size).reshape(np.shape(plain(a.input)))[key]
    if np.unique(places).size != places.size:
        raise NotJudgedError("writes an element twice: the result depends on the order")
    return arranged(partial(_written, key), a.input, a.value)


def _written(key: Any, x: Array, values: Array) -> Array:
    out = np.array(x)
    out[key] = values
    return out


def _bool_or_int(part: Any) -> Any:
    if not isinstance(part, np.ndarray):
        return part
    values = plain(part)
    return values if values.dtype == bool else values.astype(np.int64)


def _masked_select(x: Array, a: Arguments) -> Array:
    mask = plain(a.mask).astype(bool)
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, mask.shape))[mask]


def _select(x: Array, a: Arguments) -> Array:
    if not isinstance(a.dim, int):
        raise NotJudgedError("select of three tensors under the name of an index")
    return x.take(int(plain(a.index)), int(a.dim))


moves(
    {
        ("index_select IndexSelect take", "input dim index"): lambda x, a: x.take(
            integers(a.index).reshape(-1), int(a.dim)
        ),
        ("getitem strided_slice StridedSlice", "input key"): lambda x, a: x[_index_of(a.key)],
        ("masked_select", "input mask"): _masked_select,
        ("narrow", "input dim start length"): lambda x, a: x.take(
            np.arange(int(a.start), int(a.start) + int(a.length)), int(a.dim)
        ),
        ("select", "input dim index"): _select,
    },
    repeats=True,
)


@op("one_hot OneHotExt OneHot", "input num_classes=-1 *rest", exact=True)
def _one_hot(a: Arguments) -> Any:
    index = integers(a.input)
    depth = int(plain(a.num_classes))
    depth = depth if depth > 0 else int(index.max()) + 1
    return (index[..., None] == np.arange(depth)).astype(np.int64)


def along(index: Array, dim: int) -> tuple[Array, ...]:
    """Return the index that ``numpy.take_along_axis`` takes an array's elements by."""
    grid = list(np.indices(index.shape))
    grid[dim] = index
    return tuple(grid)


@op("scatter scatter_", "input dim index src | value=None reduce=None", exact=True)
def _scatter(a: Arguments) -> Any:
    if a.reduce is not None:
        raise NotJudgedError(f"scatter with reduce {a.reduce!r}")
    index, dim = integers(a.index), int(a.dim)
    shape = plain(a.input).shape
    place = along(index, dim % len(shape))
    if len(np.unique(np.ravel_multi_index(place, shape))) != index.size:
        raise NotJudgedError("scatter writes an element twice: the result depends on the order")
    source = a.src if np.ndim(plain(a.src)) == 0 else a.src[tuple(slice(0, n) for n in index.shape)]
    return arranged(partial(_written, place), a.input, source)


@op("scatter_add scatter_add_ ScatterAddExt", "input dim index src")
def _scatter_add(a: Arguments) -> Any:
    index, dim = integers(a.index), int(a.dim)
    x = floating(a.input)
    place = along(index, dim % len(x.shape))
    source = floating(a.src)[tuple(slice(0, s) for s in index.shape)]
    return scatter_add(x.shape, place, source, x)


@op("index_add index_add_ IndexAddExt", "input dim index source alpha=1")
def _index_add(a: Arguments) -> Any:
    x, rows, dim = floating(a.input), integers(a.index), int(a.dim)
    source: Approx = floating(a.source) if a.alpha == 1 else floating(a.source) * a.alpha
    front = source.moved(lambda v: np.moveaxis(v, dim, 0))
    into = x.moved(lambda v: np.moveaxis(v, dim, 0))
    return scatter_add(into.shape, rows, front, into).moved(lambda v: np.moveaxis(v, 0, dim))


@op("bincount", "input weights=None minlength=0", exact=True)
def _bincount(a: Arguments) -> Any:
    if a.weights is not None:
        raise NotJudgedError("bincount with weights")
    return np.bincount(integers(a.input).reshape(-1), minlength=int(a.minlength))


@op("nonzero", "input | as_tuple=False", exact=True)
def _nonzero(a: Arguments) -> Any:
    indices = np.nonzero(plain(a.input))
    return list(indices) if a.as_tuple else np.stack(indices, -1)


@op("topk TopkExt TopK", "input k dim=-1 largest=True sorted=True", exact=True)
def _topk(a: Arguments) -> Any:
    """Return values and indices; among ties the indices are free, and :func:`same_choice` must judge them."""
    order = _order(a, a.largest).take(np.arange(int(plain(a.k))), int(a.dim))
    return _ordered(a, order)


_SORT = "input dim=-1 descending=False stable=False"
op("sort SortExt", _SORT, exact=True)(lambda a: _ordered(a, _order(a, a.descending)))
op("argsort", _SORT, exact=True)(lambda a: _order(a, a.descending))


def _order(a: Arguments, descending: bool) -> Array:
    x = plain(a.input)
    return np.argsort(-x if descending else x, int(a.dim), kind="stable")


def _ordered(a: Arguments, order: Array) -> list[Any]:
    """Return the values in an order, or in the program's own order, and that order."""
    chosen = order if a.chosen is None else a.chosen
    return [move(a.input, lambda v: np.take_along_axis(v, chosen, int(a.dim)), True), chosen]


@op("argmax ArgMaxExt", "input dim=None keepdim=False", exact=True)
def _argmax(a: Arguments) -> Any:
    x = plain(a.input)
    return x.argmax(None if a.dim is None else int(a.dim), keepdims=bool(a.keepdim))


_CHOICES = "argsort argmax ArgMaxWithValue", "topk sort max min"
CHOOSES = {name: i for i, names in enumerate(_CHOICES) for name in names.split()}
"""For each operator whose indices are free among equal elements, the number of the output that holds them."""


def same_choice(x: Array, choice: Array, expected: Array, dim: int | None) -> Array:
    """Return where an index found may replace the expected one because both refer to equal elements.

    They index a dimension of ``x``, or None: the flat array.
    """
    if dim is None:
        flat = x.reshape(-1)
        return flat[np.clip(choice, 0, flat.size - 1)] == flat[expected]
    size = x.shape[dim]
    inside = (choice >= 0) & (choice < size)
    picked = np.take_along_axis(x, np.clip(choice, 0, size - 1), dim)
    return inside & (picked == np.take_along_axis(x, expected, dim))
