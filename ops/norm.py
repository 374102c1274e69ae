"""Root-mean-square normalisation."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import One, initializer
from mindspore.ops.auto_generate import RmsNorm

from telechat_moe.ops import dvm
from telechat_moe.ops.custom import Tensors
from telechat_moe.ops.select import backend


class RMSNorm(nn.Cell):
    """Scale each row to unit root mean square, then by a learned weight.

    ``y = x / sqrt(mean(x^2) + eps) * weight``, computed in ``compute_dtype``.

    Backends: fused (a DVM program, fp32), plain, ascend (``RmsNorm``; not run here).

    Args:
        out_dtype: Data type of the result; None = the input's.

    Source: Zhang and Sennrich 2019, equation 4.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        compute_dtype: ms.Type = ms.float32,
        out_dtype: ms.Type | None = None,
    ) -> None:
        super().__init__()
        self.out_dtype = out_dtype
        self.weight = Parameter(initializer(One(), (width,), ms.float32), name="weight")
        self.backend = backend("rms_norm")
        if self.backend == "fused" and compute_dtype != ms.float32:
            self.backend = "plain"
        if self.backend == "fused":
            self.fused = FusedRMSNorm(width, eps)
        elif self.backend == "ascend":
            self.rms_norm = RmsNorm(eps)
        self.eps = Tensor(eps, compute_dtype)
        self.compute_dtype = compute_dtype
        self.to_compute = ops.Cast()
        self.weight_to_compute = ops.Cast()
        self.square = ops.Square()
        self.mean = ops.ReduceMean(keep_dims=True)
        self.add_eps = ops.Add()
        self.rsqrt = ops.Rsqrt()
        self.normalize = ops.Mul()
        self.scale = ops.Mul()
        self.to_out = ops.Cast()

    def construct(self, x_TH: Tensor) -> Tensor:
        """Normalise the last dimension of ``x_TH`` (any leading dimensions)."""
        x = self.to_compute(x_TH, self.compute_dtype)
        dtype = x_TH.dtype if self.out_dtype is None else self.out_dtype
        if self.backend == "fused":
            return self.to_out(self.fused(x, self.weight), dtype)
        if self.backend == "ascend":
            weight_H = self.weight_to_compute(self.weight, self.compute_dtype)
            return self.to_out(self.rms_norm(x, weight_H)[0], dtype)
        inverse = self.rsqrt(self.add_eps(self.mean(self.square(x), -1), self.eps))
        weight_H = self.weight_to_compute(self.weight, self.compute_dtype)
        y = self.scale(self.normalize(x, inverse), weight_H)
        return self.to_out(y, dtype)


def rms_norm_program(width: int, eps: float) -> dvm.DvmProgram:
    """Return ``(x [T, H], weight [H]) -> [T, H]`` for the virtual machine."""

    def rms_norm(k: dvm.Builder, x: dvm.ProgramValue, weight: dvm.ProgramValue) -> None:
        mean = k.sum(x * x, -1) * (1.0 / width)
        k.store(x * k.rsqrt(mean + eps) * weight)

    return dvm.build(rms_norm, ("T", width), (width,))


def add_rms_norm_program(width: int, eps: float) -> dvm.DvmProgram:
    """Return ``(x, y [T, H], weight [H]) -> (norm of x + y, x + y)`` for the virtual machine."""

    def add_rms_norm(
        k: dvm.Builder, x: dvm.ProgramValue, y: dvm.ProgramValue, weight: dvm.ProgramValue
    ) -> None:
        h = x + y
        mean = k.sum(h * h, -1) * (1.0 / width)
        k.store(h * k.rsqrt(mean + eps) * weight)
        k.store(h)

    return dvm.build(add_rms_norm, ("T", width), ("T", width), (width,))


def add_rms_norm_backward(width: int, eps: float) -> dvm.DvmProgram:
    """Return ``(x + y, weight, d norm, d sum) -> (d x = d y, d weight)``: the sum is not recomputed."""

    def backward(
        k: dvm.Builder,
        h: dvm.ProgramValue,
        weight: dvm.ProgramValue,
        d: dvm.ProgramValue,
        dh: dvm.ProgramValue,
    ) -> None:
        inverse = k.rsqrt(k.sum(h * h, -1) * (1.0 / width) + eps)
        g = d * weight
        slope = k.sum(g * h, -1) * inverse * inverse * inverse * (-1.0 / width)
        k.store(g * inverse + slope * h + dh)
        k.store(k.sum(h * inverse * d, 0, keepdims=False))

    return dvm.build(backward, ("T", width), (width,), ("T", width), ("T", width))


class FusedRMSNorm(nn.Cell):
    """The fused backend of :class:`RMSNorm`, fp32; both gradients in one pass over the rows."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        program = rms_norm_program(width, eps)
        self.width = width
        self.forward = dvm.custom_op(program)
        self.backward = dvm.custom_op(dvm.grad(program))
        self.reshape = ops.Reshape()

    def construct(self, x_H: Tensor, weight_H: Tensor) -> Tensor:
        """Return the normalised rows, in the shape of ``x_H``."""
        y_TH = self.forward(self.reshape(x_H, (-1, self.width)), weight_H)
        return self.reshape(y_TH, x_H.shape)

    def bprop(
        self, x_H: Tensor, weight_H: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x_H and the weight."""
        rows = (-1, self.width)
        dx, dweight = self.backward(self.reshape(x_H, rows), weight_H, self.reshape(dout, rows))
        return self.reshape(dx, x_H.shape), dweight


class FusedAddRMSNorm(nn.Cell):
    """Residual addition and :class:`RMSNorm` of the sum in one pass, fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.forward = dvm.custom_op(add_rms_norm_program(width, eps))
        self.backward = dvm.custom_op(add_rms_norm_backward(width, eps))

    def construct(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + y), x + y)``, each ``[T, H]``."""
        return self.forward(x_TH, y_TH, weight_H)

    def bprop(
        self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, out: Tensors, dout: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of x, y (the same) and the weight."""
        dx, dweight = self.backward(out[1], weight_H, dout[0], dout[1])
        return dx, dx, dweight


class AddRMSNorm(nn.Cell):
    """``h = x + y`` and the :class:`RMSNorm` of h, with the norm's own weight and backend."""

    def __init__(self, norm: RMSNorm, width: int, eps: float) -> None:
        super().__init__(auto_prefix=False)
        self.norm = norm
        self.fused = FusedAddRMSNorm(width, eps) if norm.backend == "fused" else None
        self.add = ops.Add()

    def construct(self, x_TH: Tensor, y_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(norm(h), h)`` in the data type of ``x``."""
        if self.fused is not None and x_TH.dtype == ms.float32:
            return self.fused(x_TH, y_TH, self.norm.weight)
        h = self.add(x_TH, y_TH)
        return self.norm(h), h


def rms_norm_reference(x_TH: np.ndarray, weight_H: np.ndarray, eps: float) -> np.ndarray:
    """Define :class:`RMSNorm` in float64."""
    x = x_TH.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight_H
