"""Judge the same dumps by other methods: msprobe 26.2.0 and allclose.

msprobe's rules are those of its ``core/compare``: tensor mode calls an operator wrong if all its inputs have more than
90 % of elements within a thousandth and an output less than 10 %, and doubtful if the smallest cosine falls by more than
0.1 from inputs to outputs above 0.9 (``indicator_analysis/algorithm.py``); ``-da`` calls it different if the largest,
smallest, mean value or norm of an output is off by more than half (``diff_analyze_threshold.yaml``). Its rule on types is
left out: it would flag every pair of two types. allclose takes torch's tolerances, for each operator or for the loss and
the updated weights alone.
"""

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.align_faults.kernels import Array
from telechat_moe.tools.align.dump.records import Call, Dump, Phase

TOLERANCES = {"float32": (1.3e-6, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float16": (1e-3, 1e-5)}
"""``torch.testing.assert_close``: relative and absolute."""

_ORDER = {"pass": 0, "warning": 1, "error": 2}
_SKIPPED = {"to", "empty", "empty_like", "numpy", "__setitem__"}
_NO_INPUTS = {"all_to_all_single", "_reduce_scatter_base", "_all_gather_base", "batch_isend_irecv"}

Pairs = list[tuple[Array, Array, str]]


def cosine(target: Array, golden: Array) -> float | None:
    """Return msprobe's cosine; None where it gives none."""
    x, y = target.astype(np.float64).reshape(-1), golden.astype(np.float64).reshape(-1)
    a, b = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    least = float(np.finfo(float).eps)
    if a <= least and b <= least:
        return 1.0
    return None if a <= least or b <= least else float(x @ y) / (a * b)


def thousandth(target: Array, golden: Array) -> float:
    """Return the share of elements whose relative error is below a thousandth."""
    x, y = target.astype(np.float64).reshape(-1), golden.astype(np.float64).reshape(-1)
    zero = (y == 0) * np.finfo(np.float64).eps
    with np.errstate(all="ignore"):
        return float(np.mean(np.abs((x + zero) - (y + zero)) / np.abs(y + zero) < 1e-3))


def tensor_rule(name: str, inputs: Pairs, outputs: Pairs) -> str:
    """Return ``pass``, ``warning`` or ``error`` of msprobe's tensor mode for one operator.

    Args:
        name: Of the operator, without number.
        inputs: Target's and golden tensors that went in.
        outputs: Those that came out.
    """
    short = name.split(".")[1] if "." in name else name
    if short in _SKIPPED:
        return "pass"
    seen = outputs if short in _NO_INPUTS else [*inputs, *outputs]
    for target, golden, _ in seen:
        if target.shape != golden.shape or (_broken(target) and not _broken(golden)):
            return "error"
    if short in _NO_INPUTS or not outputs:
        return "pass"
    a, b = _least(inputs, thousandth), _least(outputs, thousandth)
    if a > 0.9 and b < 0.1:
        return "error"
    a, b = _least(inputs, cosine), _least(outputs, cosine)
    return "warning" if a > 0.9 and a - b > 0.1 else "pass"


def _broken(x: Array) -> bool:
    """Return whether the largest or smallest value is not finite."""
    return bool(x.size and not (np.isfinite(x.max()) and np.isfinite(x.min())))


def _least(pairs: Pairs, measure: Callable[[Array, Array], float | None]) -> float:
    found = 1.0
    for target, golden, _ in pairs:
        if target.ndim == 0 or not target.size or not np.all(np.isfinite(target)):
            continue
        if np.all(np.isfinite(golden)) and target.shape == golden.shape:
            value = measure(target, golden)
            found = found if value is None else min(found, value)
    return found


def statistics_differ(outputs: Pairs) -> bool:
    """Return whether ``-da`` calls an operator different."""
    for target, golden, _ in outputs:
        if not target.size or target.dtype.kind == "b":
            continue
        for a, b in zip(_statistics(target), _statistics(golden), strict=True):
            if b and np.isfinite(a) and np.isfinite(b) and abs((a - b) / b) > 0.5:
                return True
    return False


def _statistics(x: Array) -> tuple[float, float, float, float]:
    y = x.astype(np.float64)
    with np.errstate(all="ignore"):
        return float(y.max()), float(y.min()), float(y.mean()), float(np.linalg.norm(y))


def not_close(outputs: Pairs) -> bool:
    """Return whether allclose fails for an output."""
    for target, golden, dtype in outputs:
        if target.shape != golden.shape:
            return True
        if target.dtype.kind != "f":
            if not np.array_equal(target, golden):
                return True
            continue
        rtol, atol = TOLERANCES.get(dtype, TOLERANCES["float32"])
        if not np.allclose(target, golden, rtol, atol, equal_nan=True):
            return True
    return False


def _in_order(reference: Dump, target: Dump) -> Iterator[tuple[str, Call, Pairs, Pairs]]:
    """Yield the calls whose tensors differ between both runs, in their order on a rank."""
    for step in target.steps:
        ranks = [r.rank for r in target.at(step)]
        lists = [list(target.ranks[step, rank].calls.items()) for rank in ranks]
        for place in range(max(map(len, lists))):
            for rank, calls in zip(ranks, lists, strict=True):
                if place >= len(calls):
                    continue
                key, call = calls[place]
                other = reference.ranks[step, rank].calls.get(key)
                if other is None:
                    continue
                sides = pairs(call, other)
                if any(not np.array_equal(a, b) for side in sides for a, b, _ in side):
                    yield key, call, *sides


def pairs(call: Call, other: Call) -> tuple[Pairs, Pairs]:
    """Return the inputs and the outputs of a call in both runs: target, golden, and the narrower type."""
    found: tuple[Pairs, Pairs] = [], []
    theirs = dict(other.tensors())
    for place, tensor in call.tensors():
        golden = theirs.get(place)
        if golden is not None and tensor.read is not None and golden.read is not None:
            wide = golden.dtype if golden.dtype in ("bfloat16", "float16") else tensor.dtype
            found[place.startswith("output")].append((tensor.load(), golden.load(), wide))
    return found


def inputs_agree(inputs: Pairs, outputs: Pairs) -> bool:
    """Return whether outputs differ by a thousandth of their size, and no input does (relative L2, whole tensors)."""
    return not any(map(_apart, inputs)) and any(map(_apart, outputs))


def _apart(pair: tuple[Array, Array, str]) -> bool:
    target, golden = (x.astype(np.float64).reshape(-1) for x in pair[:2])
    if target.size != golden.size or not np.array_equal(np.isfinite(target), np.isfinite(golden)):
        return True
    off = np.where(np.isfinite(golden), target - golden, 0.0)
    return float(np.linalg.norm(off)) > 1e-3 * float(np.linalg.norm(np.nan_to_num(golden)))


def _ends_apart(call: Call, inputs: Pairs, outputs: Pairs) -> bool:
    """Return whether allclose fails for the loss or an updated weight."""
    last = call.phase is Phase.OPTIMIZER or call.name == "Functional.cross_entropy"
    return last and call.phase is not Phase.BACKWARD and not_close(outputs[:1])


METHODS: dict[str, Callable[[Call, Pairs, Pairs], bool]] = {
    "msprobe tensor mode": lambda call, ins, outs: tensor_rule(call.name, ins, outs) != "pass",
    "msprobe -da": lambda call, ins, outs: statistics_differ(outs),
    "allclose of each operator": lambda call, ins, outs: not_close(outs),
    "allclose end to end": _ends_apart,
    "first other bits, or checksum": lambda call, ins, outs: any(
        not np.array_equal(a, b) for a, b, _ in outs
    ),
    "inputs equal to 0.001, outputs not": lambda call, ins, outs: inputs_agree(ins, outs),
}
"""Whether each method flags a call."""


def judged(reference: Dump, target: Dump) -> dict[str, str | None]:
    """Return for each of :data:`METHODS` the call that it names first; None: it finds nothing.

    The end-to-end method names no call: an empty text says that the comparison fails.
    """
    found: dict[str, str | None] = dict.fromkeys(METHODS)
    for key, call, inputs, outputs in _in_order(reference, target):
        for name, flags in METHODS.items():
            if found[name] is None and flags(call, inputs, outputs):
                found[name] = "" if flags is _ends_apart else key
        if all(name is not None for name in found.values()):
            break
    return found
