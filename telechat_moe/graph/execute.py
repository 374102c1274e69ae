"""Run rewritten rank graphs on CPU processes: load one, shard its parameters, call it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.graph.compile import LayoutEntry, RankGraph
from telechat_moe.graph.links import link
from telechat_moe.graph.mindir import kinds
from telechat_moe.graph.parameter_layout import shard_of
from telechat_moe.graph.reorder import PairedPasses, PassKey, in_order
from telechat_moe.graph.rewrite import for_cpu
from telechat_moe.graph.swapping import PooledTensor, State, Swapped, open_pool

# Parameters that a step reads and the host sets before each call.
SCHEDULE = ("step_rate", "step_epsilon", "step_decay")
# Gradient norm and loss must be below these; the host may lower them.
LIMITS = ("step_norm_limit", "step_loss_limit")
# What sums over tokens are multiplied by; the host sets it before each call of a step that has them.
TOKEN_WEIGHTS = "step_token_weights"
# Gradient sums of micro-batches: zero between steps, and of other stages' weights never used.
SUMS = "accu_grads."
# Rows of the parts of a sequence so far and their gradients (sharding.cells.parts): zero between steps.
KEPT = ("key_cache", "key_cache_grad")

Letter = tuple[int, int, int, tuple[int, ...]]
"""Sender, receiver, tag and shape of a message."""


@dataclass(frozen=True)
class Job:
    """Rank graphs in a folder: ``rank_N.mindir`` and ``ranks.json`` beside them.

    Attributes:
        ranks: What is known of each rank's graph.
        groups: Communication groups of all ranks by name.
        peers: Ranks that each rank exchanges messages with.
        rewritten: Collectives that were rewritten for CPU, by kind, for each rank.
        operators: Primitives before that, by kind, for each rank.
        swapped: What each rank's graph swaps.
    """

    folder: Path
    ranks: list[RankGraph]
    groups: dict[str, list[int]]
    peers: list[list[int]]
    rewritten: list[dict[str, int]]
    operators: list[dict[str, int]]
    swapped: list[Swapped | None]

    @staticmethod
    def write(
        folder: Path,
        graphs: Sequence[RankGraph],
        orders: Mapping[int, Sequence[PassKey | PairedPasses]] | None = None,
        states: bool = False,
    ) -> "Job":
        """Rewrite the graphs of all ranks for CPU and write them.

        Args:
            orders: For each rank the order of its passes; None: MindSpore's.
            states: The optimizer's are swapped.

        Raises:
            BadInputError: A rank waits for a message that none sends, or an order is none of its graph's passes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        groups: dict[str, list[int]] = {}
        light, counts, operators, swapped = [], [], [], []
        sent, received = set[Letter](), set[Letter]()
        for graph in graphs:
            mindir = graph.mindir
            if orders is not None:
                mindir = in_order(mindir, orders[graph.rank])
            rewritten = for_cpu(mindir, graph.rank, graph.groups, states)
            (folder / f"rank_{graph.rank}.mindir").write_bytes(rewritten.mindir)
            groups.update({name: list(ranks) for name, ranks in graph.groups.items()})
            light.append(replace(graph, mindir=b""))
            sent |= {(graph.rank, *message) for message in rewritten.sent}
            received |= {(by, graph.rank, tag, shape) for by, tag, shape in rewritten.received}
            counts.append(rewritten.counts)
            operators.append(dict(kinds(graph.mindir)))
            swapped.append(rewritten.swapped)
        if sent != received:
            sender, receiver, tag, shape = min(sent ^ received)
            raise BadInputError(
                f"message {tag} {list(shape)} from rank {sender} to rank {receiver} is in the graph of one of them only"
            )
        pairs = {(a, b) for a, b, *_ in sent} | {(b, a) for a, b, *_ in sent}
        peers = [sorted(b for a, b in pairs if a == graph.rank) for graph in graphs]
        ranks = [{k: v for k, v in vars(graph).items() if k != "mindir"} for graph in light]
        content = {"ranks": ranks, "groups": groups, "peers": peers, "rewritten": counts}
        content |= {"operators": operators, "swapped": swapped}
        (folder / "ranks.json").write_text(json.dumps(content), encoding="utf-8")
        return Job(folder, light, groups, peers, counts, operators, swapped)

    def with_copies(self, prefix: str, keep: Callable[[str], bool]) -> "Job":
        """Return the job with a tensor ``prefix.NAME`` beside each that is kept, in the same shards; no graph has it."""
        ranks = []
        for graph in self.ranks:
            copies = {f"{prefix}.{n}": entry for n, entry in graph.layouts.items() if keep(n)}
            ranks.append(replace(graph, layouts={**graph.layouts, **copies}))
        return replace(self, ranks=ranks)

    @staticmethod
    def read(folder: Path) -> "Job":
        """Return the job that :meth:`write` has written into a folder."""
        content = json.loads((folder / "ranks.json").read_text(encoding="utf-8"))
        ranks: list[RankGraph] = []
        for graph in content.pop("ranks"):
            layouts = {name: LayoutEntry(*entry) for name, entry in graph.pop("layouts").items()}
            ranks.append(RankGraph(mindir=b"", layouts=layouts, **graph))
        swapped = [
            row and Swapped._make([*row[:-1], [State(*state) for state in row[-1]]])
            for row in content.pop("swapped")
        ]
        return Job(folder, ranks, **content, swapped=swapped)


class RankProgram:
    """One rank of a job; MindSpore's communication must be initialised.

    Args:
        job: The job; its groups are created here, all processes in the same order.
        made: Names of groups that earlier programs of this process created; extended here.
        swap_folder: Where what is swapped waits; None: in memory.

    Attributes:
        parameters: Those of the graph by name, and states in the pool; others may join them that only the host computes.
    """

    def __init__(
        self, job: Job, rank: int, created: set[str] | None = None, swap_folder: str | None = None
    ) -> None:
        import mindspore as ms
        from mindspore import nn
        from mindspore.communication import create_group

        self.job, self.rank, self.graph = job, rank, job.ranks[rank]
        created = set() if created is None else created
        for name, ranks in sorted(job.groups.items()):
            if name not in created and rank in ranks:
                create_group(name, ranks)
            created.add(name)
        link(rank, job.peers)
        self.cell = nn.GraphCell(ms.load(str(job.folder / f"rank_{rank}.mindir")))
        named = {p.name.split(":")[-1]: p for p in self.cell.get_parameters()}
        self.parameters: dict[str, Any] = named
        if (swapped := job.swapped[rank]) is not None:
            pool = open_pool(swapped.pool, swap_folder)
            self.parameters |= {s.name: PooledTensor(s, pool) for s in swapped.states}

    def set_parameters(self, values: Mapping[str, np.ndarray], in_place: bool = False) -> None:
        """Set the parameters to this rank's shards of whole tensors; after the first call only ``in_place``.

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
            elif name in values:
                shard = shard_of(values[name], self.graph, name)
            else:
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

    def take_over(self, other: "RankProgram") -> None:
        """Begin, before the first call, with the values of a program of other micro-batches."""
        from mindspore import Tensor

        for name, parameter in self.parameters.items():
            source = other.parameters.get(name)
            if source is not parameter:  # without one it is a gradient sum, zero between steps
                empty = source is None
                value = np.zeros(parameter.shape, np.float32) if empty else source.asnumpy().copy()
                parameter.set_data(Tensor(value))

    def set_limits(self, norm: float, loss: float) -> None:
        """Let the next steps be applied only where gradient norm and loss are below these."""
        for name, value in zip(LIMITS, (norm, loss), strict=True):
            if name in self.parameters:
                self.put(name, np.float32(value))

    def set_token_weights(self, weights: np.ndarray) -> None:
        """Set what the next step multiplies sums over tokens by; no effect on one whose losses are means."""
        if TOKEN_WEIGHTS in self.parameters:
            self.put(TOKEN_WEIGHTS, weights)

    def put(self, name: str, shard: np.ndarray | np.float32) -> None:
        """Set this rank's shard of a parameter, in place."""
        from mindspore import Tensor, ops

        parameter = self.parameters[name]
        if isinstance(parameter, PooledTensor):
            parameter.set_data(Tensor(shard))
        else:
            ops.assign(parameter, Tensor(shard))

    def shards(self) -> dict[str, np.ndarray]:
        """Return copies of this rank's parameters."""
        return {name: p.asnumpy().copy() for name, p in self.parameters.items()}

    def __call__(self, rate: Any, epsilon: Any, decay: Any, *batch: Any) -> Any:
        """Run the graph; the first three come from the optimizer's ``scalars``."""
        from mindspore import ops

        # In place: after the first call the graph's branches keep a parameter's memory, and what
        # set_data sets instead never reaches them (MindSpore 2.9.0).
        for name, value in zip(SCHEDULE, (rate, epsilon, decay), strict=True):
            if name in self.parameters:  # MindSpore drops what a graph does not read
                ops.assign(self.parameters[name], value)
        return self.cell(*batch)
