"""Assign layers to pipeline stages and, with interleaving, to chunks of a stage."""

from typing import Any, NamedTuple

from telechat_moe.errors import BadInputError


class StageChunk(NamedTuple):
    """A pipeline stage and one of its chunks.

    Attributes:
        chunk: Model chunk of the stage, 0 without interleaving.
    """

    stage: int
    chunk: int


class Stages(NamedTuple):
    """Where the cells of a model are in a pipeline; the embedding is on stage 0, chunk 0.

    Attributes:
        layers: Stage and chunk of each decoder layer.
        head: That of the output head, the losses and MTP.
        v_shape: The second chunks run from the last stage back to the first (``zero_bubble_v``).
    """

    layers: tuple[StageChunk, ...]
    head: StageChunk
    v_shape: bool = False

    @property
    def chunks(self) -> int:
        """Chunks of a stage: the head is on the last one."""
        return self.head.chunk + 1


def assign_layers(
    layers: int,
    stages: int,
    chunks: int = 1,
    offset: int | list[int] | list[list[int]] = 0,
    v_shape: bool = False,
) -> Stages:
    """Return where the cells of a model are.

    Each chunk of each stage has ``layers // (stages * chunks)`` layers and as many more as ``offset`` says
    (MindFormers' meaning). A chunk may be left without layers where the offset is negative: then the stage
    passes activations on, which is what a no-op layer does.

    Args:
        layers: Decoder layers, MTP not counted.
        chunks: Chunks a stage (virtual pipeline).
        offset: 0, or additional layers by stage, or by chunk and stage.
        v_shape: See :class:`Stages`; two chunks.

    Raises:
        BadInputError: The offsets do not add up to the layers that are left over, or a count is negative.
    """
    rows: list[Any] = offset if isinstance(offset, list) else [0] * stages
    table: list[list[int]] = rows if rows and isinstance(rows[0], list) else [rows] * chunks
    if chunks > 1 and rows and not isinstance(rows[0], list) and any(rows):
        raise BadInputError(
            f"offset {offset}: with {chunks} chunks a stage it needs one list of {stages} numbers a chunk"
        )
    base = layers // (stages * chunks)
    counts = [[base + int(extra) for extra in row] for row in table]
    total = sum(map(sum, counts))
    if len(counts) != chunks or any(len(row) != stages for row in counts) or total != layers:
        raise BadInputError(
            f"offset {offset} places {total} of {layers} layers on {stages} stages x {chunks} chunks; the "
            f"additions must sum to {layers - base * stages * chunks}"
        )
    if min(map(min, counts)) < 0:
        raise BadInputError(f"offset {offset} gives a chunk {min(map(min, counts))} layers")
    order = [StageChunk(stage, chunk) for chunk in range(chunks) for stage in range(stages)]
    if v_shape:
        order[stages:] = order[: stages - 1 : -1]
    placed = [place for place in order for _ in range(counts[place.chunk][place.stage])]
    return Stages(tuple(placed), order[-1], v_shape)
