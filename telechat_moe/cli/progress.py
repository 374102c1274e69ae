"""Progress bars on standard error, where that is a terminal."""

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from telechat_moe.units import size_text

Item = TypeVar("Item")
Move = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done and how much there is (None: not known)."""


@contextmanager
def bars(*, in_bytes: bool = False) -> Generator[Move | None, None, None]:
    """Yield a function that moves a bar for each thing that is done; None where nobody looks.

    Args:
        in_bytes: The numbers are bytes; else things.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    what = progress.TextColumn("{task.description}"), progress.BarColumn()
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
        *what,
        *count,
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        tasks: dict[str, Any] = {}

        def move(what: str, done: int, total: int | None) -> None:
            if what not in tasks:  # what was done by an earlier run does not count for the speed
                tasks[what] = bar.add_task(what, completed=done, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield move


@contextmanager
def bar(what: str) -> Generator[Callable[[int, int], None] | None, None, None]:
    """Yield a function that moves one bar; None where nobody looks."""
    with bars() as move:
        yield None if move is None else lambda done, total: move(what, done, total)


@contextmanager
def counted(what: str, total: int) -> Generator[Callable[[], None], None, None]:
    """Yield a function to call when one more of so many things is done."""
    with bars() as move:
        done = count()

        def one_more() -> None:
            if move is not None:
                move(what, next(done), total)

        one_more()
        yield one_more


def tracked(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield the items and show how many are done."""
    with bars() as move:
        for done, item in enumerate(items):
            if move is not None:
                move(what, done, len(items))
            yield item
