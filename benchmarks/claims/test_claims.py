"""Every figure of the pages has a claim, every claim's words are in its page, and the comparison can fail."""

import re
import shlex
from importlib.util import find_spec

import pytest

from benchmarks.claims.__main__ import PAGE, compare, judge, page
from benchmarks.claims.read import (
    ROOT,
    Quote,
    claims,
    definitions,
    page_text,
    pages,
    problems,
    seal,
    table,
    uncovered,
)
from telechat_moe.cli import build_parser

CLAIMS = claims()
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_quote_is_in_its_page():
    assert problems(CLAIMS) == []


@pytest.mark.parametrize("name", pages())
def test_every_figure_of_a_page_has_a_claim(name):
    assert uncovered(name, CLAIMS, definitions().get(name)) == []


def test_every_row_of_the_readmes_results_has_a_claim():
    rows = table("README.md", "| what | result | machine").splitlines()[2:]
    texts = [quote.text for claim in CLAIMS for quote in claim.quotes if quote.page == "README.md"]
    assert len(rows) >= 6
    assert [row for row in rows if not any(text in row for text in texts)] == []


def test_the_page_of_cards_is_written_from_the_file():
    assert PAGE.read_text(encoding="utf-8") == page(CLAIMS), (
        "run python -m benchmarks.claims --page"
    )
    assert [
        c.id for c in CLAIMS if c.status in ("verified", "compiled only") and not c.command
    ] == []


def programs(command: str) -> list[list[str]]:
    """Return the programs of a command line with their arguments; what a loop puts in is ``1``."""
    found = []
    for part in re.split(r"&&|\|\||;|\(|\)", re.sub(r"\$(\{.*?\}|\w+)", "1", command)):
        words = shlex.split(part.partition(" > ")[0])
        while words and (words[0] in ("do", "then") or re.match(r"[A-Z_]+=", words[0])):
            words = words[1:]
        if words and words[0] not in ("for", "done", "cd", "cp", "echo", "true", "test"):
            found.append(words)
    return found


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.command], ids=lambda c: c.id)
def test_a_command_can_be_pasted(claim):
    assert not re.search(r"\.\.\.|\b(RECIPE|FOLDER|FILE|PATH|DIR|SPACE|ID|N)\b", claim.command)
    found = programs(claim.command)
    assert found
    for program, *rest in found:
        if program == "telechat-moe":
            build_parser().parse_args(rest)
        elif program == "make":
            assert f" {rest[0]} " in re.findall(r"(?m)^\.PHONY:(.*)$", MAKEFILE)[0]
        elif rest[0] == "-m":
            assert program == "python"
            assert find_spec(rest[1]) is not None
        else:
            assert program in ("python", "sh")
            assert (ROOT / rest[0]).is_file()
        for word in rest:
            if word.startswith(("tests/", "benchmarks/", "docs/")):
                assert (ROOT / word).exists(), word


def test_an_edited_page_breaks_its_claim():
    (claim,) = [c for c in CLAIMS if c.id == "plan-105b"]
    quote = Quote("README.md", "search 35,629 layouts")
    changed = type(claim)("x", "x", "unverified", "x", (quote,))
    assert problems([changed]) == ["x: README.md does not say 'search 35,629 layouts'"]
    text = table("README.md", "| what | result | machine")
    sealed = Quote(
        "README.md", table="| what | result | machine", seal=seal(text.replace("5.9 %", "5.8 %"))
    )
    assert (
        "changed; measure it again"
        in problems([type(claim)("x", "x", "unverified", "x", (sealed,))])[0]
    )


@pytest.mark.parametrize(
    ("printed", "measured", "within", "good"),
    [
        ("5.9", 5.94, "printed", True),
        ("5.9", 5.96, "printed", False),
        ("35,628", 35628, "printed", True),
        ("35,628", 35629, "printed", False),
        ("2.1e-6", 1.9e-6, "at most", True),
        ("2.1e-6", 2.2e-6, "at most", False),
        ("2.1e-6", 2.14e-6, "printed", True),
        ("100", 104, "5 %", True),
        ("100", 106, "5 %", False),
    ],
)
def test_a_measured_number_is_judged_by_its_tolerance(printed, measured, within, good):
    assert judge(printed, measured, within) is good


def test_what_a_command_does_not_print_is_no_pass():
    quote = Quote("README.md", "gap 0", ("0",), ("gap: (\\d+)",))
    assert compare(quote, "gap: 0\ngap: 3") == [("0", 3.0, False)]  # the largest
    assert compare(quote, "nothing") == [("0", None, False)]


ACCURACY = (
    ("performance", r"logits (\S+) of", "tests/model/test_model_hf.py", r"LOGITS, .* = (\S+),"),
    ("performance", r"loss (\S+), every", "tests/model/test_model_hf.py", r"GRADIENT = \S+, (\S+),"),
    ("performance", r"gradient (\S+) \(", "tests/model/test_model_hf.py", r"GRADIENT = \S+, \S+, (\S+)"),
    ("performance", r"AdamW steps (\S+)\. ", "tests/model/test_training_hf.py", r"TRAINED = (\S+)"),
    ("upstream", r"at most (\S+) \(bound", "tests/interop/test_upstream_values.py", r"LOSS, .* = (\S+),"),
    ("upstream", r"each \| at most (\S+)", "tests/interop/test_upstream_values.py", r"GRADIENT = \S+, (\S+)"),
    ("tour", r"layouts are within (\S+) \(", "benchmarks/cluster/__main__.py", r"LATE = \S+, (\S+),"),
    ("tour", r"losses are within (\S+)\. ", "benchmarks/cluster/__main__.py", r"LATE = \S+, \S+, (\S+)"),
    ("align_layouts", r"are at most (\S+) of it", "tests/align/test_propagate.py", r"max\(ratios\) < (\S+)"),
)  # fmt: skip


@pytest.mark.parametrize(("page", "claimed", "file", "bound"), ACCURACY)
def test_bounds_of_the_accuracy_tests_are_at_most_ten_times_the_claims(page, claimed, file, bound):
    said = re.search(claimed, page_text(f"docs/{page}.md"))
    tested = re.search(bound, (ROOT / file).read_text(encoding="utf-8"))
    assert said
    assert tested
    assert float(said[1]) < float(tested[1]) <= 10.001 * float(said[1])
