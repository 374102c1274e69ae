"""Gradients of a cell, and of its NumPy reference by finite differences."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from telechat_moe.numerics import round_to


class Gradient(nn.Cell):
    """Value of a cell, and the gradients of its product with a cotangent."""

    def __init__(self, cell, inputs=(0,), with_parameters=False):
        super().__init__(auto_prefix=False)
        self.cell = cell
        parameters = cell.trainable_params() if with_parameters else None

        def product(cotangent, *args):
            out = cell(*args)
            out = out[0] if isinstance(out, tuple) else out
            return (out.astype(ms.float32) * cotangent).sum(), out

        positions = tuple(i + 1 for i in inputs)
        self.grad = ms.value_and_grad(product, positions, parameters, has_aux=True)

    def construct(self, cotangent, *args):
        (_, out), grads = self.grad(cotangent, *args)
        return out, grads

    def run(self, cotangent, *args):
        """Return ``(output, gradients)``; the gradients of inputs first, then of parameters."""
        tensors = [Tensor(a) if isinstance(a, np.ndarray) else a for a in args]
        out, grads = self(Tensor(cotangent), *tensors)
        return out.asnumpy().copy(), list(_flat(grads))


def _flat(nested):
    if isinstance(nested, (tuple, list)):
        for x in nested:
            yield from _flat(x)
    else:
        yield nested.asnumpy().copy()


def finite_differences(function, cotangent, arrays, which):
    """Return the gradient of ``sum(cotangent * function(*arrays))`` by one of the arrays, float64."""
    arrays = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays]
    gradient = np.zeros(arrays[which].shape)
    step = 1e-5
    for i in np.ndindex(gradient.shape):
        values = []
        for sign in (1, -1):
            moved = arrays[which].copy()
            moved[i] += sign * step
            args = [*arrays[:which], moved, *arrays[which + 1 :]]
            values.append((cotangent * function(*args)).sum())
        gradient[i] = (values[0] - values[1]) / (2 * step)
    return gradient


def close(found, expected, tolerance=1e-5):
    """Check a result against its scale."""
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)
    assert error < tolerance, f"relative to the largest value {error:.1e}"


def round_bf16(x):
    """Return float32 values rounded to bfloat16, to nearest even."""
    return round_to(x, "bfloat16").astype(np.float32)
