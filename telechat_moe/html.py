"""Build all HTML pages of the package: page with style sheet, table, bars, chart axes, escaping, embedded data.

Pages are self-contained: no address is fetched. Text is escaped everywhere except where it is :class:`Html`.
"""

import json
import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

STYLE = Path(__file__).with_suffix(".css")
_LONG = 48
"""Characters from which on a cell may break its words and gets a minimum width."""


class Html(str):
    """Text that is HTML already: it is not escaped."""


def html(value: object) -> Html:
    """Return a value as HTML: text escaped, numbers written out, lists with commas, None as a dash."""
    if isinstance(value, Html):
        return value
    if value is None:
        return Html("-")
    if isinstance(value, float):
        return Html(f"{value:.3g}")
    if isinstance(value, int):
        return Html(f"{value:,}")
    if isinstance(value, list):
        return Html(", ".join(map(html, value)))  # pyright: ignore[reportUnknownArgumentType]
    return Html(escape(str(value)))


def tag(name: str, content: object, kind: str = "") -> Html:
    """Return an element of a class ``kind`` around some content."""
    attribute = f" class={kind if kind.isidentifier() else repr(kind)}" if kind else ""
    return Html(f"<{name}{attribute}>{html(content)}</{name}>")


def code(text: str) -> Html:
    """Return text in the font of programs."""
    return tag("code", text)


def verdict(word: str) -> Html:
    """Return a verdict (``pass``, ``diverged``, ``not judged``...) in its colour."""
    return Html(f"<span class={word.replace(' ', '-')}>{escape(word)}</span>")


def page(title: str, body: Iterable[str], *, heading: str | None = None, wide: bool = False) -> str:
    """Return a whole page.

    Args:
        body: HTML below the heading.
        heading: The heading's HTML; None: the title.
        wide: Whether the page takes 1400 pixels instead of 1080.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n"
        f"<body{' class=wide' if wide else ''}>\n"
        f"<h1>{escape(title) if heading is None else heading}</h1>\n{''.join(body)}\n</body>\n</html>\n"
    )


def script(data: object, source: str) -> Html:
    """Return a script and the data that it reads, as JSON in the element ``data``."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return Html(
        f'<script id="data" type="application/json">{text}</script>\n<script>\n{source}</script>'
    )


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    kinds: Mapping[int, str] | None = None,
    limit: int | None = None,
    total: int | None = None,
) -> Html:
    """Return a table.

    Args:
        titles: Titles of the columns; one that ends in a space aligns its column to the right. Empty: no head.
        rows: Cells as :func:`html` takes them.
        kinds: Class of a row, by its number.
        limit: Rows that are shown, with a line that says how many follow; None: all.
        total: How many rows there are in all, where ``rows`` lacks some.
    """
    right = [title.endswith(" ") for title in titles]
    head = "".join(_cell("th", t.strip(), r) for t, r in zip(titles, right, strict=True))
    shown = rows[:limit]
    lines: list[str] = []
    for number, row in enumerate(shown):
        kind = (kinds or {}).get(number)
        sides = right or [False] * len(row)
        cells = "".join(_cell("td", c, r) for c, r in zip(row, sides, strict=True))
        lines.append(f"<tr{f' class={kind}' if kind else ''}>{cells}</tr>")
    left = (len(rows) if total is None else total) - len(shown)
    remainder = f"<p class=soft>and {left:,} more</p>" if left > 0 else ""
    top = f"<thead><tr>{head}</tr></thead>" if titles else ""
    return Html(
        f"<div class=scroll><table>{top}<tbody>{''.join(lines)}</tbody></table></div>{remainder}"
    )


def _cell(name: str, value: object, right: bool) -> str:
    is_long = name == "td" and not isinstance(value, Html) and len(str(value)) > _LONG
    return tag(name, value, "n" if right else "long" if is_long else "")


def items(texts: Iterable[object]) -> Html:
    """Return a list with a bullet for each text."""
    return tag("ul", Html("".join(tag("li", text) for text in texts)))


def facts(rows: Iterable[tuple[str, object]]) -> Html:
    """Return a table of names and values."""
    return table((), [(tag("span", name, "soft"), value) for name, value in rows])


def details(summary: str, content: Html) -> Html:
    """Return content that is shown on a click."""
    return Html(f"<details><summary>{escape(summary)}</summary>{content}</details>")


def keys(entries: Iterable[tuple[str, str]], note: str = "") -> Html:
    """Return the legend of a drawing: CSS colours and what each means, and a note."""
    spans = "".join(f"<span><i style='background:{c}'></i>{escape(t)}</span>" for c, t in entries)
    return tag("p", Html(spans + (tag("span", note, "soft") if note else "")), "keys")


def bar(share: float, kind: str = "", text: object = "") -> Html:
    """Return a horizontal bar of a share (0 to 1) of its track, and the text after it."""
    fill = f"<div class='bar {kind}' style='width:{100 * share:.1f}%'></div>"
    return Html(f"<span class=meter><span class=track>{fill}</span> {html(text)}</span>")


def svg(
    width: float, height: float, parts: Iterable[str], label: str, *, full: bool = False
) -> Html:
    """Return a drawing; ``full``: as wide as the page."""
    kind = "class=full" if full else f"width={width:g}"
    return Html(
        f"<svg {kind} viewBox='0 0 {width:g} {height:g}' role=img aria-label='{escape(label)}'>{''.join(parts)}</svg>"
    )


def png(width: int, height: int, rgba: bytes) -> bytes:
    """Return a picture as a PNG file; ``rgba`` are its pixels row by row, four bytes each."""

    def chunk(name: bytes, data: bytes) -> bytes:
        content = name + data
        return struct.pack(">I", len(data)) + content + struct.pack(">I", zlib.crc32(content))

    step = 4 * width
    rows = b"".join(
        b"\0" + rgba[offset : offset + step] for offset in range(0, step * height, step)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def picture(data: bytes, x: float, y: float, width: float, height: float) -> str:
    """Return an element of a drawing that shows a PNG file with sharp pixels."""
    place = f"x={x:g} y={y:g} width={width:g} height={height:g} preserveAspectRatio=none"
    source = f"data:image/png;base64,{b64encode(data).decode()}"
    return f"<image {place} style='image-rendering:pixelated' href='{source}'/>"


def figures(drawings: Iterable[tuple[Html, object]]) -> Html:
    """Return drawings side by side, each with a caption."""
    parts = (
        tag("figure", Html(f"{drawing}{tag('figcaption', caption)}"))
        for drawing, caption in drawings
    )
    return Html(f"<div class=figures>{''.join(parts)}</div>")


# ---------------------------------------------------------------------------------------- charts


def round_step(span: float, limit: int) -> float:
    """Return 1, 2 or 5 times a power of ten: the distance of at most about ``limit`` ticks over a span above 0."""
    rough = span / limit
    power = 10.0 ** math.floor(math.log10(rough))
    return power * min((s for s in (1, 2, 5, 10) if s * power >= rough), default=10)


def ticks(low: float, high: float, limit: int = 6, *, outward: bool = False) -> list[float]:
    """Return round numbers between two values; ``outward``: from at most the low to at least the high one."""
    step = round_step(max(high - low, 1e-9 * max(abs(high), 1e-9)), limit)
    if outward:
        first = math.floor(low / step)
        last = max(math.ceil(high / step), first + 1)
    else:
        first, last = math.ceil(low / step), math.floor(high / step + 1e-9)
    return [float(f"{step * i:.12g}") for i in range(first, last + 1)]


def decimals(values: Sequence[float]) -> int:
    """Return how many digits after the point tell ticks from each other."""
    step = values[1] - values[0] if len(values) > 1 else 1.0
    return max(0, -math.floor(math.log10(step) + 1e-9))


@dataclass(frozen=True)
class ChartAxes:
    """Two linear axes: they map values to the pixels of a drawing, and draw lines and points there.

    Attributes:
        across: Lowest and highest value of the horizontal axis.
        up: Those of the vertical axis; what is beyond is drawn at the edge.
    """

    across: tuple[float, float]
    up: tuple[float, float]
    width: int = 1040
    height: int = 300
    left: int = 64
    right: int = 26
    top: int = 24
    bottom: int = 24

    def x(self, value: float) -> float:
        """Return the pixel of a value on the horizontal axis."""
        low, high = self.across
        return self.left + (value - low) / ((high - low) or 1) * (
            self.width - self.left - self.right
        )

    def y(self, value: float) -> float:
        """Return the pixel of a value on the vertical axis."""
        low, high = self.up
        share = (high - min(max(value, low), high)) / ((high - low) or 1)
        return self.top + share * (self.height - self.top - self.bottom)

    def grid(
        self,
        across: Sequence[float] | None = None,
        up: Sequence[tuple[float, str]] | None = None,
        *,
        labels: tuple[str, str] = ("", ""),
    ) -> str:
        """Return lines and numbers of both axes.

        Args:
            across: Ticks of the horizontal axis; None: round numbers.
            up: Ticks of the vertical axis and what is written at each; None: round numbers.
            labels: Names of the horizontal and of the vertical axis; this one stands above the drawing's lines.
        """
        across = ticks(*self.across, 12) if across is None else across
        if up is None:
            values = ticks(*self.up)
            up = [(v, f"{v:.{decimals(values)}f}") for v in values]
        end, low = self.width - self.right, self.height - self.bottom
        parts = [
            f"<line class=grid x1={self.left} x2={end} y1={self.y(v):.1f} y2={self.y(v):.1f} />"
            f"<text x={self.left - 8} y={self.y(v) + 4:.1f} text-anchor=end>{label}</text>"
            for v, label in up
        ]
        digits = decimals(across)
        parts += [
            f"<line class=grid x1={self.x(v):.1f} x2={self.x(v):.1f} y1={self.top} y2={low} />"
            f"<text x={self.x(v):.1f} y={low + 18} text-anchor=middle>{v:,.{digits}f}</text>"
            for v in across
        ]
        name, other = map(escape, labels)
        parts.append(f"<text x={end} y={self.top - 9} text-anchor=end>{other}</text>")
        parts.append(
            f"<text x={(self.left + end) / 2:g} y={self.height - 4} text-anchor=middle>{name}</text>"
        )
        return "".join(parts)

    def line(self, xs: Iterable[float], ys: Iterable[float], kind: str, width: float = 1.5) -> str:
        """Return a line through points; it breaks where a value is not finite."""
        parts: list[str] = []
        pen = "M"
        for x, y in zip(xs, ys, strict=True):
            good = math.isfinite(y)
            if good:
                parts.append(f"{pen}{self.x(x):.1f} {self.y(y):.1f}")
            pen = "L" if good else "M"
        return f"<path class={kind} stroke-width={width} d='{''.join(parts)}'/>"

    def area(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], kind: str
    ) -> str:
        """Return the area between two lines of finite values."""
        ahead = [f"{self.x(x):.1f} {self.y(v):.1f}" for x, v in zip(xs, high, strict=True)]
        reverse = [f"{self.x(x):.1f} {self.y(v):.1f}" for x, v in zip(xs, low, strict=True)]
        corners = "L".join([*ahead, *reverse[::-1]])
        return f"<path class={kind} d='M{corners}Z'/>" if len(ahead) > 1 else ""

    def dot(self, x: float, y: float, kind: str, radius: float, tip: str = "") -> str:
        """Return a point; the pointer over it shows the tip."""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        return f"<circle class='{kind}' cx={self.x(x):.1f} cy={self.y(y):.1f} r={radius}>{title}</circle>"

    def draw(self, parts: Iterable[str], label: str) -> Html:
        """Return the drawing of these elements, as wide as the page."""
        return svg(self.width, self.height, parts, label, full=True)


def front_chart(
    front: Sequence[tuple[float, float, str]],
    others: Sequence[tuple[float, float, str]],
    labels: tuple[str, str],
) -> Html:
    """Return a chart of points (x, y, tip): those of a front numbered and joined by a line, the others grey."""
    points = [*front, *others]
    if not points:
        return Html("")
    across = ticks(min(p[0] for p in points), max(p[0] for p in points), 8, outward=True)
    up = ticks(min(p[1] for p in points), max(p[1] for p in points), 5, outward=True)
    axes = ChartAxes((across[0], across[-1]), (up[0], up[-1]), 900, 420, left=80, bottom=44)
    labelled = [(v, f"{v:,.{decimals(up)}f}") for v in up]
    parts = [axes.grid(across, labelled, labels=labels)]
    parts += [axes.dot(x, y, "other", 3, tip) for x, y, tip in others]
    parts.append(axes.line([p[0] for p in front], [p[1] for p in front], "target"))
    for number, (x, y, tip) in enumerate(front, 1):
        parts.append(axes.dot(x, y, "chosen", 5, tip))
        parts.append(
            f"<text class=name x={axes.x(x):.1f} y={axes.y(y) + 19:.1f} text-anchor=middle>{number}</text>"
        )
    return axes.draw(parts, f"{labels[1]} over {labels[0]}")
