"""Rank graphs that were rewritten for CPU processes, in a folder: write them, read what is known of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from telechat_moe.errors import BadInputError
from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.mindir import kinds
from telechat_moe.graph.reorder import PairedPasses, PassKey, in_order
from telechat_moe.graph.rewrite import for_cpu
from telechat_moe.graph.swapping import State, Swapped

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

# Folder, in a job's, of the job of the ranks' forward graphs.
FORWARD = "forward"

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
        ranks = [graph.content() for graph in light]
        content = {"ranks": ranks, "groups": groups, "peers": peers, "rewritten": counts}
        content |= {"operators": operators, "swapped": swapped}
        (folder / "ranks.json").write_text(json.dumps(content), encoding="utf-8")
        return Job(folder, light, groups, peers, counts, operators, swapped)

    @staticmethod
    def read(folder: Path) -> "Job":
        """Return the job that :meth:`write` has written into a folder."""
        content = json.loads((folder / "ranks.json").read_text(encoding="utf-8"))
        ranks = [RankGraph.of(graph) for graph in content.pop("ranks")]
        swapped = [
            row and Swapped._make([*row[:-1], [State(*state) for state in row[-1]]])
            for row in content.pop("swapped")
        ]
        return Job(folder, ranks, **content, swapped=swapped)
