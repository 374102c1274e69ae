"""FP8 weights with a scale for each block, as DeepSeek-V3 publishes them, read as bfloat16.

A matrix ``X.weight`` of type ``F8_E4M3`` comes with ``X.weight_scale_inv``, one float32, bfloat16 or UE8M0 (DeepSeek-V3.1 and
later: a power of two) for each block of 128 x 128; blocks at the lower and right edge may be smaller. A weight is its FP8 value times the scale of its block, computed in
float32 and rounded to bfloat16 (to nearest, ties to even), as DeepSeek's own ``fp8_cast_bf16.py`` does.

Source: DeepSeek-V3, README_WEIGHTS.md; Micikevicius et al. 2022 (E4M3: bias 7, no infinities, NaN = S.1111.111); OCP
Microscaling formats 1.0 (E8M0: bias 127, NaN = 255).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telechat_moe.numerics import widen
from telechat_moe.tensor_files import Bytes, TensorEntry

FP8 = "F8_E4M3"
SCALE = "_scale_inv"
BLOCK = (128, 128)


def e4m3_values() -> NDArray[np.float32]:
    """Return the value of each of the 256 codes."""
    return widen(np.arange(256, dtype=np.uint8), "float8_e4m3")


_VALUES = e4m3_values()


def e8m0_values(codes: Bytes) -> NDArray[np.float32]:
    """Return the powers of two that UE8M0 codes stand for, ``2^(code - 127)``; 255 is NaN."""
    bits = codes.astype(np.uint32) << 23  # the exponent of a float32, but for the ends
    bits[codes == 0], bits[codes == 255] = 0x00400000, 0x7FC00000
    return bits.view(np.float32)


_SCALES: dict[str, Callable[[Bytes], NDArray[np.float32]]] = {
    "F32": lambda raw: raw.view(np.float32),
    "BF16": lambda raw: widen(raw.view(np.uint16), "bfloat16"),
    "F8_E8M0": e8m0_values,
}
"""Data types of scales, and how their bytes are read."""


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of float32 values rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


@dataclass(frozen=True)
class Fp8Entry(TensorEntry):
    """An FP8 matrix that reads as bfloat16.

    Attributes:
        scale: Its block scales, F32, BF16 or F8_E8M0.
    """

    scale: TensorEntry
    block: tuple[int, int]

    def read(self, offset: int = 0, count: int | None = None) -> Bytes:
        """See :meth:`TensorEntry.read`; offsets are those of the bfloat16 matrix."""
        data = np.concatenate([np.empty(0, np.uint8), *self.chunks()])
        return data[offset : self.nbytes if count is None else offset + count]

    def chunks(self) -> Iterator[Bytes]:
        """Yield the bfloat16 bytes, a row of blocks at a time."""
        rows, columns = self.shape
        scale = _SCALES[self.scale.dtype](self.scale.read()).reshape(self.scale.shape)
        for number, top in enumerate(range(0, rows, self.block[0])):
            height = min(self.block[0], rows - top)
            codes = TensorEntry(self.file, FP8, self.shape, self.start, rows * columns)
            raw = codes.read(top * columns, height * columns).reshape(height, columns)
            factors = np.repeat(scale[number], self.block[1])[:columns]
            with np.errstate(over="ignore"):
                values = _VALUES[raw] * factors
            yield to_bfloat16(values).reshape(-1).view(np.uint8)


def dequantised(
    entries: Mapping[str, TensorEntry], block: tuple[int, int]
) -> tuple[dict[str, TensorEntry], list[str]]:
    """Replace FP8 matrices and their scales by entries that read as bfloat16; return also what is wrong, a line each."""
    readable, problems = dict(entries), list[str]()
    for name, entry in entries.items():
        if entry.dtype != FP8:
            continue
        scale = readable.pop(name + SCALE, None)
        if len(entry.shape) != 2 or scale is None:
            problems.append(
                f"{name} is {FP8} of shape {list(entry.shape)} "
                + ("without " if scale is None else "with ")
                + f"{name}{SCALE}; FP8 weights must be matrices with block scales"
            )
            continue
        scale_shape = tuple(-(-n // b) for n, b in zip(entry.shape, block, strict=True))
        if scale.dtype not in _SCALES or scale.shape != scale_shape:
            problems.append(
                f"{name}{SCALE} is {scale.dtype} {list(scale.shape)}; blocks of {block[0]} x {block[1]} "
                f"of {list(entry.shape)} need F32 {list(scale_shape)}, or BF16 or F8_E8M0"
            )
            continue
        nbytes = 2 * entry.shape[0] * entry.shape[1]
        place = (entry.file, "BF16", entry.shape, entry.start, nbytes)
        readable[name] = Fp8Entry(*place, scale, block)
    return readable, problems
