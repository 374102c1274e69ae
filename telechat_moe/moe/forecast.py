"""The loads that the next steps are expected to bring: the mean of a sliding window of steps.

Shapes: N steps, L MoE layers, E experts. A load is the number of (token, expert) pairs that an expert got in a step.
"""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError


def check_loads(
    loads_NLE: NDArray[np.number[Any]], pairs: int | None = None
) -> NDArray[np.float64]:
    """Return the loads as float64.

    Args:
        loads_NLE: `[N, L, E]`, the loads of each step.
        pairs: Tokens times top-k of a step, which the loads of each step and layer must add up to. None: each step's own
            layers must agree, which holds where every token takes part in every MoE layer and none is dropped.

    Raises:
        BadInputError: Loads that are not numbers, are negative or do not add up.
    """
    loads = np.asarray(loads_NLE)
    if loads.ndim != 3 or not loads.size or loads.dtype.kind not in "iuf":
        raise BadInputError(
            f"expert loads: shape {loads.shape} and type {loads.dtype}, expected numbers [steps, layers, experts]"
        )
    loads = loads.astype(np.float64)
    for bad, fault in ((~np.isfinite(loads), "is not a number"), (loads < 0, "is negative")):
        if bad.any():
            n, layer, e = (int(i[0]) for i in np.nonzero(bad))
            raise BadInputError(
                f"expert loads: step {n}, MoE layer {layer}, expert {e}: {loads[n, layer, e]} {fault}"
            )
    sum_NL = loads.sum(axis=2)
    expected_N1 = np.full((len(loads), 1), pairs) if pairs is not None else sum_NL[:, :1]
    wrong = np.abs(sum_NL - expected_N1) > 1e-6 * np.maximum(expected_N1, 1)
    if wrong.any():
        n, layer = (int(i[0]) for i in np.nonzero(wrong))
        source = "tokens x top-k are" if pairs is not None else "those of layer 0 are"
        raise BadInputError(
            f"expert loads: step {n}, MoE layer {layer}: the loads add up to {sum_NL[n, layer]:.10g}, {source} "
            f"{expected_N1[n, 0]:.10g}"
        )
    return loads


class LoadWindow:
    """The loads of the last steps, of which the mean is the forecast."""

    def __init__(self, steps: int, pairs: int | None = None) -> None:
        """Keep the loads of the last `steps` steps; `pairs` as in `check_loads`."""
        self._pairs = pairs
        self._steps: deque[NDArray[np.float64]] = deque(maxlen=steps)

    def add(self, loads_LE: NDArray[np.number[Any]]) -> None:
        """Add the loads of one step, `[L, E]`; the oldest leaves a full window.

        Raises:
            BadInputError: `check_loads` refuses them.
        """
        self._steps.append(check_loads(np.asarray(loads_LE)[None], self._pairs)[0])

    def clear(self) -> None:
        """Forget all steps, as after a return to an earlier one."""
        self._steps.clear()

    def __len__(self) -> int:
        return len(self._steps)

    def loads(self) -> NDArray[np.float64]:
        """Return the loads of the steps kept, `[N, L, E]`, the oldest first.

        Raises:
            BadInputError: No step was added.
        """
        if not self._steps:
            raise BadInputError(
                "expert loads: the window is empty, so there is nothing to forecast from"
            )
        return np.stack(self._steps)


def forecast(loads_NLE: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the expected load of each expert in the next steps, `[L, E]`: the mean of the window."""
    return loads_NLE.mean(axis=0)
