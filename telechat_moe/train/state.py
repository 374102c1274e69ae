"""Move what a run needs to resume between MindSpore's parameters and a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.errors import BadInputError
from telechat_moe.train.optimizer import AdamW

# Zero between steps.
TRANSIENT = ("expert_load", "dropped", "main_grad")


def is_transient(name: str) -> bool:
    """Return whether a parameter is zero between steps and so belongs in no checkpoint."""
    return name.split(".")[-1] in TRANSIENT


def kept(model: nn.Cell) -> dict[str, Parameter]:
    """Return the parameters of a model that a checkpoint holds, by name."""
    return {p.name: p for p in model.get_parameters() if not is_transient(p.name)}


def parameters(model: nn.Cell, optimizer: AdamW) -> dict[str, dict[str, Parameter]]:
    """Return all parameters that a checkpoint holds, by group and name."""
    moments = [*optimizer.moment1, *optimizer.moment2]
    return {"model": kept(model), "optimizer": {p.name: p for p in moments}}


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
    for group, found in groups.items():
        problems += _differences(group, found, arrays.get(group, {}))
    if problems:
        raise BadInputError(f"{source} does not fit the model:\n  " + "\n  ".join(problems))
    for group, found in groups.items():
        for name, parameter in found.items():
            value = Tensor(arrays[group][name])
            if in_place:
                ops.assign(parameter, value)
            else:
                parameter.set_data(value)


def _differences(
    group: str, parameters: Mapping[str, Parameter], saved: Mapping[str, np.ndarray]
) -> list[str]:
    found = [f"{group}: {name} is missing" for name in parameters.keys() - saved.keys()]
    found += [f"{group}: {name} is unknown" for name in saved.keys() - parameters.keys()]
    for name in parameters.keys() & saved.keys():
        now, was = parameters[name].asnumpy(), saved[name]
        if now.shape != was.shape or now.dtype != was.dtype:
            found.append(
                f"{group}: {name} is {was.dtype}{list(was.shape)}, "
                f"the model has {now.dtype}{list(now.shape)}"
            )
    return sorted(found)


def load_weights(model: nn.Cell, source: str | Path) -> None:
    """Put the weights of a file or folder into a model, F16 and BF16 widened; all fit or nothing is changed.

    The source has names of this package (``telechat-moe convert`` brings Hugging Face's into them): a safetensors file,
    a folder with an index, or a training checkpoint.

    Raises:
        BadInputError: Nothing readable is there, the files differ from their checksums, or tensors are missing,
            unknown or of another shape.
    """
    from telechat_moe.checkpoint.weights import read_weights
    from telechat_moe.files import require_checksums

    require_checksums(Path(source))
    arrays = {
        name: _widen(entry.dtype, entry.shape, entry.read())
        for name, entry in read_weights(Path(source)).items()
        if not is_transient(name)
    }
    put({"weights": kept(model)}, {"weights": arrays}, source)


def _widen(dtype: str, shape: tuple[int, ...], data: bytes | memoryview | np.ndarray) -> np.ndarray:
    """Return the values as float32, another data type as it is."""
    if dtype == "BF16":
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    kind = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(dtype)
    if kind is None:
        raise BadInputError(f"found {dtype} weights; F32, F16 or BF16 can be loaded")
    values = np.frombuffer(data, kind).reshape(shape)
    return values.astype(np.float32) if kind is np.float16 else values
