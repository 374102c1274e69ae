"""What a run needs to go on, between MindSpore's parameters and a checkpoint."""

from collections.abc import Mapping

import numpy as np
from mindspore import Tensor, nn

from telechat_moe.errors import BadInputError
from telechat_moe.train.checkpoint import Checkpoint
from telechat_moe.train.optimizer import AdamW

# Counters that are zero between steps.
TRANSIENT = ("expert_load", "dropped")

Groups = dict[str, dict[str, np.ndarray]]


def _parameters(model: nn.Cell, optimizer: AdamW) -> dict[str, dict[str, object]]:
    kept = {p.name: p for p in model.get_parameters() if p.name.split(".")[-1] not in TRANSIENT}
    moments = [*optimizer.moment1, *optimizer.moment2]
    return {"model": kept, "optimizer": {p.name: p for p in moments}}


def collect(model: nn.Cell, optimizer: AdamW) -> Groups:
    """Return copies of all parameters by group and name.

    A copy is needed: on CPU ``asnumpy`` shares the parameter's memory.
    """
    return {
        group: {name: p.asnumpy().copy() for name, p in parameters.items()}
        for group, parameters in _parameters(model, optimizer).items()
    }


def restore(model: nn.Cell, optimizer: AdamW, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's tensors into the parameters; all fit or nothing is changed.

    Raises:
        BadInputError: Tensors are missing, unknown, or of another shape or data type; lists all.
    """
    groups = _parameters(model, optimizer)
    problems = []
    for group, parameters in groups.items():
        problems += _differences(group, parameters, checkpoint.tensors.get(group, {}))
    if problems:
        raise BadInputError(
            f"{checkpoint.path} does not fit the model:\n  " + "\n  ".join(problems)
        )
    for group, parameters in groups.items():
        for name, parameter in parameters.items():
            parameter.set_data(Tensor(checkpoint.tensors[group][name]))


def _differences(
    group: str, parameters: Mapping[str, object], saved: Mapping[str, np.ndarray]
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
