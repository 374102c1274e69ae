"""Draw inputs for every operator, and compute them by correct programs, which must never exceed a derived bound.

A program is an implementation in the stated type that shares nothing with the formulas of ``operators/``: float32
arithmetic of NumPy (float64 for float64), sums in a chosen order, results rounded to the narrow type after the last
operation or after each. Values are drawn as Ascend's operator standard says (uniform in [-5, 5]; normal with mean in
[-100, 100] and deviation in [1, 25]), and from distributions that are hard for sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from telechat_moe.numerics import Array

Rng = np.random.Generator

KINDS = (
    *("uniform", "normal", "small", "cancelling", "subnormal"),
    *("mixed", "repeated", "drifting", "one large"),
)
"""Distributions of values."""

ORDERS = ("numpy", "forward", "backward", "pairwise", "blocks", "lanes")
"""Orders in which a program adds up."""


def narrow(x: Array, dtype: str) -> Array:
    """Return values rounded to a type, in NumPy's smallest type that holds them; independent of ``numerics.py``."""
    if dtype == "float64":
        return np.asarray(x, np.float64)
    x = np.asarray(x, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(x).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(x), x, rounded.view(np.float32)).reshape(x.shape)
    return x


def draw(rng: Rng, kind: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Return values of a distribution, representable in a type."""
    sign = rng.choice([-1.0, 1.0], shape)
    if kind == "uniform":
        x = rng.uniform(-5, 5, shape)
    elif kind == "normal":
        x = rng.normal(rng.uniform(-100, 100), rng.uniform(1, 25), shape)
    elif kind == "small":
        x = rng.normal(0, 0.02, shape)
    elif kind == "cancelling":  # sums are far smaller than their terms
        x = rng.uniform(1, 2, shape) * 100
        x = np.where(np.arange(x.size).reshape(shape) % 2, x, -np.roll(x, 1, -1))
        x = x + rng.normal(0, 1e-3, shape)
    elif kind == "subnormal":
        low = {"float16": -17, "float64": -1030}.get(dtype, -130)
        x = np.ldexp(rng.uniform(-5, 5, shape), low)
    elif kind == "mixed":
        wide = 3 if dtype == "float16" else 6
        x = sign * 10 ** rng.uniform(-wide, wide, shape)
    elif kind == "repeated":  # roundings of equal terms are equal
        x = np.where(rng.random(shape) < 0.1, 0.0, rng.uniform(0.05, 5))
    elif (
        kind == "drifting"
    ):  # neighbours are similar, like tokens of one document: partial sums are far above the sum
        turns = sum(np.indices(shape)[i] / n for i, n in enumerate(shape)) if shape else 0.0
        wave = np.cos(2 * np.pi * (turns + rng.random()))
        x = rng.uniform(1, 5) * wave + rng.uniform(-1, 1, shape)
    else:  # small terms get lost beside a large one
        x = rng.uniform(0, 1, shape)
        large = 1e4 if dtype == "float16" else 1e8
        x = np.where(rng.random(shape) < 2 / max(shape[-1] if shape else 1, 2), large, x)
    return narrow(x, dtype)


class Machine:
    """The arithmetic of a program.

    Args:
        order: Of sums, see :data:`ORDERS`.
        stores: Each operation is a kernel of its own, whose result is rounded to ``dtype``.
    """

    def __init__(self, dtype: str, order: str, stores: bool) -> None:
        self.dtype, self.order, self.stores = dtype, order, stores
        self.work = np.float64 if dtype == "float64" else np.float32

    def r(self, x: Any) -> Any:
        """Return values rounded as one kernel passes them to the next."""
        return narrow(x, self.dtype) if self.stores else np.asarray(x, self.work)

    def sum(self, x: Array, axis: int = -1, keepdims: bool = False) -> Array:
        """Return the sum along one axis."""
        x = np.moveaxis(np.asarray(x, self.work), axis, 0)
        total = self._sum(x)
        return np.expand_dims(total, axis) if keepdims else total

    def _sum(self, x: Array) -> Array:
        n = len(x)
        if self.order == "numpy" or n < 3:
            return np.ascontiguousarray(np.moveaxis(x, 0, -1)).sum(-1)
        if self.order == "pairwise":
            while len(x) > 1:
                even = x[: len(x) // 2 * 2]
                rest = x[len(even) :]
                x = np.concatenate([even[0::2] + even[1::2], rest])
            return x[0]
        if self.order in ("blocks", "lanes"):
            size = 32 if self.order == "blocks" else -(-n // 8)
            parts = [self._chain(x[i : i + size]) for i in range(0, n, size)]
            return self._chain(np.stack(parts))
        return self._chain(x[::-1] if self.order == "backward" else x)

    def _chain(self, x: Array) -> Array:
        total = x[0].copy()
        for term in x[1:]:
            total = total + term
        return total

    def matmul(self, a: Array, b: Array) -> Array:
        """Return a matrix product; ``pairwise`` divides the inner dimension in two, other orders follow it in steps."""
        a, b = np.asarray(a, self.work), np.asarray(b, self.work)
        n = a.shape[-1]
        if self.order == "numpy":
            return a @ b
        if self.order == "pairwise" and n > 16:
            half = n // 2
            return self.matmul(a[..., :half], b[..., :half, :]) + self.matmul(
                a[..., half:], b[..., half:, :]
            )
        step = {"blocks": 32, "lanes": -(-n // 8)}.get(self.order, 1 if n <= 128 else 8)
        starts = list(range(0, n, step))
        total: Any = 0.0
        for i in starts[::-1] if self.order == "backward" else starts:
            total = total + a[..., i : i + step] @ b[..., i : i + step, :]
        return total


@dataclass(frozen=True)
class Sample:
    """Arguments of one call.

    Attributes:
        arguments: In the order of the formula's signature; arrays of floating point hold values of the type.
    """

    arguments: Sequence[Any]
    named: dict[str, Any] = field(default_factory=dict)


Make = Callable[["Source"], Sample]
Program = Callable[..., Any]


@dataclass(frozen=True)
class Spec:
    """How an operator is checked.

    Attributes:
        name: Canonical name of the formula.
        make: Draws arguments.
        programs: Each takes a :class:`Machine` and the arguments, and returns one output or a list.
        torch: Name below ``torch`` or ``torch.nn.functional``, or a function of the module and the arguments; None: it
            has no such operator.
        signed: Whether backward is compared with torch's, too.
    """

    name: str
    make: Make
    programs: tuple[Program, ...] = ()
    torch: str | Callable[..., Any] | None = None
    backward: bool = True


class Source:
    """Draws arguments of one case.

    Args:
        size: About how many elements a result has.
    """

    def __init__(self, rng: Rng, kind: str, dtype: str, size: int) -> None:
        self.rng, self.kind, self.dtype, self.size = rng, kind, dtype, size

    def x(self, *shape: int, positive: bool = False, within: float | None = None) -> Array:
        """Return values; ``positive``: none is 0 or less; ``within``: scaled so that none is larger."""
        x = draw(self.rng, self.kind, shape, self.dtype)
        if within is not None and np.abs(x).max() > within:
            x = narrow(x * (within / np.abs(x).max()), self.dtype)
        if positive:
            least = np.abs(x[x != 0]).min() if np.any(x) else 1.0
            x = np.where(x == 0, least, np.abs(x))
        return x

    def weight(self, *shape: int) -> Array:
        """Return values about 1, as scales of norms."""
        return narrow(1 + 0.1 * self.rng.standard_normal(shape), self.dtype)

    def factors(self, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[Array, Array]:
        """Return two factors whose product the type can hold."""
        top = 30.0 if self.dtype == "float16" else None
        return self.x(*left, within=top), self.x(*right, within=top)

    def ids(self, high: int, *shape: int) -> Array:
        """Return integers below a number."""
        return self.rng.integers(0, high, shape)

    def mask(self, *shape: int) -> Array:
        """Return booleans."""
        return self.rng.random(shape) < 0.5

    def rows(self, columns: int) -> int:
        """Return how many rows make up the size."""
        return max(2, self.size // columns)

    def length(self, *choices: int) -> int:
        """Return one of several lengths."""
        return int(self.rng.choice(choices))
