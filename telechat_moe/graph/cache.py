"""Keep the compiled graphs of a training step in the user's cache folder for later starts of the same recipe.

MindSpore's compile cache holds what its front end makes of a graph, but to know whether it still fits it asks only for
the script. Here the folder's name is a hash of everything that the graph is made from: recipe, sources, library, versions.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

import telechat_moe
from telechat_moe import ops
from telechat_moe.errors import BadInputError
from telechat_moe.files import check_private, user_cache
from telechat_moe.ops import native

KEPT = 8
"""Graphs, the last ones used."""

_taken = False
"""MindSpore asks for the folder once in a process."""


def key(recipe: Mapping[str, Any], graphs: int) -> str:
    """Return a hash of everything that the graphs of a step are made from."""
    values = {name: value for name, value in recipe.items() if name != "output_dir"}
    library = native.path().stat()
    made_from = [graphs, values, sys.version, sys.argv[0], ms.__version__, np.__version__]
    made_from += [str(native.path()), library.st_size, library.st_mtime_ns]
    found = hashlib.sha256(json.dumps(made_from).encode())
    for package in (telechat_moe, ops):
        for source in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            found.update(f"{source}\n".encode() + source.read_bytes())
    return found.hexdigest()[:32]


@contextmanager
def kept(recipe: Mapping[str, Any], graphs: int) -> Generator[None, None, None]:
    """Take the graphs that are compiled inside, always the same ones in this order, from the user's cache folder, or put them there.

    Only the first use in a process does so; later ones compile, and so does one whose folder others or nobody can write.
    """
    global _taken
    if _taken or not Path(sys.argv[0]).is_file():  # MindSpore reads the script
        yield
        return
    _taken = True
    root = user_cache() / "graphs"
    ready = root / key(recipe, graphs)
    known = ready.exists()
    fresh = ready.with_suffix(f".{os.getpid()}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        if known:
            check_private(ready).touch()
    except (OSError, BadInputError):
        yield
        return
    ms.set_context(enable_compile_cache=True, compile_cache_path=str(ready if known else fresh))
    try:
        yield
        if len(list(fresh.rglob("*.mindir"))) == graphs:
            with suppress(OSError):  # another process was first
                fresh.rename(ready)
    finally:
        ms.set_context(enable_compile_cache=False)
        shutil.rmtree(fresh, ignore_errors=True)
    for old in sorted(root.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
