"""Names carry the noun of the thing: few are filler words, and no two public types share one."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_graph import PRODUCT, ROOT, sources

FILLERS = {
    # participles: a gradient that was found is a gradient
    *("asked", "done", "found", "given", "held", "kept", "known", "made", "said", "seen", "taken", "wanted"),
    # whose, and which
    *("each", "mine", "one", "ours", "own", "theirs"),
    # where, when and how
    *("again", "at", "back", "here", "near", "same", "there", "what", "where", "why"),
    # how much
    *("least", "more", "most", "rest", "whole"),
}  # fmt: skip
"""Words that would fit any value, and so say nothing of this one."""

BINDINGS = {"product": 100, "tests and benchmarks": 2373}
"""At most so many names of variables, parameters, fields, attributes and functions are fillers. Lower these when you rename some."""

LONELY = {"Case", "Node", "Part", "Plan"}
"""Nouns that say nothing alone."""


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of every variable, parameter, field, attribute and function that a file binds."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


@pytest.mark.parametrize(
    ("part", "folders"),
    [("product", PRODUCT), ("tests and benchmarks", ("tests", "benchmarks"))],
    ids=["product", "tests"],
)
def test_few_names_are_fillers(part: str, folders: tuple[str, ...]):
    bindings = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources(*folders)
        for line, name in names(path)
        if name.strip("_") in FILLERS
    ]
    by_file = Counter(binding.split(":")[0] for binding in bindings).most_common(9)
    assert len(bindings) <= BINDINGS[part], f"name these after what they are: {by_file}"
    assert len(bindings) > BINDINGS[part] - 25, f"lower the budget of {part} to {len(bindings)}"


def public_types(path: Path) -> Iterator[str]:
    """Yield the names of the public classes and aliases of types that a module defines."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if not name[0].isupper() or name.isupper():  # a value
                continue
        else:
            continue
        if not name.startswith("_"):
            yield name


def test_a_public_type_has_a_name_of_its_own():
    count = Counter(name for path in sources(*PRODUCT) for name in public_types(path))
    assert [name for name, number in count.items() if number > 1] == []
    assert not LONELY & count.keys()
