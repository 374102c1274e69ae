"""Run the graph of a rank on a CPU process: it was compiled for Ascend, exported, and rewritten for CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.communication import create_group

from telechat_moe.graph.execute import Job
from telechat_moe.graph.links import link
from telechat_moe.graph.swapping import PooledTensor, open_pool
from telechat_moe.sharding.cells.expert_rows import CpuExchangeRows, group_of
from telechat_moe.train.programs.program import Exchange, RankProgram


class CpuProgram(RankProgram):
    """One rank of a job; MindSpore's communication must be initialised. See :class:`RankProgram`.

    Args:
        job: The job; its groups are created here, all processes in the same order.
        created: Names of groups that earlier programs of this process created; extended here.
        swap_folder: Where what is swapped waits; None: in memory.
        forward: The forward graphs of the same ranks; None: the program does not evaluate.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        created: set[str] | None = None,
        swap_folder: str | None = None,
        forward: Path | None = None,
    ) -> None:
        self.rank, self.ranks, self.peers = rank, job.ranks, job.peers[rank]
        self.created = set[str]() if created is None else created
        self.forward, self.forward_cell = forward, None
        self.cell, self.parameters = self._load(job)
        if (swapped := job.swapped[rank]) is not None:
            pool = open_pool(swapped.pool, swap_folder)
            self.parameters |= {s.name: PooledTensor(s, pool) for s in swapped.states}

    def _load(self, job: Job) -> tuple[nn.GraphCell, dict[str, Any]]:
        """Return this rank's graph of a job and its parameters by name."""
        for name, ranks in sorted(job.groups.items()):
            if name not in self.created and self.rank in ranks:
                create_group(name, ranks)
            self.created.add(name)
        link(self.rank, job.peers)
        cell = nn.GraphCell(ms.load(str(job.folder / f"rank_{self.rank}.mindir")))
        return cell, {p.name.split(":")[-1]: p for p in cell.get_parameters()}

    def evaluate(self, *batch: Any) -> Any:
        """See :meth:`RankProgram.evaluate`."""
        if self.forward_cell is None:
            assert self.forward is not None
            self.forward_cell, parameters = self._load(Job.read(self.forward))
            for name, parameter in parameters.items():
                parameter.set_data(self.parameters[name])  # from now on they share their memory
        return self.forward_cell(*batch)

    def run(self, *batch: Any) -> Any:
        """See :meth:`RankProgram.run`."""
        return self.cell(*batch)

    def put(self, name: str, shard: Any) -> None:
        """See :meth:`RankProgram.put`."""
        parameter = self.parameters[name]
        if isinstance(parameter, PooledTensor):
            parameter.set_data(shard if isinstance(shard, Tensor) else Tensor(shard))
        else:
            super().put(name, shard)

    def value(self, name: str) -> Tensor:
        """See :meth:`RankProgram.value`."""
        parameter = self.parameters[name]
        # A copy: what a graph was given as an input, it may go on to hold.
        return Tensor(parameter.asnumpy().copy())

    def row_exchanges(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Exchange]:
        """See :meth:`RankProgram.row_exchanges`."""
        peers = [
            sorted({peer for group in groups if rank in group for peer in group} - {rank})
            for rank in range(len(self.ranks))
        ]
        link(self.rank, peers)
        return {
            group: CpuExchangeRows(group_of(group, self.rank))
            for group in groups
            if self.rank in group
        }
