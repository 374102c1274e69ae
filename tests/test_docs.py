"""Links of the pages lead somewhere, and every page is in the site."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
READMES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("benchmarks/**/*.md"))]


def prose(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"(?m)^#+ (.+)$", prose(page))
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda p: f"{p.parent.name}/{p.name}")
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", prose(page)):
        if target.startswith("http"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {p.name for p in PAGES}


def test_files_of_the_ideas_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("## Where each idea is implemented")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/*.]+(?:\.\w+|/))`", table)
    assert len(named) > 60
    folders = [ROOT, ROOT / "telechat_moe"]
    assert [
        path for path in named if not any(list(f.glob(path.rstrip("/"))) for f in folders)
    ] == []
