"""Compute the number of a layer in the whole model from its pipeline stage, its chunk and its number in the chunk.

Megatron numbers the layers of each stage and chunk from 0; MindSpore uses the numbers of the whole model. Names of the
first kind are rewritten here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telechat_moe.tools.align.dump.ranges import LayoutError

_LAYER = re.compile(r"(?P<head>(?:^|\.)(?:layers|layer|h|blocks))\.(?P<number>\d+)(?=\.|$)")


@dataclass(frozen=True)
class LayerNumbers:
    """Which layers each stage and chunk holds, in order.

    Raises:
        LayoutError: A layer is on two stages or on none.
    """

    # Global numbers of the layers by (stage, chunk)
    layers: Mapping[tuple[int, int], Sequence[int]]

    def __post_init__(self) -> None:
        owner: dict[int, tuple[int, int]] = {}
        for stage, numbers in self.layers.items():
            for n in numbers:
                if n in owner:
                    raise LayoutError(f"layer {n} is on {_name(owner[n])} and on {_name(stage)}")
                owner[n] = stage
        for n in range(len(owner)):
            if n not in owner:
                raise LayoutError(f"layer {n} of {len(owner)} is on no stage")

    def rename(self, name: str, stage: int, chunk: int = 0) -> str:
        """Return a name with the number of its layer in the whole model; a name without a layer stays as it is.

        ``layers.1.attention`` of chunk 1 on stage 0 is ``layers.5.attention`` with 8 layers on 2 x 2 chunks.

        Raises:
            LayoutError: The stage and chunk hold fewer layers.
        """
        found = _LAYER.search(name)
        if found is None:
            return name
        local, numbers = int(found["number"]), self.layers.get((stage, chunk), ())
        if local >= len(numbers):
            raise LayoutError(
                f"layer {local} of {_name((stage, chunk))}, which hold {len(numbers)} layers"
            )
        return f"{name[: found.start()]}{found['head']}.{numbers[local]}{name[found.end() :]}"


def _name(stage: tuple[int, int]) -> str:
    return f"stage {stage[0]}, chunk {stage[1]}"
