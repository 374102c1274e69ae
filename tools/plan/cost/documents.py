"""Count the token pairs that attention computes within documents, from the documents' lengths."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.errors import BadInputError

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """Sequences filled with documents; a document is split where its sequence ends."""

    seq: int
    """Tokens of a sequence."""
    pairs: NDArray[np.float64]
    """Query-key pairs within documents and at or before the query, of each sequence."""

    @property
    def share(self) -> float:
        """Mean share of a sequence's `seq**2` pairs."""
        return float(self.pairs.mean()) / self.seq**2

    @property
    def of_causal(self) -> float:
        """Mean share of a causal mask's pairs."""
        return float(self.pairs.mean()) / (self.seq * (self.seq + 1) / 2)

    @property
    def longest(self) -> float:
        """Pairs of the longest of 100 sequences over the mean: the one that data parallelism waits for."""
        return float(np.quantile(self.pairs, 0.99)) / float(self.pairs.mean())

    def told(self, path: str) -> str:
        """Return one line that says which share of attention the documents of `path` leave."""
        return (
            f"documents of {path}: attention computes {self.of_causal:.1%} of a causal mask's pairs; one sequence of a "
            f"hundred has {self.longest:.2f} times the mean or more, which ranks that are not balanced wait for"
        )


def read_lengths(path: str) -> Lengths:
    """Return the tokens of each document, in order: of Megatron's `.idx` beside its `.bin`, or of a text with a number a line.

    Raises:
        BadInputError: No such file, a line that is no positive number, no document, or a broken index.
    """
    file = Path(path)
    if file.suffix == ".idx":
        return np.asarray(IndexedDataset(file.with_suffix("")).sequence_lengths, dtype=np.int64)
    try:
        lines = file.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read as lengths of documents: {error}") from None
    lengths: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.strip().isdecimal() or not 0 < int(line) < 2**31:
            raise BadInputError(
                f"{path}, line {number}: {line.strip()[:40]!r}, expected a document's tokens"
            )
        lengths.append(int(line))
    if not lengths:
        raise BadInputError(f"{path}: no lengths, expected a document's tokens on each line")
    return np.array(lengths, dtype=np.int64)


def pack(lengths: Lengths, seq: int) -> Packed:
    """Return the sequences that consecutive documents fill; tokens that do not fill the last one are dropped.

    Raises:
        BadInputError: Fewer tokens than one sequence.
    """
    ends = np.cumsum(lengths)
    count = int(ends[-1]) // seq
    if not count:
        raise BadInputError(
            f"documents of {int(ends[-1]):,} tokens, expected at least one sequence of {seq:,}"
        )
    edges = np.union1d(ends, np.arange(count + 1) * seq)
    edges = edges[edges <= count * seq]
    pieces = np.diff(edges).astype(np.float64)
    pairs = np.bincount(edges[:-1] // seq, pieces * (pieces + 1) / 2, minlength=count).astype(float)
    return Packed(seq, pairs)
