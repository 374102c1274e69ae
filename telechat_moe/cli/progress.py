"""Progress on standard error: bars where that is a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from telechat_moe.units import size_text

if TYPE_CHECKING:
    from telechat_moe.files import Progress

Item = TypeVar("Item")


@contextmanager
def bars(*, in_bytes: bool = False, every_s: float = 30.0) -> "Generator[Progress, None, None]":
    """Yield a function that moves a bar for each thing that is done.

    Args:
        in_bytes: The numbers are bytes; else things.
        every_s: Where standard error is no terminal: at least so many seconds between two lines.
    """
    if not sys.stderr.isatty():
        yield _lines(size_text if in_bytes else "{:,}".format, every_s)
        return
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    columns = progress.TextColumn("{task.description}"), progress.BarColumn()
    count: tuple[progress.ProgressColumn, ...] = (
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    if in_bytes:

        class Speed(progress.ProgressColumn):
            def render(self, task: progress.Task) -> Text:
                return Text(f"{size_text(task.speed or 0)}/s", style="progress.data.speed")

        count = progress.DownloadColumn(binary_units=True), Speed()
    with progress.Progress(
        *columns,
        *count,
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        tasks: dict[str, Any] = {}

        def move(task: str, completed: int, total: int | None) -> None:
            if task not in tasks:  # what was done by an earlier run does not count for the speed
                tasks[task] = bar.add_task(task, completed=completed, total=total)
            bar.update(tasks[task], completed=completed, total=total)

        yield move


def _lines(text: Callable[[int], str], every_s: float) -> "Progress":
    """Return a function that prints what is done, a line now and then."""
    began = time.monotonic()
    last: dict[str, float] = {}

    def move(task: str, completed: int, total: int | None) -> None:
        now = time.monotonic()
        if now - last.get(task, began) >= every_s:
            last[task] = now
            of = "" if total is None else f" of {text(total)}"
            sys.stderr.write(f"{task}: {text(completed)}{of} ({now - began:.0f} s)\n")
            sys.stderr.flush()

    return move


@contextmanager
def counted(task: str, total: int) -> Generator[Callable[[], None], None, None]:
    """Yield a function to call when one more of so many things is done, each of which takes long."""
    with bars(every_s=0) as move:
        numbers = count()

        def one_more() -> None:
            move(task, next(numbers), total)

        one_more()
        yield one_more


def tracked(items: Sequence[Item], task: str) -> Iterator[Item]:
    """Yield the items and show how many are done."""
    with bars() as move:
        for completed, item in enumerate(items):
            move(task, completed, len(items))
            yield item
