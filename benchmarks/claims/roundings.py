"""Print the largest errors of MindSpore's exp and tanh on CPU, in roundings: half the spacing of float32."""

import numpy as np
from mindspore import Tensor, ops

CASES = {
    "exp near 0": (ops.exp, np.exp, 1),
    "exp": (ops.exp, np.exp, 80),
    "tanh": (ops.tanh, np.tanh, 10),
}

if __name__ == "__main__":
    for name, (function, exact, limit) in CASES.items():
        x = np.random.default_rng(0).uniform(-limit, limit, 10**6).astype(np.float32)
        expected = exact(x.astype(np.float64))
        unit = np.spacing(np.abs(expected).astype(np.float32)) / 2
        print(f"{name}: {np.max(np.abs(function(Tensor(x)).asnumpy() - expected) / unit):.0f}")
