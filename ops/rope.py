"""Rotary position embedding."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

from telechat_moe.ops.custom import custom_op
from telechat_moe.ops.select import backend


def rope_table(width: int, length: int, theta: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return cosine and sine of every position and frequency: ``[length, R / 2]`` float32, computed in float64.

    Args:
        width: Rotary width ``R``, even.
        theta: Base of the frequencies ``theta^(-2i/R)``.
    """
    frequency = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    angle = np.arange(length, dtype=np.float64)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


class Rope(nn.Cell):
    """Rotate pairs of the last dimension by an angle that grows with the position.

    The result holds first the rotated first members of all pairs, then the second members, whatever
    the input order; query and key are permuted alike, so their products do not change.

    Args:
        width: Rotary width ``R``, even.
        interleaved: Pairs are neighbours ``(0, 1), (2, 3), ...`` (DeepSeek-V3, TeleChat3);
            False: pairs are ``(0, R/2), (1, R/2 + 1), ...``.
        compute_dtype: Data type of the rotation; the result has the input's.

    Source: Su et al. 2021, equation 34.
    """

    def __init__(self, width: int, interleaved: bool, compute_dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        self.half = width // 2
        self.interleaved = interleaved
        self.compute_dtype = compute_dtype
        fused = backend("rope") == "fused" and compute_dtype == ms.float32
        self.fused = FusedRope(interleaved) if fused else None
        self.to_compute = ops.Cast()
        self.reshape = ops.Reshape()
        self.pairs_to_halves = ops.Transpose()
        self.split = ops.Split(-1, 2)
        self.mul = ops.Mul()
        self.sub = ops.Sub()
        self.add = ops.Add()
        self.concat = ops.Concat(-1)
        self.to_input = ops.Cast()

    def construct(self, x_BSNR: Tensor, cos_BS1r: Tensor, sin_BS1r: Tensor) -> Tensor:
        """Rotate ``x_BSNR``; ``cos`` and ``sin`` are ``[B, S, 1, R / 2]`` in ``compute_dtype``."""
        x = self.to_compute(x_BSNR, self.compute_dtype)
        if self.fused is not None:
            return self.to_input(self.fused(x, cos_BS1r, sin_BS1r), x_BSNR.dtype)
        if self.interleaved:
            B, S, N, R = x_BSNR.shape
            x = self.reshape(x, (B, S, N, self.half, 2))
            x = self.reshape(self.pairs_to_halves(x, (0, 1, 2, 4, 3)), (B, S, N, R))
        first, second = self.split(x)
        y = self.concat(
            (
                self.sub(self.mul(first, cos_BS1r), self.mul(second, sin_BS1r)),
                self.add(self.mul(second, cos_BS1r), self.mul(first, sin_BS1r)),
            )
        )
        return self.to_input(y, x_BSNR.dtype)


class FusedRope(nn.Cell):
    """The fused backend of :class:`Rope`, fp32."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.forward = custom_op("Rope", lambda x, cos, sin: x, interleaved=interleaved)
        self.backward = custom_op("RopeGrad", lambda dy, cos, sin: dy, interleaved=interleaved)

    def construct(self, x_BSNR: Tensor, cos_BS1r: Tensor, sin_BS1r: Tensor) -> Tensor:
        """Return the rotated ``[B, S, N, R]``."""
        return self.forward(x_BSNR, cos_BS1r, sin_BS1r)

    def bprop(
        self, x_BSNR: Tensor, cos_BS1r: Tensor, sin_BS1r: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate the gradient back; angles have none."""
        dx = self.backward(dout, cos_BS1r, sin_BS1r)
        return dx, ops.zeros_like(cos_BS1r), ops.zeros_like(sin_BS1r)


def rope_reference(
    x_BSNR: np.ndarray, position_BS: np.ndarray, theta: float, interleaved: bool
) -> np.ndarray:
    """Define :class:`Rope` in float64, as a product of complex numbers."""
    x = x_BSNR.astype(np.float64)
    width = x.shape[-1]
    if interleaved:
        pair = x[..., 0::2] + 1j * x[..., 1::2]
    else:
        pair = x[..., : width // 2] + 1j * x[..., width // 2 :]
    frequency = theta ** (-np.arange(0, width, 2) / width)
    turned = pair * np.exp(1j * position_BS[..., None, None] * frequency)
    return np.concatenate([turned.real, turned.imag], -1)
