"""The command `telechat-moe <verb>`.

Each verb is a module with `register(subparsers)`; heavy imports stand inside its run function, so
that `telechat-moe --help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from telechat_moe import __version__
from telechat_moe.cli import (
    align,
    ckpt,
    convert,
    data,
    dryrun,
    launch,
    layouts,
    plan,
    plugin_path,
    recipes,
    run_sharded,
    train,
    upstream,
)
from telechat_moe.errors import TelechatMoeError

VERBS = (
    recipes,
    data,
    train,
    launch,
    run_sharded,
    ckpt,
    convert,
    layouts,
    dryrun,
    upstream,
    align,
    plan,
    plugin_path,
)

EPILOG = """\
example:
  telechat-moe ls
  telechat-moe check telechat3_moe/pretrain_tiny.yaml

exit codes: 0 ok; 1 a check failed; 2 wrong usage; 3 bad input; 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="telechat-moe",
        description="Training recipes for TeleChat3-MoE-class models on MindSpore, from a laptop "
        "to thousands of NPUs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.register(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program name; those of the process if None.

    Returns:
        The exit code.
    """
    try:
        args = build_parser().parse_args(argv)
        return int(args.run(args))
    except SystemExit as stop:  # argparse has printed help, the version or a usage error
        return stop.code if isinstance(stop.code, int) else 2
    except TelechatMoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError) as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 3
    except BrokenPipeError:  # the reader of a pipe is gone; nothing more to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
