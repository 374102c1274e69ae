"""Represent tensors on logical ranks, and make the records that a reader of dumps returns."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.align_faults.kernels import Array, rounded
from telechat_moe.tools.align.dump.records import Scalar, TensorLayout, TensorRecord, Value


class Tensor:
    """A tensor on some ranks.

    Args:
        values: Of each rank; floating-point values are float32.
        dtype: What they are rounded to; ``int64`` and ``bool`` for others.
        needs: Whether a gradient flows back to it.
    """

    __slots__ = ("dtype", "grad", "needs", "values")

    def __init__(self, values: dict[int, Array], dtype: str, needs: bool = False) -> None:
        self.values, self.dtype, self.needs = values, dtype, needs
        self.grad: dict[int, Array] = {}

    @property
    def ranks(self) -> list[int]:
        """Ranks that hold the tensor."""
        return list(self.values)

    @property
    def is_float(self) -> bool:
        """Whether it has floating-point values."""
        return self.dtype in ("float32", "bfloat16", "float16")

    def on(self, ranks: Iterable[int]) -> "Tensor":
        """Return the same tensor on fewer ranks, without its history."""
        return Tensor({r: self.values[r] for r in ranks}, self.dtype)


def send(tensor: Tensor, rank: int, grad: Array) -> None:
    """Add to the tensor's gradient; each sum is rounded to the tensor's type."""
    if rank in tensor.grad:
        tensor.grad[rank] = rounded(tensor.grad[rank] + grad, tensor.dtype)
    else:
        tensor.grad[rank] = grad


def record(
    x: Array, dtype: str, needs: bool | None = None, layout: TensorLayout | None = None
) -> TensorRecord:
    """Return an array as a reader of dumps returns it."""
    return TensorRecord(dtype, x.shape, layout=layout, requires_grad=needs, read=lambda: x)


def arguments(
    name: str, tensors: Sequence[Value], settings: dict[str, Any]
) -> tuple[list[Value], dict[str, Value]]:
    """Return positional and named arguments as torch programs give them."""
    s = {k: _scalar(v) for k, v in settings.items()}
    op = name.rpartition(".")[2]
    t = list(tensors)
    if op == "rms_norm":
        return [t[0], [_scalar(v) for v in settings["shape"]], t[1], s["eps"]], {}
    if op in ("cat", "stack"):
        return [t], s
    if op in ("gather", "index_select"):
        return [t[0], s.get("dim", Scalar("int", 0)), t[1]], {}
    if op in ("mul", "masked_fill"):
        return [*t, *s.values()], {}
    if op == "reshape":
        return [t[0], *(_scalar(v) for v in settings["shape"])], {}
    if op == "transpose":
        return [t[0], s["dim0"], s["dim1"]], {}
    if op == "to":
        return [t[0], Scalar("torch.dtype", f"torch.{settings['dtype']}")], {}
    if op == "grouped_matmul":
        return [[t[0]], [t[1]]], {"group_list": t[2]}
    if op == "scaled_dot_product_attention":
        return t[:3], {"attn_mask": t[3], **s}
    if op == "AdamW":
        names = ("weight", "grad", "exp_avg", "exp_avg_sq")
        return [], {**dict(zip(names, t, strict=True)), **s}
    return t, s


def _scalar(value: Any) -> Value:
    if isinstance(value, tuple | list):
        return [_scalar(v) for v in value]
    return Scalar(type(value).__name__, value)


def integer_type(x: Array) -> str:
    """Return the type of an array that holds no floating-point values."""
    return "bool" if x.dtype.kind == "b" else "int64"


def widest(inputs: Sequence[Tensor], dtype: str) -> str:
    """Return float32 if an input has it, else the program's type."""
    kinds = {t.dtype for t in inputs if t.is_float}
    return "float32" if "float32" in kinds else dtype
