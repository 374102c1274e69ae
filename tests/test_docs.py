"""Pages are short enough to be read, and lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = {"recipes.md", "upstream_tables.md", "verification.md"}
PAGES = [p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in GENERATED]
PARAGRAPH, README = 90, 900  # words


def words(text: str) -> int:
    """Return how many words a text has; rules of tables and signs alone are none."""
    return len(re.findall(r"[^\s|]*\w[^\s|]*", text))


def paragraphs(text: str) -> list[str]:
    """Return the blocks of a page that are prose or lists; an item of a list is a paragraph."""
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose)
    return [b for b in blocks if not b.strip().startswith(("|", "#", "<", "!["))]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: p.name)
def test_paragraphs_are_short(page: Path):
    text = page.read_text(encoding="utf-8")
    assert page.name != "README.md" or words(text) <= README
    for paragraph in paragraphs(text):
        assert words(paragraph) <= PARAGRAPH, f"{words(paragraph)}: {paragraph[:300]}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_page_is_in_the_site():
    listed = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {p.name for p in PAGES} | GENERATED
