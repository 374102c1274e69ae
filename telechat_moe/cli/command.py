"""The whole command line: all verbs, and how an error becomes a line and an exit code."""

import os
import platform
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from telechat_moe import __version__
from telechat_moe.cli import (
    align,
    ckpt,
    convert,
    data,
    diagnose,
    dryrun,
    experts,
    launch,
    layouts,
    plan,
    plugin_path,
    recipes,
    report,
    run_sharded,
    sweep,
    train,
)
from telechat_moe.cli.verb import Verb, VerbParser
from telechat_moe.errors import UNEXPECTED, TelechatMoeError, UsageError
from telechat_moe.interruption import advise
from telechat_moe.versions import installed

_HOME = re.compile(r"(?:--[\w-]+=)?(~(?:[\w.-]*/.*)?)")
"""An argument, or the value of an option after =, that begins with the home folder of a user."""
ERROR_FILE = "telechat-moe-error.txt"
"""What is written to the working folder for whoever mends this program."""
COMMAND = Verb(
    name="telechat-moe",
    help="",
    description="Training recipes for TeleChat3-MoE-class models on MindSpore, from a laptop "
    "to thousands of NPUs.",
    examples="telechat-moe ls\ntelechat-moe check telechat3_moe/pretrain_tiny.yaml",
    exits={1: "a check failed"},
    subverbs=[
        *recipes.VERBS,
        data.VERB,
        train.VERB,
        launch.VERB,
        run_sharded.VERB,
        sweep.VERB,
        ckpt.VERB,
        convert.VERB,
        experts.VERB,
        diagnose.VERB,
        layouts.VERB,
        dryrun.VERB,
        align.VERB,
        plan.VERB,
        report.VERB,
        plugin_path.VERB,
    ],
)


def build_parser() -> VerbParser:
    """Return the parser of the whole command line."""
    parser = VerbParser(COMMAND, prog=COMMAND.name)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run one command; return the exit code."""
    os.environ.setdefault("GLOG_v", "3")  # MindSpore's own warnings; read when it is imported
    try:
        for word in argv:
            if any("\ud800" <= c <= "\udfff" for c in word):  # bytes that Python could not decode
                raise UsageError(f"the argument {word!a} is not UTF-8 text; rename what it names")
            if home := _HOME.fullmatch(word):
                raise UsageError(
                    f"the argument {word}: a shell puts no folder for ~ there, and this program would make one with "
                    f"that name; write the whole path, or ./{home[1]}"
                )
        args = build_parser().parse_args(argv)
        if args.after_interruption:
            advise(args.after_interruption)
        return int(args.run(args))
    except SystemExit as stop:  # argparse has printed help, the version or a usage error
        return stop.code if isinstance(stop.code, int) else 2
    except TelechatMoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe is gone; nothing more to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"error: {message}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # of this program, not of what it was given
        print(f"error: {_unexpected(error, argv)}", file=sys.stderr)
        return UNEXPECTED


def _unexpected(error: Exception, argv: Sequence[str]) -> str:
    """Write down what is needed to mend an error of this program; return the line that says so."""
    packages = ("mindspore", "mindformers", "numpy", "torch", "mindstudio-probe")
    versions = [f"{name} {number}" for name in packages if (number := installed(name))]
    lines = [
        f"telechat-moe {__version__}, Python {platform.python_version()}, {', '.join(versions)}",
        shlex.join(["telechat-moe", *argv]),
        "".join(traceback.format_exception(error)),
    ]
    kind = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    try:
        Path(ERROR_FILE).write_text("\n".join(lines), "utf-8", errors="backslashreplace")
        request = f"send {Path(ERROR_FILE).absolute()}, which says where"
    except OSError as full:
        print("\n".join(lines), file=sys.stderr)
        request = f"send the lines above ({ERROR_FILE} cannot be written: {full.strerror})"
    return f"an unexpected error of this program, not an answer: {kind}; {request}"
