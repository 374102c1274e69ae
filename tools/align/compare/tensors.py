"""Compare two tensors by a published standard, in chunks, so that memory stays bounded."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from telechat_moe.numerics import is_float, widen
from telechat_moe.tools.align.compare.measures import Array, Check, Chunk, Measure
from telechat_moe.tools.align.compare.profiles import Profile
from telechat_moe.tools.align.dump import value_files
from telechat_moe.tools.align.dump.logical import BLOCK_BYTES, Logical

CHUNK = 1 << 13
"""Elements of a chunk: in float64 they fit a core's cache, and malloc does not return them to the system each time."""


class TensorComparison(NamedTuple):
    """What a standard says of a tensor."""

    status: Literal["pass", "diverged", "not judged"]  # `not judged`: the standard does not apply
    checks: list[Check]  # lines of the standard
    note: str = ""  # what a reader must know, or why it was not judged
    # Index of the worst element; empty: the worst line is of the tensor as a whole
    element: tuple[int, ...] = ()

    @property
    def worst(self) -> Check | None:
        """The line that decides."""
        return max(self.checks, key=lambda c: (not c.ok, c.ratio), default=None)


def compare(
    profile: Profile, arrays: Sequence[Array | Logical], dtype: str, golden_dtype: str
) -> TensorComparison:
    """Compare a tensor with the reference's.

    Args:
        arrays: Values of the target, of the reference and, for a standard that needs it, of a third run; all of them
            arrays, or tensors that are merged as they are read.
    """
    target, golden = arrays[:2]
    if golden.shape != target.shape:
        note = f"shape {list(target.shape)}, reference {list(golden.shape)}"
        return TensorComparison("diverged", [], note)
    note = f"type {dtype}, reference {golden_dtype}"
    if dtype != golden_dtype and profile.same_dtype:
        return TensorComparison("diverged", [], note)
    if is_float(dtype) != is_float(golden_dtype):
        return TensorComparison("not judged", [], note)
    measure = profile.measure(dtype, golden_dtype)
    if measure is None:
        return TensorComparison("not judged", [], f"{profile.name} has no line for {note}")
    if not math.prod(target.shape):
        return TensorComparison("pass", [])
    with np.errstate(invalid="ignore"):  # signalling NaN
        for chunk in chunks(arrays):
            measure.add(chunk)
    return _result(measure, target.shape, dtype.startswith("complex"))


def chunks(arrays: Sequence[Array | Logical]) -> Iterator[Chunk]:
    """Yield chunks of tensors of one shape, in the order of their elements; complex numbers as pairs."""
    begin = 0
    for parts in _parts(arrays):
        target, golden, *bench = map(_reals, parts) if parts[0].dtype.kind == "c" else parts
        yield Chunk(target, golden, begin, bench[0] if bench else None)
        begin += target.size


def _parts(arrays: Sequence[Array | Logical]) -> Iterator[list[Array]]:
    iterators = [_blocks(x) if isinstance(x, Logical) else iter([x]) for x in arrays]
    for blocks in zip(*iterators, strict=True):
        for _, parts in value_files.chunks(blocks, CHUNK):
            yield parts
        for block in blocks:
            value_files.release(block)


def _blocks(tensor: Logical) -> Iterator[Array]:
    """Yield the blocks of a tensor; bits of bfloat16, which a checkpoint holds, in float32."""
    for _, block in tensor.blocks(BLOCK_BYTES):
        yield widen(block, tensor.dtype) if _is_bits(tensor, block) else block


def element(tensor: Logical, index: tuple[int, ...]) -> Any:
    """Return an element of a tensor as a Python number."""
    value = tensor.at(index)
    return (widen(value, tensor.dtype) if _is_bits(tensor, value) else value).item()


def _is_bits(tensor: Logical, values: Array) -> bool:
    return tensor.dtype == "bfloat16" and values.dtype == np.uint16


def _reals(x: Array) -> Array:
    x = np.ascontiguousarray(x)
    return x.view(x.real.dtype)


def _result(measure: Measure, shape: tuple[int, ...], pairs: bool) -> TensorComparison:
    checks = measure.checks()
    if measure.undefined:
        return TensorComparison("not judged", [], measure.undefined)
    status = "pass" if all(c.ok for c in checks) else "diverged"
    comparison = TensorComparison(status, checks, measure.note)
    index = comparison.worst.position if comparison.worst else None
    if index is None or not shape:
        return comparison
    index //= 2 if pairs else 1
    return comparison._replace(element=tuple(int(i) for i in np.unravel_index(index, shape)))
