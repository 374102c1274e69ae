"""Arguments that several verbs take."""

import argparse


def add_overrides(
    parser: argparse.ArgumentParser, help_text: str = "override a value of the recipe"
) -> None:
    """Let a verb take ``--set KEY=VALUE``, any number of times, as ``overrides``."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=help_text
    )


def add_documents(parser: argparse.ArgumentParser) -> None:
    """Let a verb take ``--documents FILE``, the lengths of documents that attention stays in."""
    parser.add_argument(
        "--documents",
        metavar="FILE",
        help="attention stays in documents of these lengths: an .idx, or a number a line",
    )
