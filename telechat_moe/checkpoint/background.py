"""Save while training continues: copy the parameters between two steps and let a thread write the copy.

One save is in flight at a time; the next one waits for it. The thread has the lowest priority that the system gives.
"""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue

from telechat_moe.checkpoint.folder import CheckpointError
from telechat_moe.checkpoint.snapshot import ArrayGroups, Snapshot, Source

_LOWEST = 19  # nice value
_LAST_SAVE_S = 60.0


class FailedSaves:
    """Decide whether a run goes on after a save failed.

    Args:
        max_failed: Saves in a row that may fail; each is reported to ``say``, the next one is raised.
    """

    def __init__(self, max_failed: int = 0, say: Callable[[str], object] = lambda _: None) -> None:
        self.max_failed, self.say = max_failed, say
        self.failed = 0

    def judge(self, failure: BaseException | None, *, last: bool = False) -> None:
        """Take note of a save that ended; raise its failure if the run must not go on, as after the ``last`` of a run."""
        if failure is None:
            self.failed = 0
            return
        self.failed += 1
        if last or self.failed > self.max_failed or not isinstance(failure, CheckpointError):
            raise failure
        self.say(
            f"warning: {failure} Training goes on; {self.failed} save(s) in a row failed, the run stops after "
            f"more than {self.max_failed} (telechat_moe.saving.max_failed)"
        )


class Saver(FailedSaves):
    """Run one save after another in a thread.

    Args:
        sources: Parameters by group and name.
        background: Write while training continues; False: :meth:`save` returns when all is written.
        max_failed, say: See :class:`FailedSaves`.
    """

    def __init__(
        self,
        sources: Mapping[str, Mapping[str, Source]],
        *,
        background: bool = True,
        max_failed: int = 0,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        super().__init__(max_failed, say)
        self.snapshot, self.background = Snapshot(sources), background
        self._todo: SimpleQueue[Callable[[ArrayGroups], object] | None] = SimpleQueue()
        self._finished = threading.Event()
        self._submitted = self._alive = False
        self._failure: BaseException | None = None
        self._start()

    @property
    def busy(self) -> bool:
        """Whether a save was begun and is not yet written."""
        return self._submitted and not self._finished.is_set()

    def follow(self, sources: Mapping[str, Mapping[str, Source]]) -> None:
        """See :meth:`Snapshot.follow`."""
        self.snapshot.follow(sources)

    def save(self, name: str, write: Callable[[ArrayGroups], object]) -> None:
        """Copy the parameters and let ``write`` store the copies, in the thread; ``name`` is its name for messages.

        Raises:
            CheckpointError: An earlier save failed (see ``max_failed``); without ``background`` also this one.
        """
        if self.busy:
            self.say(f"{name} waits: the one before is still being written")
        self.wait()
        self._start()
        self.snapshot.take()
        self._finished.clear()
        self._submitted = True
        self._todo.put(write)
        if not self.background:
            self.wait()

    def poll(self) -> None:
        """Raise the failure of a save that has ended; does not wait."""
        if not self.busy:
            self.wait()

    def wait(self, *, last: bool = False) -> None:
        """Wait for the save in flight; with ``last``, when no other can make up for a failure, the thread ends.

        Raises:
            CheckpointError: It failed, and so did more than ``max_failed`` in a row.
            TelechatMoeError: What is to be saved is wrong.
        """
        pending, self._submitted = self._submitted, False
        if pending:
            self._finished.wait()
        if last and self._alive:
            self._todo.put(None)
            self._alive = False
        if not pending:
            return
        failure, self._failure = self._failure, None
        self.judge(failure, last=last)

    def abandon(self) -> None:
        """Give the save in flight a moment to end after training has failed; ignore its own failure."""
        if self._submitted:
            self._finished.wait(_LAST_SAVE_S)

    def _start(self) -> None:
        if not self._alive:
            threading.Thread(target=self._work, name="saver", daemon=True).start()
            self._alive = True

    def _work(self) -> None:
        if self.background:
            # Of this thread and those that it starts; only Linux knows priorities of threads.
            with suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        while (write := self._todo.get()) is not None:
            try:
                write(self.snapshot.groups)
            except BaseException as error:
                self._failure = error
            self._finished.set()
