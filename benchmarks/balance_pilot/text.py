"""Sequences of three domains, each of one: code, English and numbers, from what every Python installation has."""

import pydoc_data.topics
from collections.abc import Iterator

import numpy as np

from telechat_moe.data.corpus import default_corpus
from telechat_moe.data.tokenizer import train_tokenizer

DOMAINS = ("code", "English", "numbers")
CHARACTERS = 600_000
"""Of each domain; the last tenth is for validation."""


def code() -> str:
    """Return sources of the Python standard library."""
    found, size = list[str](), 0
    for document in default_corpus().documents():
        found.append(document.text)
        size += len(document.text)
        if size >= CHARACTERS:
            break
    return "".join(found)[:CHARACTERS]


def english() -> str:
    """Return the help texts of Python's language reference."""
    return "\n".join(pydoc_data.topics.topics.values())[:CHARACTERS]


def numbers() -> str:
    """Return sums and differences, the same on every machine."""
    random, found, size = np.random.default_rng(0), list[str](), 0
    while size < CHARACTERS:
        a, b = (int(x) for x in random.integers(0, 1000, 2))
        found.append(
            f"{a} + {b} = {a + b}\n" if random.random() < 0.5 else f"{a} - {b} = {a - b}\n"
        )
        size += len(found[-1])
    return "".join(found)[:CHARACTERS]


class Text:
    """Tokens of the three domains.

    Args:
        vocabulary: Entries of the byte-level BPE that is trained on all three.
    """

    def __init__(self, vocabulary: int, length: int) -> None:
        texts = [code(), english(), numbers()]
        tokenizer = train_tokenizer((text[: CHARACTERS // 2] for text in texts), vocabulary)
        self.length = length
        tokens = [tokenizer.encode(text).astype(np.int32) for text in texts]
        self.trained = [x[: len(x) * 9 // 10] for x in tokens]
        self.held_out = [x[len(x) * 9 // 10 :] for x in tokens]

    def windows(
        self, domains: np.ndarray, random: np.random.Generator, held_out: bool
    ) -> np.ndarray:
        """Return a sequence of ``length + 1`` tokens for each number of a domain, ``[B, S + 1]`` int32."""
        source, found = self.held_out if held_out else self.trained, list[np.ndarray]()
        for domain in domains:
            start = int(random.integers(0, len(source[domain]) - self.length - 1))
            found.append(source[domain][start : start + self.length + 1])
        return np.stack(found)

    def batches(self, seed: int, sequences: int) -> Iterator[np.ndarray]:
        """Yield training batches, the domain of each sequence drawn by the seed."""
        random = np.random.default_rng(seed)
        while True:
            yield self.windows(random.integers(0, len(DOMAINS), sequences), random, False)

    def mixed(self, sequences: int, count: int) -> list[np.ndarray]:
        """Return validation batches as the training batches are mixed."""
        random = np.random.default_rng(1_000_003)
        draws = (random.integers(0, len(DOMAINS), sequences) for _ in range(count))
        return [self.windows(domains, random, True) for domains in draws]

    def pure(self, sequences: int, domain: int) -> np.ndarray:
        """Return a validation batch of one domain."""
        random = np.random.default_rng(2_000_003 + domain)
        return self.windows(np.full(sequences, domain), random, True)
