"""The small mistakes that are made in a source, each as another text for one place of it.

Left alone: docstrings, annotations, and what an error says.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
BOOLEAN = {ast.And: ast.Or, ast.Or: ast.And}


@dataclass(frozen=True)
class Mutant:
    """A mistake at one place.

    Attributes:
        file: Path below the root of the repository.
        line: Where it is, from 1.
        function: First line of the function that it is in, decorators included, as code objects count; 0: in none.
        before: The lines that it changes.
        after: What they are with the mistake.
    """

    file: str
    line: int
    function: int
    kind: str
    before: str
    after: str

    def apply(self, source: str) -> str:
        """Return the source with the mistake."""
        lines = source.splitlines(keepends=True)
        count = len(self.before.splitlines())
        return "".join([*lines[: self.line - 1], self.after, *lines[self.line - 1 + count :]])

    def diff(self) -> str:
        """Return the change as lines of a diff."""
        parts = unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=0)
        return "\n".join([*parts][3:])


def mutants(file: str, source: str) -> list[Mutant]:
    """Return every mutant of a source; some may be no Python (:func:`parses`)."""
    lines = source.splitlines(keepends=True)
    result: list[Mutant] = []
    for node, function in _nodes(ast.parse(source)):
        for kind, place, changed in _mistakes(node):
            first, last = place.lineno, place.end_lineno
            before = "".join(lines[first - 1 : last])
            head = lines[first - 1].encode()[: place.col_offset].decode()
            tail = lines[last - 1].encode()[place.end_col_offset :].decode()
            text = ast.unparse(changed)
            if isinstance(changed, ast.expr) and not isinstance(changed, ast.Slice | ast.Constant):
                text = f"({text})"
            if (after := head + text + tail) != before:
                result.append(Mutant(file, first, function, kind, before, after))
    return result


def parses(source: str) -> bool:
    """Return whether a source is Python."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _nodes(tree: ast.Module) -> Iterator[tuple[Any, int]]:
    """Yield nodes that may be changed, with the first line of their function."""
    unread: list[tuple[ast.AST, int]] = [(tree, 0)]
    while unread:
        node, function = unread.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if hasattr(node, "lineno"):
            yield node, function
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                children = value if isinstance(value, list) else [value]
                unread += [(child, function) for child in children if isinstance(child, ast.AST)]


Mistake = tuple[str, Any, ast.AST]
"""Its kind, the node that is replaced, and by which."""


def _mistakes(node: Any) -> Iterator[Mistake]:
    yield from _of_operators(node)
    yield from _of_values(node)
    yield from _of_statements(node)


def _of_operators(node: Any) -> Iterator[Mistake]:
    def change(name: str, value: Any) -> ast.AST:
        other = copy.copy(node)
        setattr(other, name, value)
        return other

    match node:
        case ast.Compare(ops=[op]):
            yield "comparison", node, change("ops", [COMPARISONS[type(op)]()])
        case ast.BinOp(op=op, left=left) if type(op) in ARITHMETIC and not _is_text(left):
            yield "arithmetic", node, change("op", ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            yield "boolean", node, change("op", BOOLEAN[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "boolean", node, operand


def _of_values(node: Any) -> Iterator[Mistake]:
    match node:
        case ast.Constant(value=bool() as value):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", node, ast.Constant(value + 1)
        case ast.Slice(lower=lower, upper=upper):
            for end in (lower, upper):
                if isinstance(end, ast.Name | ast.Call | ast.Attribute):
                    yield "off by one", end, _later(end)
        case ast.Call(func=ast.Name(id="range"), args=[*_, end]):
            yield "off by one", end, _later(end)
        case ast.Call(args=[first, second, *_]) if ast.dump(first) != ast.dump(second):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                swapped = copy.copy(node)
                swapped.args = [second, first, *node.args[2:]]
                yield "swapped arguments", node, swapped


def _of_statements(node: Any) -> Iterator[Mistake]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if isinstance(test, ast.Name | ast.Call | ast.Attribute):
                yield "condition", test, ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield "return", value, ast.Constant(None)
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield "deleted statement", node, ast.Pass()
        case ast.Break():
            yield "loop", node, ast.Continue()
        case ast.Continue():
            yield "loop", node, ast.Break()


def _later(end: ast.expr) -> ast.expr:
    return ast.BinOp(end, ast.Add(), ast.Constant(1))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
