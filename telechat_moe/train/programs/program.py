"""What a rank engine asks of a program: parameters of this rank by name, values for them, a call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.execute import KEPT, LIMITS, SCHEDULE, SUMS, TOKEN_WEIGHTS
from telechat_moe.graph.parameter_layout import shard_of
from telechat_moe.train.average import WeightAverage
from telechat_moe.train.step import limit_tensors

Exchange = Callable[..., Any]
"""Exchange rows of a tensor, as :class:`telechat_moe.sharding.cells.expert_rows.ExchangeRows` does."""


class RankProgram(ABC):
    """The compiled step of one rank of a model that is spread over devices.

    Attributes:
        ranks: How the graph of each rank splits its parameters, and its groups; without MindIR.
        peers: Ranks that this one exchanges messages with through the native library.
        operators: Whose the graph is made of, for the user.
        runs_ahead: A call returns before the device has computed the step.
        parameters: Those of the graph by name, this rank's shards; averages of them may join them.
    """

    rank: int
    ranks: Sequence[RankGraph]
    peers: Sequence[int] = ()
    parameters: dict[str, Any]
    operators: str = "plain"
    runs_ahead: bool = False

    @property
    def graph(self) -> RankGraph:
        """What is known of this rank's graph."""
        return self.ranks[self.rank]

    @abstractmethod
    def evaluate(self, *batch: Any) -> Any:
        """Run the forward graph (:mod:`telechat_moe.train.rank_forward`) on a whole micro-batch with this program's weights.

        Returns its outputs where the head of the model is, on other stages anything.
        """

    @abstractmethod
    def run(self, *batch: Any) -> Any:
        """Run the graph on a whole global batch, micro-batch by micro-batch; return the step's outputs."""

    def __call__(self, rate: Any, epsilon: Any, decay: Any, *batch: Any) -> Any:
        """Run the graph; the first three come from the optimizer's ``scalars``."""
        from mindspore import ops

        # In place: after the first call the graph's branches keep a parameter's memory, and what
        # set_data sets instead never reaches them (MindSpore 2.9.0).
        for name, value in zip(SCHEDULE, (rate, epsilon, decay), strict=True):
            if name in self.parameters:  # MindSpore drops what a graph does not read
                ops.assign(self.parameters[name], value)
        return self.run(*batch)

    def set_parameters(self, values: Mapping[str, np.ndarray], in_place: bool = False) -> None:
        """Set the parameters to this rank's shards of whole tensors; see :meth:`set_shards`."""

        def shard_named(name: str) -> np.ndarray | None:
            return shard_of(values[name], self.graph, name) if name in values else None

        self.set_shards(shard_named, in_place)

    def set_shards(
        self, shard_named: Callable[[str], np.ndarray | None], in_place: bool = False
    ) -> None:
        """Set the parameters to this rank's shards, one after the other; after the first call only ``in_place``.

        Args:
            shard_named: Returns the shard of a name; None: there is none.

        Raises:
            BadInputError: A parameter has no value, or its shard another shape.
        """
        from mindspore import Tensor

        for name, parameter in self.parameters.items():
            if name in (*SCHEDULE, TOKEN_WEIGHTS):
                continue
            if name in LIMITS:
                if not in_place:
                    parameter.set_data(Tensor(np.float32(np.inf)))
                continue
            if name.startswith(SUMS) or name.endswith(KEPT):
                shard = np.zeros(parameter.shape, np.float32)
            else:
                shard = shard_named(name)
            if shard is None:
                raise BadInputError(f"rank {self.rank}: no value for the parameter {name}")
            if tuple(shard.shape) != tuple(parameter.shape):
                raise BadInputError(
                    f"rank {self.rank}: {name} is {tuple(shard.shape)} after cutting, "
                    f"the graph has {tuple(parameter.shape)}"
                )
            if in_place:
                self.put(name, shard)
            else:
                parameter.set_data(Tensor(shard))

    def average(self, weights: Mapping[str, Any], decay: float) -> WeightAverage:
        """Return an average of parameters, which :meth:`add_copies` takes."""
        return WeightAverage(weights, decay)

    def add_copies(
        self, prefix: str, copies: Mapping[str, Any], keep: Callable[[str], bool]
    ) -> None:
        """Let copies of parameters, ``prefix.NAME``, join them in the same shards; no graph has them.

        Args:
            copies: This rank's, by their names.
            keep: Says of a parameter of any rank whether it has a copy.
        """
        self.parameters |= copies
        ranks: list[RankGraph] = []
        for graph in self.ranks:
            entries = {f"{prefix}.{n}": entry for n, entry in graph.layouts.items() if keep(n)}
            ranks.append(replace(graph, layouts={**graph.layouts, **entries}))
        self.ranks = ranks

    def take_over(self, other: "RankProgram") -> None:
        """Begin, before the first call, with the values of a program of other micro-batches."""
        from mindspore import Tensor

        for name, parameter in self.parameters.items():
            source = other.parameters.get(name)
            if source is None:  # a gradient sum, zero between steps
                parameter.set_data(Tensor(np.zeros(parameter.shape, np.float32)))
            elif source is not parameter:
                self.take(parameter, source)

    def take(self, parameter: Any, source: Any) -> None:
        """Let a parameter have the value of one of the program before it, which no longer runs."""
        from mindspore import Tensor

        parameter.set_data(Tensor(source.asnumpy().copy()))

    def set_limits(self, limits: tuple[float, float], before: Any = None) -> None:
        """Let the next steps be applied only where gradient norm and loss are below these.

        Args:
            before: See :func:`telechat_moe.train.step.limit_tensors`.
        """
        for name, value in zip(LIMITS, limit_tensors(limits, before), strict=True):
            if name in self.parameters:
                self.put(name, value)

    def set_token_weights(self, weights: np.ndarray) -> None:
        """Set what the next step multiplies sums over tokens by; no effect on one whose losses are means."""
        if TOKEN_WEIGHTS in self.parameters:
            self.put(TOKEN_WEIGHTS, weights)

    def put(self, name: str, shard: Any) -> None:
        """Set this rank's shard of a parameter, an array or a tensor, in place."""
        from mindspore import Tensor, ops

        value = shard if isinstance(shard, Tensor) else Tensor(shard)
        ops.assign(self.parameters[name], value)

    def value(self, name: str) -> Any:
        """Return this rank's shard of a parameter as a tensor, for another graph."""
        return self.parameters[name].value()

    @abstractmethod
    def row_exchanges(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Exchange]:
        """Return the graphs that move experts, for the groups that this rank is in; all ranks call it together."""

    def shards(self) -> dict[str, np.ndarray]:
        """Return copies of this rank's parameters."""
        return {name: p.asnumpy().copy() for name, p in self.parameters.items()}
