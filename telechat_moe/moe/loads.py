"""Record the load of every expert during a run, summed over the steps between two records, and say how uneven it is.

Shapes: L MoE layers, E experts.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.moe.forecast import check_loads
from telechat_moe.numerics import Array

DEAD, HOT = 0.01, 2.0
"""An expert is dead below this share of the mean load of its layer, and hot above that multiple."""


def dead_experts(load_E: Array) -> list[int]:
    """Return the experts with less than :data:`DEAD` of the mean load."""
    return np.flatnonzero(load_E < DEAD * np.mean(load_E)).tolist()


def hot_experts(load_E: Array) -> list[int]:
    """Return the experts with more than :data:`HOT` times the mean load."""
    return np.flatnonzero(load_E > HOT * np.mean(load_E)).tolist()


def entropy(weight: Array) -> Array:
    """Return the entropy of non-negative weights along the last axis as a share of that of equal ones, 0 to 1.

    1: all are equal; 0: one has everything. NaN where all are 0.
    """
    total = weight.sum(-1, keepdims=True, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = weight / total
        terms = np.where(p > 0, -p * np.log(p), p)
    return terms.sum(-1) / math.log(weight.shape[-1])


class LoadRecorder:
    """Sum the loads of steps into a record for every ``interval`` steps and for the last step.

    Args:
        interval: Steps between two records; 0: none.
        last: Last step of the run.

    Attributes:
        seconds: Time that recording took since the last record; its user adds to it.
    """

    def __init__(self, interval: int, last: int) -> None:
        self.interval, self.last = interval, last
        self.clear()

    def clear(self) -> None:
        """Forget the steps since the last record, which a rollback undid."""
        self.steps, self.seconds = 0, 0.0
        self.sum_LE: Array | None = None

    def add(self, step: int, load_LE: Array) -> dict[str, Any] | None:
        """Take the loads of a step; return a record if one is due.

        A record has ``steps`` (how many it sums), ``loads`` (``[L][E]``, tokens) and ``seconds`` (what recording took since
        the record before).
        """
        if not self.interval or load_LE.ndim != 2:
            return None
        self.steps += 1
        self.sum_LE = load_LE.astype(np.float64) if self.sum_LE is None else self.sum_LE + load_LE
        if step % self.interval and step != self.last:
            return None
        loads = np.rint(self.sum_LE).astype(np.int64).tolist()
        record = {"steps": self.steps, "loads": loads, "seconds": self.seconds}
        self.clear()
        return record


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what TensorBoard shows of a record: dead experts, entropy of the loads of each layer (1: balanced)."""
    load_LE = np.asarray(record["loads"])
    values = {"experts/dead": float(sum(len(dead_experts(load_E)) for load_E in load_LE))}
    for layer, value in enumerate(entropy(load_LE)):
        values[f"expert_load_entropy/moe_layer_{layer}"] = float(value)
    return values


def summed_loads(
    record: Mapping[str, Any], shape: tuple[int, int], location: str
) -> tuple[Array, int]:
    """Return the loads of a record of :class:`LoadRecorder`, ``[L, E]`` float64, and over how many steps they are summed.

    Raises:
        BadInputError: The record is damaged, or of another model.
    """
    try:
        load_LE, steps = np.array(record["loads"], np.float64), int(record["steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(f"{location}: no record of expert loads ({error})") from None
    if load_LE.shape != shape or steps < 1:
        raise BadInputError(
            f"{location}: loads of shape {list(load_LE.shape)} over {steps} steps, the recipe has {shape[0]} MoE layers of "
            f"{shape[1]} experts; the recipe and the file are of different runs"
        )
    return load_LE, steps


def loads_per_step(
    record: Mapping[str, Any],
    tokens: Mapping[int, int],
    shape: tuple[int, int],
    top_k: int,
    file: str,
) -> Array:
    """Return the mean load of a step in a record of a run, ``[L, E]`` float64.

    Args:
        record: As :meth:`LoadRecorder.add` returned it, with its ``step``.
        tokens: Tokens of each step of the run.
        shape: MoE layers ``L`` and experts ``E`` of the model.
        top_k: Experts of a token; every layer's loads must sum to as many times its tokens.

    Raises:
        BadInputError: The record is damaged, of another model, or its loads do not sum to what was routed.
    """
    location = f"{file}, step {record['step']}"
    loads_LE, steps = summed_loads(record, shape, location)
    summed = range(record["step"] - steps + 1, record["step"] + 1)
    if missing := [step for step in summed if step not in tokens]:
        raise BadInputError(
            f"{location}: the loads are summed over {steps} steps, but step {missing[0]} is not in the file; lines were removed"
        )
    pairs = sum(tokens[step] for step in summed) * top_k
    try:
        return check_loads(loads_LE[None], pairs)[0] / steps
    except BadInputError as error:
        raise BadInputError(f"{location}: {error}") from None
