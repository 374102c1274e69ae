"""Run a benchmark's command with the errors and exit codes of `telechat-moe`."""

import argparse
import sys
from collections.abc import Callable, Sequence

from telechat_moe.errors import TelechatMoeError


def new_parser(name: str, text: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m benchmarks.NAME``, whose texts keep their lines."""
    return argparse.ArgumentParser(
        f"python -m benchmarks.{name}",
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def answer(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse arguments, run the benchmark, and return its exit code: 2 wrong usage, 3 bad input.

    Args:
        argv: Arguments without the program name; those of the process if None.
    """
    try:
        return run(parser.parse_args(argv))
    except SystemExit as stop:  # argparse has printed help or a usage error
        return stop.code if isinstance(stop.code, int) else 2
    except TelechatMoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
