"""Checkpoints whose content can be told from their step, for the tests of checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.checkpoint import checkpoint

Groups = dict[str, dict[str, np.ndarray]]


def make(step: int, count: int = 6) -> "Groups":
    """Tensors whose every element is derived from the step."""
    groups: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for i in range(count):
        group = groups["model" if i % 3 == 0 else "optimizer"]
        group[f"layers.{i}.weight"] = np.full((i + 1, 7), step * 1000 + i, np.float32)
    return groups


def assert_made(found: checkpoint.Checkpoint | None, count: int = 6) -> int:
    """Check that a checkpoint is complete and of one step; returns the step."""
    assert found is not None
    assert_equal(found.tensors, make(found.step, count))
    assert found.state == {"step": found.step}
    return found.step


def assert_equal(found: Groups, expected: Groups) -> None:
    assert {g: set(names) for g, names in found.items()} == {
        g: set(names) for g, names in expected.items()
    }
    for group, names in expected.items():
        for name, array in names.items():
            other = found[group][name]
            assert other.dtype == array.dtype
            assert other.shape == array.shape
            assert other.tobytes() == array.tobytes()


def assert_near(found: Groups, expected: Groups, bound: float) -> None:
    """Check that no tensor is farther off than ``bound`` of its own norm, so that small ones count, too."""
    assert {g: set(names) for g, names in found.items()} == {
        g: set(names) for g, names in expected.items()
    }
    for group, names in expected.items():
        for name, array in names.items():
            right = array.astype(np.float64)
            off = np.linalg.norm(found[group][name] - right)
            assert off <= bound * np.linalg.norm(right), (name, off, np.linalg.norm(right))


def names_in(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name != ".lock")
