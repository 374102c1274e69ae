"""What several areas of faults are made of."""

from typing import Any

from benchmarks.align_faults.faults import (
    backward,
    fault,
    forward,
)

F32 = {"dtypes": ("float32",)}
PLAIN = forward()
BACK = backward()
GEMM = {"linear", "grouped_matmul", "matmul"}


def add(name: str, area: str, families: str, stage: str, pick: Any, draw: Any, **more: Any) -> None:
    """Register a class whose drawing is an expression, as :func:`faults.fault` does one that is a function."""
    fault(name, area, families, stage, pick, **more)(draw)
