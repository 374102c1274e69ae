"""The modules of the repository, and which of them a test reaches, read off the sources."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("telechat_moe", "ops", "tools")
# `import a`, `from a import b, c` as written, and any dotted name of ours: what is started is named in a string.
IMPORT = re.compile(r"^ *(?:from ([\w.]+) )?import (\([^)]*\)|[^\n]*)", re.M)
NAMED = re.compile(r"\btelechat_moe(?:\.\w+)*")


def sources(*folders: str) -> list[Path]:
    """Return the Python files below folders of the repository."""
    return [
        p for f in folders for p in sorted((ROOT / f).rglob("*.py")) if "__pycache__" not in p.parts
    ]


def module(path: Path) -> str:
    """Return the name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("ops", "tools", "recipes"):
        parts = ("telechat_moe", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(p): p for p in sources(*PRODUCT, "recipes", "benchmarks")}
HELPERS = {p.stem: p for p in sources("tests") if not p.name.startswith("test_")}


def reached(*paths: Path) -> dict[Path, int]:
    """Return the files that tests or modules name, by an import or in a string, and those that these name, with the steps."""
    steps, last = dict.fromkeys(paths, 0), set(paths)
    while last:
        last = {name for path in last for name in _named(path)} - steps.keys()
        steps |= dict.fromkeys(last, max(steps.values()) + 1)
    return steps


@cache
def _named(path: Path) -> tuple[Path, ...]:
    text = path.read_text(encoding="utf-8")
    names = list(NAMED.findall(text))
    for whole, parts in IMPORT.findall(text):
        after = re.findall(r"\w+", parts)
        names += [f"{whole}.{name}" for name in after] if whole else after
        names += [whole]
    # Whoever imports a.b.c runs a and a.b, too.
    names += [
        ".".join(parts[:n]) for parts in [n.split(".") for n in names] for n in range(1, len(parts))
    ]
    files = {*map(MODULES.get, names), *map(HELPERS.get, names)}
    return tuple(file for file in files if file is not None)
