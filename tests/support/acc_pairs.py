"""Pairs of tensors that msprobe's acc_check was asked about; see fixtures/make_acc_check.py."""

import numpy as np

KINDS = ("noise", "few", "scaled", "zero", "one", "nan", "inf", "small", "sign")


def pair(seed: int, kind: str, size: int, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return golden and target in float64."""
    rng = np.random.default_rng(seed)
    golden = rng.standard_normal(size) * 10.0
    target = golden * (1 + level * rng.standard_normal(size))
    if kind == "few":
        target = np.where(rng.random(size) < level, golden * 1.5, golden)
    elif kind == "scaled":
        target = golden * (1 + level)
    elif kind == "zero":
        golden = golden * (seed % 2)
        target = golden * 0
    elif kind in ("nan", "inf"):
        at = rng.integers(size)
        target[at] = np.nan if kind == "nan" else np.inf
        if seed % 3 == 0:
            golden[at] = target[at]
    elif kind == "small":
        golden, target = golden * 1e-6, target * 1e-6
    elif kind == "sign":
        target[: max(1, size // 50)] *= -1
    return golden, target
