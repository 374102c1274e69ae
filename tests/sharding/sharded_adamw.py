"""How far weights may be apart after AdamW if the gradients are apart by no more than the bound on them.

AdamW divides by the root of the second moment, so where a gradient is nearly zero, its last bits decide the update's
sign. What is allowed is therefore derived, element by element, with the two runs' moments as intervals:

    dm' = beta1 dm + (1 - beta1) dg          dv' = beta2 dv + (1 - beta2) (2 |g| + dg) dg
    du  = the largest |m'/(sqrt(v') + e) - m/(sqrt(v) + e)| with m' in m +- dm and v' in v +- dv
    dw' = (1 - a d) dw + a du

``dg`` is the step's bound on gradients times the norm of the tensor's, as no element of a tensor within the bound is
further off. No update exceeds ``sqrt(sum of w1^2 / w2)``, by Cauchy and Schwarz with the weights w1, w2 of the gradients in m
and v; an element whose interval reaches that may legally flip. Rounding is 2^-22 of each moment and weight.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import sharded_compare as compare
import sharded_run as run

ROUNDING = 2.0**-22
Arrays = dict[str, np.ndarray]


def weight_bounds(found: compare.Found, bounds: Sequence[float]) -> Iterator[tuple[Arrays, Arrays]]:
    """Return for each of the first steps the largest legal difference of each weight's elements, and which may flip.

    Args:
        bounds: How far the gradients of each step may be apart, relative to their norm.
    """
    optimizer = run.make_optimizer("adamw")([])
    slopes: dict[str, tuple[np.ndarray, ...]] = {}
    steps = zip(compare.gradients(found, 1), found.reference["states"], bounds, strict=True)
    for step, (gradients, states, bound) in enumerate(steps, 1):
        rate, epsilon, decay = (float(x.asnumpy()) for x in optimizer.scalars(step, run.RATE))
        largest = _largest_update(step)
        allowed, flips = {}, {}
        for moment, g in gradients.items():
            name = moment.partition(".")[2]
            m, v, w = (
                states[prefix + name].astype(np.float64) for prefix in ("adam_m.", "adam_v.", "")
            )
            dm, dv, dw = slopes.get(name, (np.zeros_like(g),) * 3)
            dg = bound * np.linalg.norm(g)
            dm = run.BETAS[0] * dm + (1 - run.BETAS[0]) * dg + ROUNDING * np.abs(m)
            dv = run.BETAS[1] * dv + (1 - run.BETAS[1]) * (2 * np.abs(g) + dg) * dg + ROUNDING * v
            update = np.abs(m) / (np.sqrt(v) + epsilon)
            small, large = (np.sqrt(np.maximum(x, 0)) + epsilon for x in (v - dv, v + dv))
            lowest = np.abs(m) - dm
            high = np.minimum((np.abs(m) + dm) / small, largest)
            low = np.maximum(lowest / np.where(lowest < 0, small, large), -largest)
            du = np.maximum(high - update, update - low)
            dw = (1 - rate * decay) * dw + rate * du + ROUNDING * np.abs(w)
            slopes[name] = dm, dv, dw
            allowed[name], flips[name] = dw, low < 0
        yield allowed, flips


def _largest_update(step: int) -> float:
    """Return the most that |m| / sqrt(v) can be after so many steps."""
    ages = range(step)
    first = [(1 - run.BETAS[0]) * run.BETAS[0] ** age for age in ages]
    second = [(1 - run.BETAS[1]) * run.BETAS[1] ** age for age in ages]
    return math.sqrt(sum(a * a / b for a, b in zip(first, second, strict=True)))
