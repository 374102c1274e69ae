"""What is wrong with a recipe, and the error that carries all of it."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from telechat_moe.errors import BadInputError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, in terms of the file that the user wrote."""

    file: str
    """The recipe file, or ``--set a.b=c`` if the value came from the command line."""

    line: int
    """Line in that file, from 1. 0 where lines mean nothing (``--set``, a file that is missing)."""

    key: str
    """Dotted key, list items by their index from 0; empty if the file as a whole is meant."""

    found: str
    """What was found there."""

    expected: str
    """What would be right."""

    suggestion: str = ""
    """The nearest valid key or spelling; empty if nothing is near."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        text = f"{place}: {self.key + ': ' if self.key else ''}{self.found}; {self.expected}"
        return f"{text}; did you mean {self.suggestion!r}?" if self.suggestion else text


class RecipeError(BadInputError):
    """A recipe cannot be used; ``problems`` lists every reason, in the order of the file.

    Args:
        not_judged: Keys whose consequences were not judged, and why.
    """

    def __init__(
        self, problems: Sequence[Problem], not_judged: Mapping[str, str] | None = None
    ) -> None:
        self.problems: list[Problem] = sorted(problems, key=lambda p: (p.line == 0, p.line))
        self.not_judged = dict(not_judged or {})
        count, lines = len(self.problems), list(map(str, self.problems))
        lines += [f"not judged: {key}: {reason}" for key, reason in self.not_judged.items()]
        lines.append(f"{count} problem{'s' if count != 1 else ''}; nothing was started.")
        super().__init__("\n".join(lines))


class Missing:
    """What could not be judged, because values with problems of their own are missing from a recipe.

    Args:
        allowed: There are such values; else a missing attribute is an error of the program.

    Attributes:
        names: Names of the missing attributes that were read.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.names: set[str] = set()

    @contextmanager
    def skipped(self) -> Generator[None, None, None]:
        """End what is inside at the first missing attribute that it reads."""
        try:
            yield
        except AttributeError as error:
            if not self.allowed:
                raise
            self.names.add(error.name or "")

    def until(self, rule: Iterable[T]) -> Iterator[T]:
        """Yield what a rule yields, up to the first missing attribute that it reads."""
        with self.skipped():
            yield from rule


def label(path: Path) -> str:
    """Return a path as the user would type it."""
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)
