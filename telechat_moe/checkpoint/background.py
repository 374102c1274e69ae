"""Save while training continues, which stops only until the parameters are copied; a thread does the rest.

They are copied in memory, or, where that would take too much of it, into the files of the checkpoint, of which the system
then keeps in its page cache what is not on the disk yet. One save is in flight at a time; the next one waits for it. The
thread has the lowest priority that the system gives once the parameters are copied.
"""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from telechat_moe.checkpoint.checkpoint import Copied
from telechat_moe.checkpoint.folder import CheckpointError
from telechat_moe.checkpoint.snapshot import ArrayGroups, Snapshot, Source, Views

_LOWEST = 19  # nice value
_LAST_SAVE_S = 60.0

WriteSave = Callable[[ArrayGroups, Copied], object]
"""Store parameters as a checkpoint."""


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
        memory_share: How much of this machine's memory copies of the parameters may take. Parameters on a device are
            always copied to memory.
        max_failed, say: See :class:`FailedSaves`.
    """

    def __init__(
        self,
        sources: Mapping[str, Mapping[str, Source]],
        *,
        background: bool = True,
        memory_share: float = 1.0,
        max_failed: int = 0,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        super().__init__(max_failed, say)
        self.views, self.background = Views(sources), background
        limit = memory_share * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        fits = background and self.views.nbytes <= limit
        in_memory = fits or not self.views.are_here
        self.snapshot = Snapshot(self.views) if in_memory else None
        self._finished = threading.Event()
        self._submitted = False
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a save was begun and is not yet written."""
        return self._submitted and not self._finished.is_set()

    def follow(self, sources: Mapping[str, Mapping[str, Source]]) -> None:
        """See :meth:`Views.follow`."""
        self.views.follow(sources)

    def save(self, name: str, write: WriteSave) -> None:
        """Copy the parameters and let ``write`` store the copies, in the thread; ``name`` is its name for messages.

        Raises:
            CheckpointError: An earlier save failed (see ``max_failed``); without ``background`` also this one.
        """
        if self.busy:
            self.say(f"{name} waits: the one before is still being written")
        self.wait()
        groups = (self.snapshot or self.views).take()
        copied = threading.Event()
        self._finished.clear()
        self._submitted = True
        threading.Thread(
            target=self._work, args=(write, groups, copied), name="saver", daemon=True
        ).start()
        copied.wait()
        if not self.background:
            self.wait()

    def poll(self) -> None:
        """Raise the failure of a save that has ended; does not wait."""
        if not self.busy:
            self.wait()

    def wait(self, *, last: bool = False) -> None:
        """Wait for the save in flight; with ``last`` no other can make up for a failure.

        Raises:
            CheckpointError: It failed, and so did more than ``max_failed`` in a row.
            TelechatMoeError: What is to be saved is wrong.
        """
        pending, self._submitted = self._submitted, False
        if not pending:
            return
        self._finished.wait()
        failure, self._failure = self._failure, None
        self.judge(failure, last=last)

    def abandon(self) -> None:
        """Give the save in flight a moment to end after training has failed; ignore its own failure."""
        if self._submitted:
            self._finished.wait(_LAST_SAVE_S)

    def _work(self, write: WriteSave, groups: ArrayGroups, copied: threading.Event) -> None:
        def go_on() -> None:
            copied.set()
            # Of this thread and those that it starts; only Linux knows priorities of threads.
            with suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)

        try:
            if self.background and self.snapshot is not None:
                go_on()
            into_files = self.background and self.snapshot is None
            write(groups, go_on if into_files else None)
        except BaseException as error:
            self._failure = error
        self._finished.set()
        copied.set()
