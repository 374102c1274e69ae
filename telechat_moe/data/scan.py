"""Hash and measure the documents of a corpus.

The hashes and sizes determine the identity of the corpus, the split into training and validation, the documents that
the tokenizer learns from and the shards; none of these needs the text a second time.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from telechat_moe.data.corpus import Corpus
from telechat_moe.errors import BadInputError
from telechat_moe.files import Progress

SHARD_BYTES = 1 << 21
LEARN_BYTES = 32 << 20
"""The tokenizer learns from at most this much text, the documents of smallest hash."""
LEARN_BYTES_PER_DOCUMENT = 1 << 20
_LONGEST_WORD = 1 << 7
"""Characters of a word that the tokenizer learns from in one piece; the time that it takes grows with their square."""
_LONG_WORD = re.compile(
    "|".join(
        f"{kind}{{{_LONGEST_WORD},}}" for kind in (r"[^\W\d_]", r"\d", r"\s", r"(?:[^\w\s]|_)")
    )
)


@dataclass(frozen=True)
class CorpusScan:
    """The result of the first reading of a corpus.

    Attributes:
        identity: Hash of all documents in order.
        hashes: uint64, a hash of the text of each document.
        sizes: int64, bytes of the text of each document.
        named_valid: bool, which documents are of files of validation data; None: no such files were named.
    """

    identity: str
    hashes: np.ndarray
    sizes: np.ndarray
    named_valid: np.ndarray | None = None

    def valid(self, fraction: float, seed: int) -> np.ndarray:
        """Return which documents are for validation.

        Those of files of validation data, if such were named; else documents of equal text go to the same side.
        """
        if self.named_valid is not None:
            return self.named_valid
        count = len(self.hashes)
        if fraction == 0:
            return np.zeros(count, dtype=bool)
        keys = _mix(self.hashes, seed)
        quota = min(max(1, round(count * fraction)), count)
        chosen: np.ndarray = keys <= np.partition(keys, quota - 1)[quota - 1]
        if chosen.all():
            distinct = len(np.unique(self.hashes))
            raise BadInputError(
                f"the corpus cannot be split into train and validation: {count:,} document{'s' * (count != 1)}, "
                f"{distinct:,} of them distinct, and equal ones stay together; give more text or --valid-fraction 0"
            )
        return chosen

    def learned_from(self, valid: np.ndarray) -> np.ndarray:
        """Return which training documents the tokenizer learns from."""
        train = np.flatnonzero(~valid)
        order = train[np.argsort(self.hashes[train], kind="stable")]
        sizes = np.minimum(self.sizes[order], LEARN_BYTES_PER_DOCUMENT)
        result = np.zeros(len(valid), dtype=bool)
        result[order[np.cumsum(sizes) - sizes < LEARN_BYTES]] = True
        return result

    def shards(self) -> np.ndarray:
        """Return the shard of each document, counted from 0 without gaps."""
        starts = np.cumsum(self.sizes) - self.sizes
        return np.unique(starts // SHARD_BYTES, return_inverse=True)[1]


def scan_corpus(
    corpus: Corpus, progress: Progress | None, look: Callable[[str, str], None] | None = None
) -> CorpusScan:
    """Read the corpus once and hash every document; ``look`` gets name and text of each."""
    corpus_digest = hashlib.sha256()
    hashes, sizes, valid = bytearray(), bytearray(), bytearray()
    for number, document in enumerate(corpus.documents(), 1):
        data = document.text.encode()
        digest = hashlib.sha256(data).digest()
        corpus_digest.update(digest)
        hashes += digest[:8]
        sizes += len(data).to_bytes(8, "little")
        valid.append(document.valid)
        if look is not None:
            look(document.name, document.text)
        if progress is not None:
            progress("reading documents", number, None)
    if not sizes:
        raise BadInputError(f"{corpus.label}: the corpus has no text; check --corpus")
    named = None if corpus.valid_files is None else np.frombuffer(valid, dtype=bool)
    if named is not None and (named.all() or not named.any()):
        side = "validation" if not named.any() else "training"
        raise BadInputError(
            f"{corpus.label}: no document of them is for {side}; check --corpus and --valid"
        )
    return CorpusScan(
        corpus_digest.hexdigest(),
        np.frombuffer(hashes, dtype="<u8"),
        np.frombuffer(sizes, dtype="<i8"),
        named,
    )


def learn_from(text: str) -> Iterator[str]:
    """Yield the parts of a document that the tokenizer learns from: its beginning, within words that have no end."""
    text, start = text[:LEARN_BYTES_PER_DOCUMENT], 0
    for word in _LONG_WORD.finditer(text):
        for end in range(word.start() + _LONGEST_WORD, word.end() + 1, _LONGEST_WORD):
            yield text[start:end]
            start = end
    yield text[start:]


def hash64(data: bytes) -> int:
    """Return the hash that identifies a document."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def _mix(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Mix a seed into 64-bit hashes (one-to-one). Source: the splitmix64 generator."""
    offset = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little")
    x = hashes + np.uint64(offset)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
