"""Building blocks that several areas of faults share."""

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
    """Register a class whose perturbation an expression draws; :func:`faults.fault` takes a function instead."""
    fault(name, area, families, stage, pick, **more)(draw)
