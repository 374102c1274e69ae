"""Dump a step (forward, backward, AdamW) of MindFormers' own TeleChat3-MoE class, or of ours, from the same weights.

``python upstream_dump.py FOLDER ours|upstream OUT [SETTINGS]``; SETTINGS are a JSON object of upstream's model keys.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn
from upstream_backends import replaced
from upstream_values import CASES, batch_of, our_config, random_weights, upstream_model

from telechat_moe.interop import upstream_names
from telechat_moe.model import CausalLM
from telechat_moe.ops import select
from telechat_moe.tools.align.capture.mindspore import capture


class _Loss(nn.Cell):
    def __init__(self, model: Any) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, ids: Tensor, labels: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        losses = self.model(input_ids=ids, labels=labels, loss_mask=mask, position_ids=position)
        return (losses[0] + losses[1] + losses[2]).sum()


class _Step(nn.Cell):
    def __init__(self, model: Any) -> None:
        super().__init__(auto_prefix=False)
        self.model = model  # the names of its cells are in the dump
        weights = ms.ParameterTuple(model.trainable_params())
        self.optimizer = nn.AdamWeightDecay(weights, 1e-3, 0.9, 0.95, 1e-8, 0.1)
        self.differentiated = ms.value_and_grad(_Loss(model), None, weights)

    def construct(self, *batch: Tensor) -> Tensor:
        loss, gradients = self.differentiated(*batch)
        return ms.ops.depend(loss, self.optimizer(gradients))


def main() -> None:
    """Dump one of the two."""
    folder, which, out = Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3]
    os.chdir(folder)
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    case = CASES["two sequences"] | {"upstream": json.loads((sys.argv[4:] or ["{}"])[0])}
    config = our_config(case)
    with select.using("plain"):
        model: Any = CausalLM(config)
    weights = random_weights(model, seed=1)
    with replaced():
        if which == "upstream":
            model = upstream_model(case, config, folder)
        known = upstream_names.to_upstream(weights, config) if which == "upstream" else weights
        for parameter in model.get_parameters():
            if parameter.name in known:
                parameter.set_data(Tensor(known[parameter.name]))
        model.set_train()
        capture(_Step(model), *map(Tensor, batch_of(case)), out=out)


if __name__ == "__main__":
    main()
