"""Phase one: the operators of `telechat_moe.ops` alone, over a recipe's own shapes, against the float64 formulas.

    python -m telechat_moe.tools.phases.operators RECIPE OUT.json [KEY=VALUE ...]

It runs in a separate process because it needs MindSpore. Widths, head sizes and inner dimensions are the recipe's; rows
and columns are fewer (``cases.py``), since no bound depends on them. Values are drawn in the recipe's type. Each
backend runs forward and backward; backends that only Ascend has are counted but not judged here.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from telechat_moe.narrowing import is_list, is_sequence
from telechat_moe.tools.align.judge.coverage import answer
from telechat_moe.tools.align.judge.verdict import Verdict, judge
from telechat_moe.tools.align.judge.verdict import worst as worst_of
from telechat_moe.tools.align.operators.approx import Approx, Array, gradients

if TYPE_CHECKING:
    from telechat_moe.tools.phases.cases import OperatorCase


def run_case(
    case: "OperatorCase", backend: str, dtype: str, rng: np.random.Generator
) -> list[Verdict]:
    """Run one backend, forward and backward, and judge each of its results; incoming gradients are of type ``dtype``."""
    from mindspore import Tensor, ops

    from telechat_moe.ops import select
    from telechat_moe.tools.phases.cases import Draw, First

    with select.using(backend):
        cell = First(case.build()) if case.backward else case.build()
    inputs = [Tensor(x.astype(np.float32)) for x in case.inputs]
    constants = [Tensor(x.astype("i4" if x.dtype.kind == "i" else "f4")) for x in case.constants]
    exact = [Approx(x, case.stored) for x in case.inputs]
    formula: Any = case.formula(backend, *exact)
    expected: list[Approx] = formula if is_list(formula) else [formula]
    outputs: Any = cell(*inputs, *constants)
    results: Sequence[Any] = outputs if is_sequence(outputs) else [outputs]
    arrays: list[Array] = [x.asnumpy() for x in results]
    verdicts = [
        judge(case.operator, f"result {i}" if i else "forward", x, y, "float32")
        for i, (x, y) in enumerate(zip(arrays, expected, strict=False))
    ]
    if not case.backward:
        return verdicts
    coming = Draw(dtype, rng)(*arrays[0].shape)
    backward = ops.GradOperation(get_all=True, sens_param=True)(cell)
    going = backward(*inputs, *constants, Tensor(coming))
    slopes = gradients([(expected[0], Approx(coming, case.stored))], exact)
    for i, (slope, gradient) in enumerate(zip(slopes, going, strict=False)):
        if slope is not None:
            place = f"gradient of input {i}"
            verdicts.append(judge(case.operator, place, gradient.asnumpy(), slope, "float32"))
    return verdicts


def check(recipe: Any, seed: int = 0) -> dict[str, Any]:
    """Return the report of the phase: a row for each operator and backend."""
    import mindspore as ms

    from telechat_moe.ops import select
    from telechat_moe.tools.phases.cases import cases

    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    config = recipe.model_config
    rng = np.random.default_rng(seed)
    recipe_cases = cases(recipe, rng)
    rows: list[dict[str, Any]] = []
    for case in recipe_cases:
        for backend in case.backends or select.OPERATORS[case.operator]:
            if backend != "ascend":
                implementation = f"{backend}: {select.OPERATORS[case.operator][backend]}"
                verdicts = run_case(case, backend, config.compute_dtype, rng)
                dtype = case.dtype or config.compute_dtype
                rows.append(_row(case, implementation, dtype, verdicts))
    operators = {case.operator for case in recipe_cases}
    unknown = {f"{name}: the recipe has none" for name in set(select.OPERATORS) - operators}
    unknown |= {
        f"{name}: {backends['ascend']} runs on Ascend only"
        for name, backends in select.OPERATORS.items()
        if name in operators and "ascend" in backends
    }
    return _report(rows, dict.fromkeys(sorted(unknown), 1))


def _report(rows: list[dict[str, Any]], unknown: dict[str, int]) -> dict[str, Any]:
    wrong = [r for r in rows if r["verdict"] == "diverged"]
    sentence = f"{len(rows) - len(wrong)} of {len(rows)} operators and implementations are within their bounds"
    if wrong:
        first = wrong[0]
        sentence = f"{first['operator']} ({first['face']}, {first['shapes']}): {first['reason']}"
    verdict, _ = answer(bool(wrong), problem="" if rows else "nothing was judged")
    return {"verdict": verdict, "sentence": sentence, "operators": rows, "not_judged": unknown}


def _row(case: "OperatorCase", backend: str, dtype: str, verdicts: list[Verdict]) -> dict[str, Any]:
    v = worst_of(verdicts)
    shapes = ", ".join(" x ".join(map(str, x.shape)) for x in case.inputs)
    return {
        "operator": case.operator,
        "face": backend,
        "shapes": f"{case.sizes}: {shapes}",
        "dtype": dtype,
        "verdict": v.status,
        "observed_over_bound": v.ratio if np.isfinite(v.ratio) else None,
        "elements": sum(x.elements for x in verdicts),
        "reason": f"{v.place}: {v.reason}",
    }


def main(arguments: Sequence[str]) -> int:
    """Write the report of a recipe; arguments are those in the module's docstring."""
    os.environ.setdefault("GLOG_v", "3")
    from telechat_moe.recipe import load

    recipe, out, *overrides = arguments
    Path(out).write_text(json.dumps(check(load(recipe, overrides, use="written")), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
