"""The kit of HTML pages: nothing breaks out of it, nothing is fetched, axes have round numbers."""

import re
import struct
import zlib
from html.parser import HTMLParser

import pytest

from telechat_moe.html import (
    STYLE,
    ChartAxes,
    Html,
    bar,
    figures,
    front_chart,
    html,
    page,
    picture,
    png,
    round_step,
    script,
    table,
    ticks,
)

EVIL = "</script><b onload='x'>&"


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "path", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_text_cannot_leave_its_cell():
    body = [table([EVIL], [[EVIL], [[EVIL, None]]]), script({EVIL: 1}, "let x = 1 < 2;")]
    body.append(front_chart([(1.0, 2.0, EVIL), (2.0, 1.0, EVIL)], [], (EVIL, EVIL)))
    found = Tags(page(EVIL, body))
    assert found.open == []
    assert not [t for t, a in found.tags if t == "b" or "onload" in a]
    assert sum(EVIL in word for word in found.words) >= 6
    assert not [a for _, a in found.tags if {"src", "href"} & a.keys()]


def test_cells():
    assert html(None) == "-"
    assert html(1234567) == "1,234,567"
    assert html(0.123456) == "0.123"
    assert html(["a<", 2]) == "a&lt;, 2"
    assert html(Html("<b>x</b>")) == "<b>x</b>"
    text = table(["name", "size "], [["x", 1], ["y" * 60, 2], ["z", 3]], kinds={1: "lit"}, limit=2)
    assert "<th>name</th><th class=n>size</th>" in text
    assert f"<tr class=lit><td class=long>{'y' * 60}</td><td class=n>2</td></tr>" in text
    assert ">z<" not in text
    assert "and 1 more" in text


@pytest.mark.parametrize(
    ("low", "high", "outward", "expected"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (0.13, 0.94, True, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3.0, 4.0, False, [-2, 0, 2, 4]),
        (5.0, 5.0, True, [5.0, 5.000000001]),
    ],
)
def test_ticks(low: float, high: float, outward: bool, expected: list[float]):
    assert ticks(low, high, outward=outward) == expected
    assert round_step(10.0, 6) == 2.0


def test_axes_map_and_break_lines():
    axes = ChartAxes((0.0, 10.0), (0.0, 1.0), 100, 100, left=10, right=10, top=10, bottom=10)
    assert (axes.x(0.0), axes.x(10.0), axes.y(0.0), axes.y(1.0)) == (10, 90, 90, 10)
    assert axes.y(7.0) == 10
    path = axes.line([0, 5, 10], [0.0, float("nan"), 1.0], "base")
    assert "d='M10.0 90.0M90.0 10.0'" in path


def test_the_name_of_an_axis_lies_on_no_curve():
    axes = ChartAxes((0.0, 10.0), (0.0, 1.0), height=150)
    (name,) = re.findall(
        r"<text x=[\d.]+ y=(-?[\d.]+) [^>]*>seconds<", axes.grid(labels=("", "seconds"))
    )
    assert 10 <= float(name) < axes.y(1.0)  # above the highest point, with room for its letters


def test_a_bar_and_its_text_stay_on_one_line():
    style = STYLE.read_text()
    shown = bar(0.5, text="320.00 MiB certain")
    assert shown.startswith("<span class=meter>")
    assert shown.endswith("320.00 MiB certain</span>")
    assert ".meter { white-space: nowrap; }" in style


def test_png_holds_its_pixels():
    """Read back with the format's own rules: chunks with checksums, rows with a filter byte."""
    rgba = bytes(range(2 * 3 * 4))
    data = png(2, 3, rgba)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length :][:4])[0] == zlib.crc32(name + content)
        chunks[name] = content
        at += 12 + length
    assert chunks[b"IHDR"] == struct.pack(">IIBBBBB", 2, 3, 8, 6, 0, 0, 0)
    rows = zlib.decompress(chunks[b"IDAT"])
    assert [rows[i * 9] for i in range(3)] == [0, 0, 0]
    assert b"".join(rows[i * 9 + 1 : i * 9 + 9] for i in range(3)) == rgba
    assert "data:image/png;base64," in picture(data, 0, 0, 20, 30)


def test_figures():
    assert "<figcaption>a &lt; b</figcaption>" in figures([(Html("<svg></svg>"), "a < b")])
