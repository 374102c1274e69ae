"""Gradients of formulas that were computed with :class:`Approx`, in the same arithmetic."""

from collections.abc import Sequence

from telechat_moe.tools.align.operators.approx import Approx


def gradients(
    outputs: Sequence[tuple[Approx, Approx]], inputs: Sequence[Approx]
) -> list[Approx | None]:
    """Return the gradient of each input, from results with their incoming gradients; None: no result depends on it."""
    by_node: dict[int, Approx] = {}

    def add(node: Approx, part: Approx) -> None:
        by_node[id(node)] = by_node[id(node)] + part if id(node) in by_node else part

    for output, gradient in outputs:
        add(output, gradient)
    for node in _sorted([output for output, _ in outputs]):
        for parent, backward in node.parents if id(node) in by_node else ():
            add(parent, backward(by_node[id(node)]))
    return [by_node[id(x)].stop() if id(x) in by_node else None for x in inputs]


def _sorted(roots: Sequence[Approx]) -> list[Approx]:
    """Return everything that the roots depend on, each result before its operands."""
    order: list[Approx] = []
    visited: set[int] = set()
    stack: list[tuple[Approx, bool]] = [(root, False) for root in roots]
    while stack:
        node, finished = stack.pop()
        if finished:
            order.append(node)
        elif id(node) not in visited:
            visited.add(id(node))
            stack.append((node, True))
            stack += [(parent, False) for parent, _ in node.parents]
    return order[::-1]
