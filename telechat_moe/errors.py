"""Errors that a user can act on, and the exit code of each.

Exit codes of every verb: 0 ok, 1 a check failed, 2 wrong usage, 3 bad input, 5 an error of this program itself. A verb
that has more codes documents them in its ``--help``.
"""

UNEXPECTED = 5
"""Exit code of an error that nobody foresaw; never that of an answer."""

LONGEST = 2_000
"""Characters of a line of a message."""


class TelechatMoeError(Exception):
    """Base of all errors that the command line prints without a traceback.

    The message says what was found, where, what was expected and what to do.
    """

    exit_code = 1

    def __str__(self) -> str:
        """Return the message; what it quotes of a file is printable and not endless."""
        return "\n".join(map(_printable, super().__str__().split("\n")))


def _printable(line: str) -> str:
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


class UsageError(TelechatMoeError):
    """A command was called in a way that cannot be carried out (exit code 2)."""

    exit_code = 2


class BadInputError(TelechatMoeError):
    """A file or value that was read is broken or does not fit (exit code 3)."""

    exit_code = 3


class CheckFailedError(TelechatMoeError):
    """Everything ran, and the answer is no (exit code 1)."""

    exit_code = 1
