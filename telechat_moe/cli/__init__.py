"""The command `telechat-moe <verb>`: parsing, printing, exit codes.

Each verb is a module with a `VERB` (`verb.py` is the frame); heavy imports stand inside its run function, so that
`telechat-moe --help` answers at once. May import everything but `benchmarks`. Begin with `verb.py` and `recipes.py`.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from telechat_moe import interruption

if TYPE_CHECKING:
    from telechat_moe.cli.command import COMMAND as COMMAND
    from telechat_moe.cli.command import build_parser as build_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program name; None: those of this process, which is the command and can be
            interrupted at any moment (:mod:`telechat_moe.interruption`).

    Returns:
        The exit code.
    """

    def work() -> int:
        if argv is None and not sys.warnoptions:
            warnings.simplefilter("ignore")  # NumPy's are for us: what a number means, a verb says
        from telechat_moe.cli.command import run

        return run(sys.argv[1:] if argv is None else argv)

    return interruption.run(work) if argv is None else work()


def __getattr__(name: str) -> Any:
    """Import what stands in `command.py` when it is asked for: `main` must run before all verbs are imported."""
    if name not in ("COMMAND", "build_parser"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from telechat_moe.cli import command

    return getattr(command, name)
