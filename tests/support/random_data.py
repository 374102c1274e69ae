"""Texts and documents of tokens that are the same on every machine."""

import hashlib
from pathlib import Path

import numpy as np

WORDS = ["def", "return", "class", "self", "in", "naïve", "汉字", "🙂", "x1", "=", "\t\n\n", "\r\n"]


def make_text(name: str, words: int) -> str:
    """Return reproducible text with letters of several scripts and odd white space."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    generator = np.random.default_rng(seed)
    numbers = generator.integers(0, 500, words)
    return " ".join(f"{WORDS[n % len(WORDS)]}{n if n % 3 == 0 else ''}" for n in numbers.tolist())


def make_corpus(folder: Path, files: int, words: int) -> Path:
    """Write ``files`` text files of about ``words`` words each."""
    for number in range(files):
        path = folder / f"part{number % 3}" / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_text(path.name, words + 7 * number).encode())
    return folder


def make_documents(
    seed: int, count: int, longest: int, *, eod: int = 0, vocab: int = 100
) -> list[np.ndarray]:
    """Return random documents, each with ``eod`` at its end and nowhere else."""
    generator = np.random.default_rng(seed)
    return [
        np.append(generator.integers(2, vocab, generator.integers(0, longest)), eod)
        for _ in range(count)
    ]
