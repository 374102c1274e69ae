"""The frame of every verb: name, arguments, help text and the function that runs it."""

import argparse
import difflib
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NoReturn

from telechat_moe.cli.arguments import Add, add_json, add_overrides, arg
from telechat_moe.errors import UNEXPECTED

WIDTH = 110
EXITS = {
    0: "ok",
    2: "wrong usage",
    3: "bad input",
    UNEXPECTED: "an error of this program",
    130: "interrupted",
}
"""Exit codes that mean the same in every verb, unless it says more."""


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One verb of the command line, or a group of sub-verbs."""

    name: str

    help: str
    """Line in the list of verbs."""

    description: str = ""
    """First sentence of the verb's help; empty: `help` as a sentence."""

    notes: str | Callable[[], str] = ""
    """Text after the options, a screen at most; details belong into docs. A function is called when the help is printed."""

    examples: str
    """One or two command lines."""

    exits: Mapping[int, str] = field(default_factory=dict[int, str])
    """Exit codes and their meaning, beside those of `EXITS`."""

    after_interruption: str = ""
    """Advice that is printed after Ctrl-C."""

    json_keys: str = ""
    """Keys that `--json`, an option of every verb without sub-verbs, writes."""

    recipe: bool = False
    """Whether the first argument is the name or file of a recipe."""

    overrides: str | None = None
    """Help of `--set`; None: the verb has no `--set`."""

    arguments: Sequence[Add] = ()
    """The verb's own."""

    run: Callable[[argparse.Namespace], int] | None = None
    """Runs it and returns the exit code."""

    subverbs: Sequence["Verb"] = ()

    default: str = ""
    """The sub-verb that is meant where the first word is a file or folder."""

    removed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Sub-verbs of earlier versions, and what replaces each."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add all arguments of the verb to a parser."""
        if self.recipe:
            arg("RECIPE", "shipped recipe name or YAML file")(parser)
        for add in self.arguments:
            add(parser)
        if self.overrides is not None:
            add_overrides(parser, self.overrides)
        if self.run is not None:
            add_json(parser)
            parser.set_defaults(run=self.run, after_interruption=self.after_interruption)
            return
        names = parser.add_subparsers(required=True, metavar="VERB", parser_class=VerbParser)
        for verb in self.subverbs:
            names.add_parser(verb.name, help=verb.help, verb=verb)

    def first_sentence(self) -> str:
        """Return the first sentence of the verb's help."""
        return self.description or f"{self.help[0].upper()}{self.help[1:]}."

    def epilog(self) -> str:
        """Return the text of the help after the options: notes, examples, JSON keys and exit codes."""
        notes = self.notes if isinstance(self.notes, str) else self.notes()
        examples = "example:\n" + textwrap.indent(textwrap.dedent(self.examples).strip("\n"), "  ")
        exits = sorted({**EXITS, **self.exits}.items())
        codes = "; ".join(f"{code} {says}" for code, says in exits)
        keys = f"--json keys: {self.json_keys}" if self.json_keys else ""
        texts = [*map(_filled, notes.strip("\n").split("\n\n")), examples]
        return "\n\n".join(filter(None, [*texts, _filled(keys), _filled(f"exit codes: {codes}")]))


def _filled(text: str) -> str:
    """Return a paragraph in the terminal's width; one with indented lines, such as a table, as it is."""
    if "\n " in f"\n{text}":
        return text
    width = min(WIDTH, get_terminal_size().columns - 2)
    return textwrap.fill(text, width, break_on_hyphens=False)


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb; it puts the end of its help together when the help is printed."""

    def __init__(self, verb: Verb, **options: Any) -> None:
        formatter, text = argparse.RawDescriptionHelpFormatter, _filled(verb.first_sentence())
        super().__init__(description=text, formatter_class=formatter, **options)
        self.verb = verb
        verb.add_arguments(self)

    def format_help(self) -> str:
        """Return the help."""
        self.epilog = self.verb.epilog()
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Refuse here what is left over; argparse would show the usage of the whole command, not of the verb."""
        named = args and args[0] in [verb.name for verb in self.verb.subverbs]
        if self.verb.default and args and not named and Path(args[0]).exists():
            args = [self.verb.default, *args]
        elif args and args[0] in self.verb.removed:
            self.error(f"{args[0]} was removed: {self.verb.removed[args[0]]}")
        parsed, extra = super().parse_known_args(args, namespace)
        if extra:
            suggestion = _suggestion(extra[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(extra)}{suggestion}")
        return parsed, extra

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _suggestion(str(value), map(str, action.choices or ()))
            error.message += "; nor is it a file or folder" if self.verb.default else ""
            raise

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong; end with exit code 2."""
        super().error(f"{message}\n`{self.prog} --help` explains all arguments.")


def _suggestion(word: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(names), 1)
    return f"; did you mean {matches[0]}?" if matches else ""
