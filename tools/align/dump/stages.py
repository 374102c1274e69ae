"""Names across pipeline stages: the local number of a layer on a stage and chunk becomes the layer's own.

A stage names its layers from 0 (Megatron, one module list a chunk) or by the number of the whole model (MindSpore);
this is the algebra of the first kind. Tensors of a layer are taken from the stage that owns it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telechat_moe.tools.align.dump.ranges import LayoutError

LAYER = re.compile(r"(?P<head>(?:^|\.)(?:layers|layer|h|blocks))\.(?P<number>\d+)(?=\.|$)")


@dataclass(frozen=True)
class Stages:
    """Which layers each stage and chunk holds, in order.

    Args:
        layers: Global numbers of the layers by (stage, chunk).

    Raises:
        LayoutError: A layer stands twice or nowhere.
    """

    layers: Mapping[tuple[int, int], Sequence[int]]

    def __post_init__(self) -> None:
        owner: dict[int, tuple[int, int]] = {}
        for place, numbers in self.layers.items():
            for n in numbers:
                if n in owner:
                    raise LayoutError(
                        f"layer {n} stands on {_name(owner[n])} and on {_name(place)}"
                    )
                owner[n] = place
        for n in range(len(owner)):
            if n not in owner:
                raise LayoutError(f"layer {n} of {len(owner)} stands on no stage")

    @staticmethod
    def even(
        layers: int,
        stages: int,
        chunks: int = 1,
        offset: Mapping[tuple[int, int], int] | None = None,
    ) -> "Stages":
        """Return stages with equally many layers, chunk 0 of all stages first; ``offset`` adds some.

        Raises:
            LayoutError: The layers do not come out even.
        """
        base, found, next_layer = layers // (stages * chunks), {}, 0
        for chunk in range(chunks):
            for stage in range(stages):
                count = base + (offset or {}).get((stage, chunk), 0)
                found[stage, chunk] = tuple(range(next_layer, next_layer + count))
                next_layer += count
        if next_layer != layers:
            raise LayoutError(
                f"{stages} stages of {chunks} chunks hold {next_layer} of {layers} layers; say what the others hold"
            )
        return Stages(found)

    def layer(self, stage: int, chunk: int, local: int) -> int:
        """Return the number of a layer in the whole model.

        Raises:
            LayoutError: The stage and chunk do not hold so many.
        """
        numbers = self.layers.get((stage, chunk))
        if numbers is None or not 0 <= local < len(numbers):
            held = "do not exist" if numbers is None else f"hold {len(numbers)} layers"
            raise LayoutError(f"layer {local} of {_name((stage, chunk))}, which {held}")
        return numbers[local]

    def owner(self, layer: int) -> tuple[int, int]:
        """Return the stage and chunk of a layer."""
        for place, numbers in self.layers.items():
            if layer in numbers:
                return place
        raise LayoutError(f"layer {layer} stands on no stage")

    def rename(self, name: str, stage: int, chunk: int = 0) -> str:
        """Return a name with the global number of its layer; without a layer: unchanged.

        ``layers.1.attention`` of chunk 1 on stage 0 is ``layers.5.attention`` with 8 layers on 2 x 2 chunks.
        """
        found = LAYER.search(name)
        if found is None:
            return name
        number = self.layer(stage, chunk, int(found["number"]))
        return f"{name[: found.start()]}{found['head']}.{number}{name[found.end() :]}"


def _name(place: tuple[int, int]) -> str:
    return f"stage {place[0]}, chunk {place[1]}"
