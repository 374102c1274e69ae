"""Settings that a dump lacks (eps, scale, axis, transposition): tried on a call whose result is known.

MindSpore's primitives hold them as attributes, and msprobe records arguments only. The reference's call decides where
there is one, so that a wrong setting of the target is still found.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from telechat_moe.tools.align.dump.records import Call, Scalar, TensorRecord
from telechat_moe.tools.align.judge.verdict import judge
from telechat_moe.tools.align.operators import Arguments, Formula
from telechat_moe.tools.align.operators.registry import UNFIT, NotJudgedError


def inferred(
    formula: Formula, arguments: Arguments, given: set[str], made: Sequence[TensorRecord]
) -> dict[str, Any]:
    """Return values of the settings that the dump lacks, those with which the formula gives a call's result best.

    Args:
        formula: With the values to try (``guesses``).
        arguments: Of the call, which are changed.
        given: Names of the arguments in the dump.
        made: The call's results.

    Raises:
        NotJudgedError: None of the values gives the result.
    """
    tries = {n: values(arguments) for n, values in formula.guesses.items() if n not in given}
    tries = {name: values for name, values in tries.items() if values}
    if not tries or not made:
        return {}
    arguments.made = list(made)
    found: list[tuple[float, dict[str, Any]]] = []
    for values in product(*tries.values()):
        chosen = dict(zip(tries, values, strict=True))
        arguments.__dict__.update(chosen)
        try:
            expected = list(formula.compute(arguments))
            both = zip(made, expected, strict=False)
            ratios = [judge("", "", r.load(), e, r.dtype).ratio for r, e in both]
        except UNFIT:
            continue
        found.append((max(ratios, default=np.inf), chosen))
    ratio, best = min(found, key=lambda pair: pair[0]) if found else (np.inf, {})
    if ratio > 1:
        tried = "; ".join(f"{name} {', '.join(map(str, v))}" for name, v in tries.items())
        raise NotJudgedError(f"{formula.name}: not in the dump, and no usual value fits: {tried}")
    return best


def with_settings(call: Call, values: dict[str, Any]) -> Call:
    """Return a call with settings added to its arguments."""
    more = {name: Scalar(type(v).__name__, v) for name, v in values.items()}
    return replace(call, kwargs={**call.kwargs, **more})
