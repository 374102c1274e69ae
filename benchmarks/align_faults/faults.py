"""Define the classes of faults: where one may be planted, how it perturbs a call, and what a tool may call it.

A class is a row of :data:`CLASSES`. ``pick`` chooses among the sites of a right run; ``change`` is a
:class:`~benchmarks.align_faults.engine.Planted`'s. Nothing here knows how a tool would find it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.align_faults.engine import Change, Engine, Site
from benchmarks.align_faults.kernels import Array, rounded

AREAS = (
    *("forward", "backward", "reduction", "optimizer", "routing", "collectives"),
    *("sharding", "precision", "data", "bit flips"),
)


@dataclass(frozen=True)
class Fault:
    """A class of faults.

    Attributes:
        name: Unique.
        area: One of :data:`AREAS`.
        families: What a tool may rightly call it.
        stage: See :class:`~benchmarks.align_faults.engine.Planted`.
        change: The perturbation, or a function of the generator that draws one.
        dtypes: Types of the program in which it is planted.
    """

    name: str
    area: str
    families: frozenset[str]
    stage: str
    pick: Callable[[Site], bool]
    change: Callable[[np.random.Generator], Change]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    steps: int = 1


CLASSES: dict[str, Fault] = {}
"""All classes by name."""

Pick = Callable[[Site], bool]


class Draw(NamedTuple):
    """A function that draws a perturbation, and where it is made."""

    stage: str
    change: Callable[[np.random.Generator], Change]


def adding(area: str) -> Callable[..., None]:
    """Return a function that registers a class of an area: name, families, pick, :class:`Draw`, further fields."""

    def add(name: str, families: str, pick: Pick, draw: Draw, **more: Any) -> None:
        names = frozenset(families.split(" | "))
        CLASSES[name] = Fault(name, area, names, draw.stage, pick, draw.change, **more)

    return add


# ------------------------------------------------------------------ where

COMPUTES = {
    *("linear", "matmul", "rms_norm", "silu", "npu_swiglu", "softmax", "sigmoid", "grouped_matmul"),
    *("scaled_dot_product_attention", "npu_rotary_mul", "npu_moe_token_unpermute", "embedding"),
}
MOVES = {"npu_moe_token_permute", "index_select", "embedding", "npu_moe_token_unpermute"}
SUMS = {"all_reduce", "reduce_scatter_tensor"}
EVERY = {*SUMS, "all_gather_into_tensor", "all_to_all_single"}
GEMM = {"linear", "grouped_matmul", "matmul"}
F32 = {"dtypes": ("float32",)}


def forward(
    ops: set[str] | None = None,
    least: int = 16,
    dims: int = 1,
    step: int | None = None,
    tag: str = "",
) -> Pick:
    """Pick forward calls of some operators with a floating-point result of at least some size."""
    return lambda s: (
        not s.is_backward
        and s.phase == "forward"
        and not s.name.startswith("Distributed.")
        and s.dtype not in ("int64", "bool")
        and _is_one_of(s, ops, least, dims)
        and step in (None, s.step)
        and tag in ("", s.tag)
    )


def backward(ops: set[str] | None = None) -> Pick:
    """Pick backward calls of some operators."""
    return lambda s: s.is_backward and _is_one_of(s, ops)


def _is_one_of(site: Site, ops: set[str] | None, least: int = 16, dims: int = 1) -> bool:
    large = int(np.prod(site.shape)) >= least and len(site.shape) >= dims
    return large and site.op in (ops or COMPUTES)


def collective(
    ops: set[str], phases: tuple[str, ...] = ("forward", "backward", "reduction"), least: int = 8
) -> Pick:
    """Pick collectives over more than one rank."""
    return lambda s: (
        s.name.startswith("Distributed.")
        and s.op in ops
        and s.phase in phases
        and len(s.ranks) > 1
        and s.dtype != "int64"
        and int(np.prod(s.shape)) >= least
    )


def optimizer(step: int | None = None, dims: int = 0) -> Pick:
    """Pick the optimizer's updates."""
    return lambda s: (
        s.phase == "optimizer" and _is_one_of(s, {"AdamW"}, 8, dims) and step in (None, s.step)
    )


def square(pick: Pick) -> Pick:
    """Pick only those sites that have square matrices."""
    return lambda s: pick(s) and len(s.shape) >= 2 and s.shape[-1] == s.shape[-2]


PLAIN, BACK = forward(), backward()


def TOPK(site: Site) -> bool:  # noqa: N802
    """Pick the choice of experts."""
    return site.op == "topk" and not site.is_backward


# ------------------------------------------------------------------ how

OfResult = Callable[[Array, np.random.Generator], Array]


def always(stage: str, change: Change) -> Draw:
    """Make a perturbation that draws nothing."""
    return Draw(stage, lambda rng: change)


LEFT_OUT = always("result", lambda outs, ins, *_: [ins[0].copy()])
"""An operator that hands on what it is given."""


def result(function: OfResult, place: int = 0, stored: bool = False) -> Draw:
    """Perturb one output, which may be stored in the program's type again."""

    def draw(rng: np.random.Generator) -> Change:
        def change(outs: list[Array], ins: list[Array], engine: Engine, rank: int) -> list[Array]:
            at = place if place < len(outs) else 0
            with np.errstate(all="ignore"):
                new = np.asarray(function(outs[at], rng)).astype(outs[at].dtype, copy=False)
                if stored and engine.planted:
                    new = rounded(new, engine.planted.site.dtype)
            return [new if i == at else o for i, o in enumerate(outs)]

        return change

    return Draw("result", draw)


def typed(function: OfResult, place: int = 0) -> Draw:
    """Perturb one output; the result is stored in the program's type."""
    return result(function, place, stored=True)


OfArgument = Callable[[Array, np.random.Generator, Engine, int], Any]
"""Function of an argument, random numbers, the engine and the rank that returns the wrong argument."""


def given(place: int, function: OfArgument, stage: str = "given") -> Draw:
    """Perturb one input, as the dump shows it."""

    def draw(rng: np.random.Generator) -> Change:
        def change(ins: list[Array], engine: Engine, rank: int) -> list[Array]:
            at = place % len(ins)
            new = np.asarray(function(ins[at], rng, engine, rank))
            return [new if i == at else x for i, x in enumerate(ins)]

        return change

    return Draw(stage, draw)


def hidden(place: int, function: OfArgument) -> Draw:
    """Perturb one input that the kernel reads; the dump shows the right one."""
    return given(place, function, "hidden")


def setting(stage: str = "hidden settings", **changed: Any) -> Draw:
    """Perturb settings that the kernel reads; a function is applied to the right value."""

    def change(s: dict[str, Any]) -> dict[str, Any]:
        new = {k: v(s[k]) if callable(v) else v for k, v in changed.items() if k in s}
        return {**s, **new}

    return always(stage, change)


def stated(**changed: Any) -> Draw:
    """Perturb settings, as the dump shows them."""
    return setting("settings", **changed)


def summed_in(dtype: str) -> Draw:
    """Round sums of products to a narrow type."""
    return always("numerics", lambda numerics: replace(numerics, accumulator=dtype))


def exchange(function: Callable[..., list[Array]]) -> Draw:
    """Perturb what the ranks of a group receive: ``function(got, parts, rng, info)``.

    ``info["make"]`` returns what the ranks would receive of other parts (and settings, by default the right ones).
    """

    def draw(rng: np.random.Generator) -> Change:
        def change(
            got: list[Array],
            parts: list[Array],
            x: Any,
            group: list[int],
            make: Any,
            given: Any,
            engine: Engine,
        ) -> list[Array]:
            def run(parts: list[Array], given: Any = given) -> list[Array]:
                return make(parts, given, engine.numerics, x.dtype)

            info = {"x": x, "group": group, "make": run, "given": given}
            return function([g.copy() for g in got], parts, rng, info)

        return change

    return Draw("exchange", draw)


def first_only(function: Callable[[Array, np.random.Generator], Array]) -> Any:
    """Perturb what the first rank of a group receives, for :func:`exchange`."""
    return lambda got, parts, rng, info: [function(got[0], rng), *got[1:]]


def rms(x: Array) -> float:
    """Return the root mean square of values."""
    return float(np.sqrt(np.mean(np.square(x[np.isfinite(x)], dtype=np.float64)))) or 1.0


def _any_large(flat: Array, rng: np.random.Generator) -> int:
    """Draw an element that is not smaller than usual."""
    large = np.flatnonzero(np.abs(flat) >= 0.5 * rms(flat))
    return int(rng.choice(large)) if len(large) else 0


def at_one(x: Array, rng: np.random.Generator, function: Callable[[float], float]) -> Array:
    """Perturb one element that is not smaller than usual."""
    flat = x.copy().reshape(-1)
    i = _any_large(flat, rng)
    flat[i] = function(float(flat[i]))
    return flat.reshape(x.shape)


def roll(x: Array, rng: np.random.Generator, axis: int = 0) -> Array:
    """Shift rows by at least one position."""
    return np.roll(x, int(rng.integers(1, x.shape[axis])), axis)


def swap(x: Array, rng: np.random.Generator, axis: int = 0) -> Array:
    """Exchange two rows."""
    i, j = rng.choice(x.shape[axis], 2, replace=False)
    order = np.arange(x.shape[axis])
    order[[i, j]] = order[[j, i]]
    return x.take(order, axis)


def copy_row(x: Array, rng: np.random.Generator) -> Array:
    """Overwrite one row with another."""
    i, j = rng.choice(len(x), 2, replace=False)
    y = x.copy()
    y[i] = x[j]
    return y


def zero_rows(x: Array, rng: np.random.Generator) -> Array:
    """Set some rows to zero."""
    y = x.copy()
    y[rng.choice(len(x), max(1, len(x) // 4), replace=False)] = 0
    return y


def flip_bit(x: Array, rng: np.random.Generator, bits: Sequence[int]) -> Array:
    """Flip one bit of one element, counted in float32."""
    flat = np.ascontiguousarray(x, np.float32).copy().reshape(-1)
    i = _any_large(flat, rng)
    words = flat.view(np.uint32)
    words[i] ^= np.uint32(1 << int(rng.choice(list(bits))))
    return flat.reshape(x.shape)


def other(x: Array, rng: np.random.Generator, engine: Engine, rank: int) -> Array:
    """Return another tensor of this shape that the rank has computed, or, if there is none, its own shifted by one."""
    found = [
        y for y in engine.past.get((rank, x.shape), []) if not np.array_equal(x, y) and rms(y) > 0
    ]
    size = rms(x)
    near = [y for y in found if 0.01 < rms(y) / size < 100]
    if not near:
        return np.roll(x.reshape(-1), 1).reshape(x.shape)
    return near[int(rng.integers(len(near)))].copy()


def both(a: Pick, b: Pick) -> Pick:
    """Pick sites that both conditions pick."""
    return lambda s: a(s) and b(s)


def rows(least: int) -> Pick:
    """Pick sites with at least this many rows."""
    return lambda s: len(s.shape) > 0 and s.shape[0] >= least


def wide(site: Site) -> bool:
    """Pick sites whose first two dimensions are at least 2."""
    return len(site.shape) >= 2 and site.shape[0] >= 2 and site.shape[1] >= 2
