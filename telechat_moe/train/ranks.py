"""Coordinate the processes of a run, from within one of them."""

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from telechat_moe.data.shared import Publisher, Subscriber
from telechat_moe.processes import Control


class RankCoordinator:
    """Report where in the run this process is, meet the other processes, and agree with them.

    Args:
        control: Control folder of the run; None: this process is the only one, and nobody supervises it.
    """

    def __init__(self, control: Control | None = None, rank: int = 0, count: int = 1) -> None:
        self.control, self.rank, self.count = control, rank, count
        self.interrupted = False
        self._meetings = self._agreements = 0

    @property
    def leads(self) -> bool:
        """Whether this process reports and completes checkpoints."""
        return self.rank == 0

    def at(self, position: str) -> None:
        """Note where in the run this process is, for the message should it hang there."""
        if self.control is not None:
            self.control.set_position(self.rank, position)

    def barrier(self, name: str) -> None:
        """Wait until all processes have come to the barrier of this name."""
        if self.control is not None and self.count > 1:
            self.control.barrier(name, self.rank, self.count)

    def meet(self, position: str) -> None:
        """Wait for the other processes, which call this at the same position."""
        self._meetings += 1
        self.at(position)
        self.barrier(f"met-{self._meetings}")

    def share_batches(self) -> Publisher | Subscriber | None:
        """Let the first process of each host read the training data for the others, which train on the same batches.

        All processes call this together, once. None: this one reads for itself only.
        """
        if self.control is None or self.count == 1 or sys.platform != "linux":
            return None
        # Of one kernel and one network, through whose names they meet: not those of two containers.
        place = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/net").readlink())  # fmt: skip
        self.control.write(f"place-{self.rank}", place)
        self.meet("looking for the other processes of this host")
        neighbours = [r for r in range(self.count) if self.control.read(f"place-{r}") == place]
        name, link = f"{self.control.read('nonce')}-{neighbours[0]}", None
        if self.rank == neighbours[0] and len(neighbours) > 1:
            link = Publisher(name, len(neighbours) - 1)
        self.meet("waiting for the readers of the data")
        return Subscriber(name) if self.rank != neighbours[0] else link

    def agree(self, position: str, choose: Callable[[], str], by: int = 0) -> str:
        """Return on all processes what one of them chooses, rank 0 by default."""
        if self.control is None or self.count == 1:
            return choose()
        self._agreements += 1
        file = f"agreed-{self._agreements}"
        self.meet(position)  # all have come here: none is still saving
        if self.rank == by:
            self.control.write(file, choose())
        self.meet(position)
        return self.control.read(file) or ""

    def problem(self, position: str, work: Callable[[], object]) -> str:
        """Work on every process; return on all of them the reason of the first failure, or an empty text.

        Only what the outside world does is a problem (``OSError``, a damaged file); a mistake ends the run.
        """
        self._agreements += 1
        file, reason = f"problem-{self._agreements}", ""
        try:
            self.at(position)
            work()
        except (OSError, zipfile.BadZipFile) as error:
            reason = f"rank {self.rank}: {getattr(error, 'strerror', None) or error}"
            if self.control is not None:
                self.control.write(f"{file}-{self.rank}", reason)
        self.meet(position)
        if self.control is None:
            return reason
        reasons = (self.control.read(f"{file}-{rank}") for rank in range(self.count))
        return next((text for text in reasons if text), "")

    def interrupt(self) -> None:
        """Let this process stop after the current step."""
        self.interrupted = True

    def begin_step(self, step: int, ahead: int = 0) -> None:
        """Announce on rank 0 which step is the last one, if the user wants to stop.

        Args:
            ahead: How many more steps the others may begin before they end this one; the last step is so many later.
        """
        if self.control is None or not self.leads or self.control.read("last"):
            return
        if self.control.stop_asked():
            # Seen by all others before they end this step, since they need rank 0 for its collectives.
            self.control.write("last", str(step + ahead))

    def is_last(self, step: int) -> bool:
        """Return whether a run that the user stops, stops after this step."""
        last = self.control.read("last") if self.control is not None else None
        return self.interrupted or (last is not None and step >= int(last))

    def end_step(self, step: int) -> None:
        """Find out, alike on all processes, whether this step was the last one."""
        self.interrupted = self.is_last(step)
