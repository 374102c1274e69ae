"""What all pages share: one template with its style, nothing from elsewhere."""

from html import escape
from pathlib import Path

TEMPLATE = Path(__file__).with_name("page.html")


def shell(title: str, heading: str, body: str) -> str:
    """Return a page without anything from elsewhere; ``heading`` and ``body`` are HTML."""
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in (("title", escape(title)), ("heading", heading), ("body", body)):
        text = text.replace("{{" + name + "}}", value)
    return text
