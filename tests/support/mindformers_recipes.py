"""The recipes that come with the installed MindFormers."""

import importlib.util
from pathlib import Path


def root() -> Path:
    """Return the folder of MindFormers' wheel that holds its code and its recipes."""
    spec = importlib.util.find_spec("mindformers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def graph_recipes() -> dict[str, Path]:
    """Return the recipes of graph mode by name: 24 in 1.9.0 and the same in 2.1.0, beside five of its dynamic mode."""
    if importlib.util.find_spec("mindformers") is None:
        return {}
    configs = root() / "configs"
    paths = [p for p in configs.glob("*/*.yaml") if p.parent.name != "convert_config"]
    return {
        p.relative_to(configs).as_posix(): p
        for p in sorted(paths)
        if "\ntraining:" not in p.read_text("utf-8")
    }
