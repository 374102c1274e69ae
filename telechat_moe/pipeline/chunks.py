"""Which units of the model each chunk of a pipeline holds."""

from dataclasses import dataclass
from itertools import groupby

from telechat_moe.errors import UsageError
from telechat_moe.recipe import ModelConfig


@dataclass(frozen=True)
class Chunk:
    """A run of the model's units: embedding, decoder layers, MTP layers, head with all losses.

    The final norm goes with the last decoder layer. A chunk without a unit passes on what it gets.

    Attributes:
        embedding: It begins with the embedding.
        layers: Decoder layers.
        mtp: MTP layers; each reads the embedding of its own tokens.
        head: It ends with output head and losses.
    """

    embedding: bool = False
    layers: tuple[int, ...] = ()
    mtp: tuple[int, ...] = ()
    head: bool = False

    @property
    def empty(self) -> bool:
        """Whether it computes nothing."""
        return not (self.embedding or self.layers or self.mtp or self.head)

    def __str__(self) -> str:
        """Write it in Megatron's notation: E embedding, t layer, m MTP layer, L head and loss."""
        return "E" * self.embedding + "t" * len(self.layers) + "m" * len(self.mtp) + "L" * self.head

    def describe(self) -> str:
        """Write it for people."""
        runs = [(c, len(list(run))) for c, run in groupby(str(self))]
        return " ".join(f"{c}*{n}" if n > 1 else c for c, n in runs) or "(nothing)"


def whole(config: ModelConfig) -> str:
    """Return the units of a model in order, in Megatron's notation."""
    return "E" + "t" * config.num_hidden_layers + "m" * config.num_nextn_predict_layers + "L"


def parse(layout: str, config: ModelConfig) -> tuple[Chunk, ...]:
    """Read chunks in Megatron's notation, such as ``Et|tt|t|mL``, with ``|`` between chunks.

    Raises:
        UsageError: The units are not those of the model in their order.
    """
    expected = whole(config)
    found = layout.replace("|", "")
    if found != expected:
        raise UsageError(
            f"--layout {layout!r} has the units {found!r}, the model has {expected!r} "
            "(E embedding, t decoder layer, m MTP layer, L head and losses)"
        )
    chunks: list[Chunk] = []
    layer = mtp = 0
    for text in layout.split("|"):
        layers, mtps = text.count("t"), text.count("m")
        chunks.append(
            Chunk(
                "E" in text,
                tuple(range(layer, layer + layers)),
                tuple(range(mtp, mtp + mtps)),
                "L" in text,
            )
        )
        layer, mtp = layer + layers, mtp + mtps
    return tuple(chunks)


def even(count: int, config: ModelConfig) -> str:
    """Return a layout of ``count`` chunks with about as many units each; the embedding counts nothing.

    Where there are fewer units than chunks, the last chunks before the head's are empty.
    """
    units = whole(config)[1:]
    if count > len(units):
        return "|".join(["E" + units[0], *units[1:-1], *[""] * (count - len(units)), units[-1]])
    sizes = [len(units) // count + (i < len(units) % count) for i in range(count)]
    parts: list[str] = []
    for size in sizes:
        parts.append(units[:size])
        units = units[size:]
    return "E" + "|".join(parts)
