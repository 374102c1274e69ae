"""Move what a run needs to resume between MindSpore's parameters and a checkpoint."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.checkpoint.weights import is_transient
from telechat_moe.errors import BadInputError
from telechat_moe.graph.swapping import PooledTensor
from telechat_moe.numerics import widen
from telechat_moe.tensor_files import BFLOAT16, DTYPES, Array, TensorOutput
from telechat_moe.train.optimizer import AdamW


def saved_weights(model: nn.Cell) -> dict[str, Parameter]:
    """Return the parameters of a model that a checkpoint holds, by name."""
    return {p.name: p for p in model.get_parameters() if not is_transient(p.name)}


def parameters(model: nn.Cell, optimizer: AdamW) -> dict[str, dict[str, Parameter]]:
    """Return all parameters that a checkpoint holds, by group and name."""
    moments = [*optimizer.moment1, *optimizer.moment2]
    return {"model": saved_weights(model), "optimizer": {p.name: p for p in moments}}


def put(
    groups: Mapping[str, Mapping[str, Parameter]],
    arrays: Mapping[str, Mapping[str, np.ndarray]],
    source: str | Path,
    in_place: bool = False,
) -> None:
    """Put saved tensors into parameters; all fit or nothing is changed.

    Args:
        groups: Parameters by group and name.
        arrays: Saved tensors by group and name; other groups are left alone.
        source: Where the arrays come from, for messages.
        in_place: Write into the memory that the parameters have. Needed once a graph with branches has run: it holds
            on to that memory (MindSpore 2.9.0).

    Raises:
        BadInputError: Tensors are missing, unknown, or of another shape or data type; lists all.
    """
    problems: list[str] = []
    for group, by_name in groups.items():
        problems += _differences(group, by_name, arrays.get(group, {}))
    if problems:
        raise BadInputError(f"{source} does not fit the model:\n  " + "\n  ".join(problems))
    for group, by_name in groups.items():
        for name, parameter in by_name.items():
            value = Tensor(arrays[group][name])
            if in_place and not isinstance(parameter, PooledTensor):
                ops.assign(parameter, value)
            else:
                parameter.set_data(value)


def _differences(
    group: str, parameters: Mapping[str, Parameter], saved: Mapping[str, np.ndarray]
) -> list[str]:
    problems = [f"{group}: {name} is missing" for name in parameters.keys() - saved.keys()]
    problems += [f"{group}: {name} is unknown" for name in saved.keys() - parameters.keys()]
    for name in parameters.keys() & saved.keys():
        now, was = parameters[name].asnumpy(), saved[name]
        if now.shape != was.shape or now.dtype != was.dtype:
            problems.append(
                f"{group}: {name} is {was.dtype}{list(was.shape)}, "
                f"the model has {now.dtype}{list(now.shape)}"
            )
    return sorted(problems)


def load_weights(
    model: nn.Cell, weights: Iterable[TensorOutput], source: str | Path, in_place: bool = False
) -> None:
    """Put weights into a model, F16 and BF16 widened; all fit or nothing is changed.

    Args:
        weights: What :class:`telechat_moe.checkpoint.weights.ReadWeights` found.
        in_place: See :func:`put`.

    Raises:
        BadInputError: Tensors are missing, unknown or of another shape.
    """
    arrays = {
        w.name: to_float32(np.concatenate([*w.chunks()]).view(DTYPES[w.dtype]).reshape(w.shape))
        for w in weights
    }
    put({"weights": saved_weights(model)}, {"weights": arrays}, source, in_place)


def to_float32(values: Array) -> np.ndarray:
    """Return values of a weight as float32."""
    if values.dtype == BFLOAT16:
        return widen(values.view(np.uint16), "bfloat16")
    return values.astype(np.float32, copy=False)
