"""Differentiable collectives: gradients flow back through them."""

from collections.abc import Callable
from typing import Any

from benchmarks.align_faults.engine import Engine
from benchmarks.align_faults.layouts import RankLayout
from benchmarks.align_faults.tensors import Tensor, send

Groups = list[list[int]]


class Communication:
    """Differentiable collectives of a model."""

    def __init__(self, engine: Engine, layout: RankLayout) -> None:
        self.engine, self.layout = engine, layout

    def gather(self, x: Tensor, groups: Groups) -> Tensor:
        """All-gather rows; the backward pass reduces and scatters gradients."""
        y = self.engine.collective("all_gather_into_tensor", x, groups)
        back = "reduce_scatter_tensor"
        return self._with_backward(x, y, lambda g: self.engine.collective(back, g, groups))

    def scatter(self, x: Tensor, groups: Groups) -> Tensor:
        """Reduce and scatter rows; the backward pass gathers gradients."""
        y = self.engine.collective("reduce_scatter_tensor", x, groups)
        back = "all_gather_into_tensor"
        return self._with_backward(x, y, lambda g: self.engine.collective(back, g, groups))

    def reduce(self, x: Tensor, groups: Groups) -> Tensor:
        """All-reduce values; the backward pass leaves gradients as they are."""
        return self._with_backward(x, self.engine.collective("all_reduce", x, groups), lambda g: g)

    def copied(self, x: Tensor, groups: Groups) -> Tensor:
        """Return values as they are; the backward pass all-reduces gradients."""
        y = Tensor(x.values, x.dtype)
        return self._with_backward(x, y, lambda g: self.engine.collective("all_reduce", g, groups))

    def exchange(self, x: Tensor, groups: Groups, sizes: dict[int, list[int]]) -> Tensor:
        """Exchange rows by an all-to-all; gradients take the same way back.

        Args:
            x: Rows of each rank, in the order of the ranks that they go to.
            groups: Ranks that exchange.
            sizes: Rows to each rank of the group.
        """
        returned = {
            r: [sizes[other][i] for other in group] for group in groups for i, r in enumerate(group)
        }

        def run(x: Tensor, sent: dict[int, list[int]], got: dict[int, list[int]]) -> Tensor:
            settings: dict[int, dict[str, Any]] = {
                r: {"output_split_sizes": [*got[r]], "input_split_sizes": [*sent[r]]} for r in sent
            }
            return self.engine.collective("all_to_all_single", x, groups, settings)

        return self._with_backward(x, run(x, sizes, returned), lambda g: run(g, returned, sizes))

    def enter(self, x: Tensor, stage: int) -> Tensor:
        """Turn the rows that norms see into the rows that all ranks of ``tp`` compute on."""
        if self.layout.tp == 1:
            return x
        return (self.gather if self.layout.sp else self.copied)(x, self.layout.tensor(stage))

    def leave(self, x: Tensor, stage: int) -> Tensor:
        """Turn the terms of the ranks of ``tp`` into their sum."""
        if self.layout.tp == 1:
            return x
        return (self.scatter if self.layout.sp else self.reduce)(x, self.layout.tensor(stage))

    def move(self, x: Tensor, stage: int, to: int) -> Tensor:
        """Send to another stage, each rank to the one with the same position there; gradients come back."""

        def sent(x: Tensor, stage: int, to: int) -> Tensor:
            shift = (to - stage) * self.layout.stage_size
            return self.engine.transfer(x, {r: r + shift for r in self.layout.ranks(stage)})

        return self._with_backward(x, sent(x, stage, to), lambda g: sent(g, to, stage))

    def _with_backward(self, x: Tensor, y: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        """Record on the tape how a gradient of ``y`` becomes one of ``x``, and return ``y``."""

        def back() -> None:
            for rank, value in gradient(Tensor(y.grad, y.dtype)).values.items():
                send(x, rank, value)

        y.needs = x.needs
        if x.needs:
            self.engine.remember([x], [y], back)
        return y
