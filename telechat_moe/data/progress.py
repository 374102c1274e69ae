"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """Show how far a few steps are, one after the other, on stderr if that is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        """Start the bar where there is a terminal."""
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def start(self, what: str, total: int | None, unit: str) -> None:
        """Begin a step of ``total`` units."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total, unit=unit)

    def advance(self, amount: int) -> None:
        """Say that ``amount`` more units are done."""
        if self._bar is not None:
            self._bar.advance(self._task, amount)
