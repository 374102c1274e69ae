"""A small corpus that is the same on every machine, and datasets of random documents."""

from pathlib import Path

import numpy as np
import pytest
from random_data import make_corpus, make_documents

from telechat_moe.data import write_indexed


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), files=30, words=300)


@pytest.fixture(scope="session")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three datasets, of short, middling and long documents."""
    folder = tmp_path_factory.mktemp("indexed")
    for name, (seed, count, longest) in {
        "short": (1, 37, 20),
        "middle": (2, 50, 60),
        "long": (3, 80, 100),
    }.items():
        write_indexed(folder / name, make_documents(seed, count, longest), np.uint16)
    return {name: str(folder / name) for name in ("short", "middle", "long")}
