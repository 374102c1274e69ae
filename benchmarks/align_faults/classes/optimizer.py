"""Faults of the optimizer."""

import numpy as np

from benchmarks.align_faults.classes.common import (
    add,
)
from benchmarks.align_faults.faults import (
    argument,
    optimizer,
    setting,
)

add(
    "no correction of bias",
    "optimizer",
    "wrong setting",
    "hidden settings",
    optimizer(),
    setting(step=1e6),
)
add(
    "weight decay forgotten",
    "optimizer",
    "wrong setting",
    "hidden settings",
    lambda s: optimizer()(s) and len(s.shape) > 1,
    setting(weight_decay=0.0),
)
add(
    "weight decay doubled",
    "optimizer",
    "wrong setting",
    "hidden settings",
    lambda s: optimizer()(s) and len(s.shape) > 1,
    setting(weight_decay=lambda v: 2 * v),
)
add(
    "rate doubled",
    "optimizer",
    "wrong setting",
    "hidden settings",
    optimizer(),
    setting(lr=lambda v: 2 * v),
)
add(
    "rate of another step, said",
    "optimizer",
    "wrong setting",
    "settings",
    optimizer(),
    setting(lr=lambda v: v * 0.9),
)
add(
    "betas exchanged",
    "optimizer",
    "wrong setting",
    "hidden settings",
    optimizer(),
    setting(betas=(0.95, 0.9)),
)
add("eps of Adam", "optimizer", "wrong setting", "hidden settings", optimizer(), setting(eps=1e-3))
add(
    "weight not updated",
    "optimizer",
    "skipped",
    "result",
    optimizer(),
    lambda r: lambda outs, ins, *_: [ins[0].copy(), *outs[1:]],
)
add(
    "first moment not updated",
    "optimizer",
    "skipped",
    "result",
    optimizer(step=1),
    lambda r: lambda outs, ins, *_: [outs[0], ins[2].copy(), outs[2]],
    steps=2,
)
add(
    "second moment of the gradient, not its square",
    "optimizer",
    "unknown",
    "result",
    optimizer(),
    lambda r: (
        lambda outs, ins, *_: [
            outs[0],
            outs[1],
            (0.95 * ins[3] + 0.05 * np.abs(ins[1])).astype(np.float32),
        ]
    ),
)
add(
    "update in the wrong direction",
    "optimizer",
    "wrong setting | sign",
    "hidden settings",
    optimizer(),
    setting(lr=lambda v: -v),
)
add(
    "clipping left out",
    "optimizer",
    "skipped",
    "result",
    lambda s: (
        s.phase == "optimizer" and s.op == "mul" and s.tag == "clip" and int(np.prod(s.shape)) >= 16
    ),
    lambda r: lambda outs, ins, *_: [ins[0].copy()],
)
add(
    "stale moments",
    "optimizer",
    "stale | zero | wrong tensor",
    "given",
    optimizer(step=1),
    argument(2, lambda x, ins, e, k, r: np.zeros_like(x)),
    steps=2,
)
add(
    "norm squared",
    "optimizer",
    "skipped",
    "result",
    lambda s: s.phase == "optimizer" and s.op == "sqrt",
    lambda r: lambda outs, ins, *_: [ins[0].copy()],
)
add(
    "handed the gradient before clipping",
    "optimizer",
    "scale | wrong tensor",
    "given",
    optimizer(),
    argument(1, lambda x, ins, e, k, r: x * np.float32(3.0)),
)
