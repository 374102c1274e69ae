"""Specify the optimizer's updates."""

from typing import Any

import numpy as np

from benchmarks.align_bounds.inputs import Machine, Sample, Source
from benchmarks.align_bounds.specs.table import spec


def _state(s: Source) -> list[Any]:
    shape = (s.rows(64), 64)
    return [
        s.x(*shape, within=100.0),
        s.x(*shape, within=10.0),
        s.x(*shape, within=10.0),
        s.x(*shape, within=10.0, positive=True),
    ]


def _adamw_sample(s: Source) -> Sample:
    return Sample([*_state(s), int(s.rng.integers(1, 1000)), 1e-3, (0.9, 0.95), 1e-8, 0.1])


def _adamw(
    m: Machine,
    w: Any,
    g: Any,
    v1: Any,
    v2: Any,
    step: int,
    lr: float,
    betas: Any,
    eps: float,
    decay: float,
) -> Any:
    f = m.work
    b1, b2 = betas
    w = m.r(w * f(1 - lr * decay))
    v1 = m.r(m.r(v1 * f(b1)) + m.r(g * f(1 - b1)))
    v2 = m.r(m.r(v2 * f(b2)) + m.r(m.r(g * g) * f(1 - b2)))
    root = m.r(m.r(m.r(np.sqrt(v2)) / f((1 - b2**step) ** 0.5)) + f(eps))
    return [w - m.r(m.r(v1 / root) * f(lr / (1 - b1**step))), v1, v2]


spec("AdamW", _adamw_sample, _adamw)
spec(
    "SGD",
    lambda s: Sample([*_state(s)[:3], 0.1, 0.9], {"weight_decay": 0.01}),
    lambda m, w, g, b, lr, mu, weight_decay: (lambda v: [w - m.r(v * m.work(lr)), v])(
        m.r(m.r(b * m.work(mu)) + m.r(g + m.r(w * m.work(weight_decay))))
    ),
)
