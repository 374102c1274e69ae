"""Gradients of formulas that were computed with :class:`Approx`, in the same arithmetic."""

from collections.abc import Sequence

from telechat_moe.tools.align.operators.approx import Approx


def gradients(
    outputs: Sequence[tuple[Approx, Approx]], inputs: Sequence[Approx]
) -> list[Approx | None]:
    """Return the gradient of each input, from results with their incoming gradients; None: no result depends on it."""
    found: dict[int, Approx] = {}

    def add(node: Approx, part: Approx) -> None:
        found[id(node)] = found[id(node)] + part if id(node) in found else part

    for output, gradient in outputs:
        add(output, gradient)
    for node in _sorted([output for output, _ in outputs]):
        for parent, back in node.parents if id(node) in found else ():
            add(parent, back(found[id(node)]))
    return [found[id(x)].stop() if id(x) in found else None for x in inputs]


def _sorted(roots: Sequence[Approx]) -> list[Approx]:
    """Return everything that the roots depend on, each result before its operands."""
    order: list[Approx] = []
    seen: set[int] = set()
    stack: list[tuple[Approx, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [(parent, False) for parent, _ in node.parents]
    return order[::-1]
