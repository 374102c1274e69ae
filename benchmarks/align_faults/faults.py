"""Define the classes of faults: where one may be planted, how it perturbs a call, and what a tool may call it.

A class is a row of :data:`CLASSES`. ``pick`` chooses among the sites of a right run; ``change`` is a
:class:`~benchmarks.align_faults.engine.Planted`'s. Nothing here knows how a tool would find it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.align_faults.engine import Change, Engine, Site
from benchmarks.align_faults.kernels import Array, Numerics, rounded

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
        pick: Whether it can be planted at a site.
        change: The perturbation, or a function of the generator that draws one.
        dtypes: Types of the program in which it is planted.
        steps: Steps that a run needs.
        whole: Of a collective: every rank of the group is wrong, not only one.
    """

    name: str
    area: str
    families: frozenset[str]
    stage: str
    pick: Callable[[Site], bool]
    change: Callable[[np.random.Generator], Change]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    steps: int = 1
    whole: bool = False


CLASSES: dict[str, Fault] = {}
"""All classes by name."""

Pick = Callable[[Site], bool]


def fault(
    name: str,
    area: str,
    families: str,
    stage: str,
    pick: Pick,
    **more: Any,
) -> Callable[[Callable[[np.random.Generator], Change]], Callable[[np.random.Generator], Change]]:
    """Register a class; the function draws its perturbation."""

    def register(change: Callable[[np.random.Generator], Change]) -> Any:
        names = frozenset(f.strip() for f in families.split("|"))
        CLASSES[name] = Fault(name, area, names, stage, pick, change, **more)
        return change

    return register


# ------------------------------------------------------------------ where

COMPUTES = {
    *("linear", "matmul", "rms_norm", "silu", "npu_swiglu", "softmax", "sigmoid", "grouped_matmul"),
    *("scaled_dot_product_attention", "npu_rotary_mul", "npu_moe_token_unpermute", "embedding"),
}
MOVES = {"npu_moe_token_permute", "index_select", "embedding", "npu_moe_token_unpermute"}
SUMS = {"all_reduce", "reduce_scatter_tensor"}


def forward(ops: set[str] | None = None, least: int = 16, dims: int = 1) -> Pick:
    """Pick forward calls of some operators with a floating-point result of at least some size."""
    return lambda s: (
        not s.is_backward
        and s.phase == "forward"
        and not s.name.startswith("Distributed.")
        and s.dtype not in ("int64", "bool")
        and (s.op in ops if ops else s.op in COMPUTES)
        and int(np.prod(s.shape)) >= least
        and len(s.shape) >= dims
    )


def backward(ops: set[str] | None = None, least: int = 16, dims: int = 1) -> Pick:
    """Pick backward calls of some operators."""
    return lambda s: (
        s.is_backward
        and (s.op in ops if ops else s.op in COMPUTES)
        and int(np.prod(s.shape)) >= least
        and len(s.shape) >= dims
    )


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


def optimizer(op: str = "AdamW", least: int = 8, step: int | None = None) -> Pick:
    """Pick the optimizer's updates."""
    return lambda s: (
        s.op == op
        and s.phase == "optimizer"
        and int(np.prod(s.shape)) >= least
        and (step is None or s.step == step)
    )


def square(pick: Pick) -> Pick:
    """Pick only those sites that have square matrices."""
    return lambda s: pick(s) and len(s.shape) >= 2 and s.shape[-1] == s.shape[-2]


# ------------------------------------------------------------------ how


def result(function: Callable[[Array, np.random.Generator], Array], place: int = 0) -> Any:
    """Perturb one output."""

    def draw(rng: np.random.Generator) -> Change:
        def change(outs: list[Array], *_: Any) -> list[Array]:
            at = place if place < len(outs) else 0
            new = np.asarray(function(outs[at], rng)).astype(outs[at].dtype, copy=False)
            return [new if i == at else o for i, o in enumerate(outs)]

        return change

    return draw


def typed(function: Callable[[Array, np.random.Generator], Array], place: int = 0) -> Any:
    """Perturb one output; the result is stored in the program's type."""

    def draw(rng: np.random.Generator) -> Change:
        def change(outs: list[Array], ins: list[Array], engine: Engine, rank: int) -> list[Array]:
            at = place if place < len(outs) else 0
            kind = engine.planted.site.dtype if engine.planted else "float32"
            with np.errstate(all="ignore"):
                new = rounded(np.asarray(function(outs[at], rng), np.float32), kind)
            return [new if i == at else o for i, o in enumerate(outs)]

        return change

    return draw


def argument(
    place: int, function: Callable[[Array, list[Array], Engine, int, np.random.Generator], Array]
) -> Any:
    """Perturb one input."""

    def draw(rng: np.random.Generator) -> Change:
        def change(ins: list[Array], engine: Engine, rank: int) -> list[Array]:
            at = place % len(ins)
            new = function(ins[at], ins, engine, rank, rng)
            return [np.asarray(new) if i == at else x for i, x in enumerate(ins)]

        return change

    return draw


def setting(**changed: Any) -> Any:
    """Perturb settings; a function is applied to the right value."""

    def draw(rng: np.random.Generator) -> Change:
        def change(s: dict[str, Any]) -> dict[str, Any]:
            return {
                **s,
                **{k: v(s[k]) if callable(v) else v for k, v in changed.items() if k in s},
            }

        return change

    return draw


def exchange(function: Callable[..., list[Array]]) -> Any:
    """Perturb what the ranks of a group receive: ``function(got, parts, rng, info)``."""

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
            info = {"x": x, "group": group, "make": make, "given": given, "engine": engine}
            return function([g.copy() for g in got], parts, rng, info)

        return change

    return draw


def rms(x: Array) -> float:
    """Return the root mean square of values."""
    return float(np.sqrt(np.mean(np.square(x[np.isfinite(x)], dtype=np.float64)))) or 1.0


def at_one(x: Array, rng: np.random.Generator, function: Callable[[float], float]) -> Array:
    """Perturb one element that is not smaller than usual."""
    flat = x.copy().reshape(-1)
    large = np.flatnonzero(np.abs(flat) >= 0.5 * rms(flat))
    i = int(rng.choice(large)) if len(large) else 0
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
    large = np.flatnonzero(np.abs(flat) >= 0.5 * rms(flat))
    i = int(rng.choice(large)) if len(large) else 0
    words = flat.view(np.uint32)
    words[i] ^= np.uint32(1 << int(rng.choice(list(bits))))
    return flat.reshape(x.shape)


def other(x: Array, ins: list[Array], engine: Engine, rank: int, rng: np.random.Generator) -> Array:
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


def narrowed(numerics: Numerics, dtype: str) -> Numerics:
    """Return numerics whose sums are rounded to a narrow type."""
    return replace(numerics, accumulator=dtype)
