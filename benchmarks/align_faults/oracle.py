"""Decide, knowing the planted fault, whether it can be seen and on which ranks.

The bound is not the tool's: an operator is run in float64, and some times in the program's type with operands that are
off by one rounding and sums in other orders. The spread of these right programs is the noise; a fault can be seen
where it moves an element by more than :data:`FACTOR` times the noise there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.align_faults.engine import Planted
from benchmarks.align_faults.kernels import BITS, KERNELS, Array, Numerics, rounded

FACTOR = 8.0
RUNS = 12
EXACT = {
    *("to", "reshape", "transpose", "cat", "stack", "chunk", "embedding", "gather", "index_select"),
    *("npu_moe_token_permute", "masked_fill", "neg"),
}
"""Operators that move values: their results have one right answer."""
_ORDERS = ("blas", "split", "reversed", "serial")


def seen_on(planted: Planted, seed: int = 0) -> list[int]:
    """Return the ranks on which a planted fault can be seen; none: it cannot.

    Args:
        planted: After the run.
        seed: Of the perturbed runs.
    """
    site, done = planted.site, planted.done
    if planted.stage == "skip":
        return list(site.ranks)
    if planted.stage in ("given", "send"):
        key = "parts" if planted.stage == "send" else "grads" if site.is_backward else "args"
        return _differing(done["before"], done[key], site.ranks, planted.stage == "send")
    rng = np.random.default_rng(seed)
    if "parts" in done:
        return _of_exchange(planted, rng)
    if site.op in EXACT and not site.is_backward:
        kernel = KERNELS[site.name].forward(done["args"], done["settings"], Numerics())
        right = [rounded(x, done["kind"]) for x in kernel]
        return _differing(right, done["outs"], site.ranks, False)
    run = _backward(done, site.name) if site.is_backward else _forward(done, site.name)
    operands = [*done["args"], *(done["grads"] if site.is_backward else [])]
    wrong = _beyond(done["outs"], run, operands, done["kind"], rng)
    return list(site.ranks) if wrong else []


def _differing(
    before: Sequence[Array], after: Sequence[Array], ranks: Sequence[int], each: bool
) -> list[int]:
    differs = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    if each:
        return [r for r, d in zip(ranks, differs, strict=True) if d]
    return list(ranks) if any(differs) else []


Run = Callable[[list[Array], Numerics], list[Array]]


def _forward(done: dict[str, Any], name: str) -> Run:
    return lambda ins, numerics: KERNELS[name].forward(ins, done["settings"], numerics)


def _backward(done: dict[str, Any], name: str) -> Run:
    kernel, count = KERNELS[name], len(done["args"])

    def run(operands: list[Array], numerics: Numerics) -> list[Array]:
        ins, grads = operands[:count], operands[count:]
        outs = kernel.forward(ins, done["settings"], numerics)
        assert kernel.backward is not None
        found = kernel.backward(ins, done["settings"], outs, grads, numerics)
        return [found[i] for i in done["places"]]

    return run


def _beyond(
    found: Sequence[Array], run: Run, operands: list[Array], kind: str, rng: np.random.Generator
) -> bool:
    """Return whether a result is further from the exact one than right programs are."""
    with np.errstate(all="ignore"):
        exact = run([_double(x) for x in operands], Numerics("float64"))
        spread = [_floor(np.asarray(e), kind) for e in exact]
        for i in range(RUNS):
            shaken = [_shaken(x, kind, rng) for x in operands]
            tried = run(shaken, Numerics(kind, _ORDERS[i % len(_ORDERS)]))
            for j, (t, e) in enumerate(zip(tried, exact, strict=True)):
                if spread[j] is not None:
                    error = np.abs(rounded(np.asarray(t), kind).astype(np.float64) - e)
                    spread[j] = np.fmax(spread[j], error)
        pairs = zip(found, exact, spread, strict=True)
        return any(_differs(np.asarray(f), np.asarray(e), s) for f, e, s in pairs)


def _double(x: Array) -> Array:
    return x.astype(np.float64) if x.dtype.kind == "f" else x


def _shaken(x: Array, kind: str, rng: np.random.Generator) -> Array:
    if x.dtype.kind != "f":
        return x
    unit = 2.0 ** -BITS[kind]
    return (x * (1 + unit * rng.uniform(-1, 1, x.shape))).astype(np.float32)


def _floor(exact: Array, kind: str) -> Any:
    """Return one spacing of the type at a result; None for integers."""
    if exact.dtype.kind != "f":
        return None
    return np.abs(exact) * 2.0 ** (1 - BITS[kind]) + 1e-38


def _differs(found: Array, exact: Array, spread: Array | None) -> bool:
    if spread is None:
        return not np.array_equal(found, exact)
    wrong = np.abs(found.astype(np.float64) - exact) > FACTOR * spread
    return bool(wrong.any() or np.any(np.isfinite(exact) & ~np.isfinite(found)))


def _of_exchange(planted: Planted, rng: np.random.Generator) -> list[int]:
    """Return the ranks that received something other than right programs give."""
    done, site = planted.done, planted.site
    if site.op == "recv":
        return _differing(done["parts"], done["outs"], site.ranks, True)
    make, given, kind = done["exchange"], done["given"], done["all"].dtype
    parts = done["parts"]
    if kind == "int64":
        exact = make(parts, given, Numerics(), kind)
        return _differing(exact, done["outs"], site.ranks, True)
    exact = make([_double(p) for p in parts], given, Numerics("float64"), "float64")
    spread = [_floor(e, kind) for e in exact]
    for i in range(RUNS if "reduce" in site.op else 0):
        order = rng.permutation(len(parts)) if "reduce" in site.op else np.arange(len(parts))
        numerics = Numerics(kind, _ORDERS[i % len(_ORDERS)])
        tried = make([parts[k] for k in order], [given[k] for k in order], numerics, kind)
        for j, (t, e) in enumerate(zip(tried, exact, strict=True)):
            spread[j] = np.fmax(spread[j], np.abs(t.astype(np.float64) - e))
    return [
        rank
        for rank, f, e, s in zip(site.ranks, done["outs"], exact, spread, strict=True)
        if _differs(f, e, s)
    ]
