"""The whole command line: all verbs, and how an error becomes a line and an exit code."""

import os
import re
import sys
from collections.abc import Sequence

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
from telechat_moe.errors import TelechatMoeError, UsageError
from telechat_moe.interruption import advise

_HOME = re.compile(r"(?:--[\w-]+=)?(~(?:[\w.-]*/.*)?)")
"""An argument, or the value of an option after =, that begins with the home folder of a user."""
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
