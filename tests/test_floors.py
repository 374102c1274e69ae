"""The house's limits, read off its sources: floors, cycles, sizes, rooms, names. docs/architecture.md has the rules."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from import_graph import MODULES, PRODUCT, ROOT, module, sources

FUNCTION, DOCSTRING = 60, 10  # lines

# From the ground up. Only the rooms of the first and of the last line may import one another.
FLOORS = (
    (
        "errors",
        "units",
        "files",
        "tensor_files",
        "timings",
        "numerics",
        "narrowing",
        "html",
        "processes",
        "interruption",
        "reading",
        "versions",
    ),
    ("recipes",),
    ("recipe",),
    ("ops",),
    ("model",),
    ("sharding",),
    ("graph", "data"),
    ("moe",),
    ("checkpoint",),
    ("train",),
    ("analysis",),
    ("interop",),
    ("launch",),
    ("tools",),
    ("cli",),
    ("run",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and module of every import of ours, those inside functions and for type checkers included."""
    unread: list[ast.AST] = list(tree(path).body)
    while unread:
        node = unread.pop()
        unread += ast.iter_child_nodes(node)
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names]
            found = [n if n in MODULES else node.module for n in names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            found = [a.value for a in node.args if isinstance(a, ast.Constant)]
        for name in found:
            if name in MODULES:
                yield getattr(node, "lineno", 0), name


@pytest.mark.parametrize("path", sources(*PRODUCT), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path):
    name = module(path)
    here = room(name)
    if not here or name == "telechat_moe.cli.__main__":
        return
    assert here in FLOOR, f"{path}: {here} has no floor"
    for line, other in imports(path):
        there = room(other)
        where = f"{path.relative_to(ROOT)}:{line} imports {other}"
        assert not other.startswith("benchmarks"), where
        if there and there != here:
            together = FLOOR[there] == FLOOR[here] in (0, len(FLOORS) - 1)
            assert FLOOR[there] < FLOOR[here] or together, where


def test_no_cycles():
    ends = {m: {n for _, n in imports(p) if n != m} for m, p in MODULES.items()}
    done: set[str] = set()

    def walk(name: str, above: list[str]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name in done:
            return
        for other in sorted(ends[name]):
            package = name == other.rpartition(".")[0]  # a package that re-exports its modules
            if not package and other != name.rpartition(".")[0]:
                walk(other, [*above, name])
        done.add(name)

    for name in ends:
        walk(name, [])


@pytest.mark.parametrize("folder", [*PRODUCT, "benchmarks", "docs"])
def test_functions_hold_one_idea(folder: str):
    for path in sources(folder):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= FUNCTION, f"{path}:{node.lineno}: {node.name} has {lines} lines"


def test_rooms_introduce_themselves():
    for path in sources(*PRODUCT, "benchmarks"):
        said = ast.get_docstring(tree(path))
        assert said or not path.read_text(encoding="utf-8").strip(), f"{path}: no docstring"
        if path.name == "__init__.py" and said:
            assert len(said.splitlines()) <= DOCSTRING, path
    for folder in {p.parent for p in sources(*PRODUCT, "benchmarks")}:
        assert (folder / "__init__.py").exists() or folder.name == "mindformers_plugin", folder


def test_public_names_are_documented():
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sources(*PRODUCT)
        for node in tree(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not missing


def test_every_module_is_reached():
    """A module that no other module, no verb and no part of the build names is dead, whatever tests and documents say."""
    named = {n for path in sources(*PRODUCT) for _, n in imports(path)}
    strings = {
        node.value
        for path in sources(*PRODUCT)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80
    }
    build = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "setup.py"))
    started = ("telechat_moe.cli.", "telechat_moe.interop.mindformers_plugin")
    dead = [
        name
        for name, path in MODULES.items()
        if not name.startswith(("benchmarks", *started))
        and path.name not in ("__init__.py", "__main__.py")
        and name not in named
        and not any(name in s or path.name in s for s in strings)  # python -m MODULE, FILE.py
        and name not in build
        and str(path.relative_to(ROOT)) not in build
    ]
    assert not dead
