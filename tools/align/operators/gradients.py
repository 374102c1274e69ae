"""Gradients of formulas that were computed with :class:`Approx`, in the same arithmetic."""

from collections.abc import Sequence

from telechat_moe.tools.align.operators.approx import Approx


def gradients(
    outputs: Sequence[tuple[Approx, Approx]], inputs: Sequence[Approx]
) -> list[Approx | None]:
    """Return the gradient of each input.

    Args:
        outputs: Results, each with its incoming gradient.
        inputs: Operands whose gradients are wanted.

    Returns:
        Gradients in the order of ``inputs``; None: no output depends on that input.
    """
    found: dict[int, Approx] = {}
    for output, gradient in outputs:
        found[id(output)] = found[id(output)] + gradient if id(output) in found else gradient
    for node in _sorted([output for output, _ in outputs]):
        gradient = found.get(id(node))
        if gradient is None:
            continue
        for parent, back in node.parents:
            part = back(gradient)
            found[id(parent)] = found[id(parent)] + part if id(parent) in found else part
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
