"""Self-contained HTML pages: text, figures, tables with bars, and code, for light and dark screens and for phones.

A page is a title, a lead paragraph and sections; a section is a title and parts:

    from diffvision.analysis import figures
    from diffvision.analysis.page import Code, Picture, Row, Section, Table, Text, bars, html_page

    accuracy = {"CLIP": [0.94, 0.96], "DiffCLIP": [0.93, 0.97]}  # one value per seed
    table = Table(["", *accuracy], [["zero-shot top-1, %", *bars(accuracy, factor=100, top=100)]])
    curves = Picture(figures.run_curves(metrics), alt="Loss of both models over steps", caption="Training loss.")
    sections = [
        Section("Results", [Text("Two seeds of each, `--seeds 2`."), table]),
        Section("Training", [Row([curves, other])]),  # next to each other where there is room
        Section("Next", [Code("diffvision inspect runs/a/last.ckpt")]),
    ]
    Path("page.html").write_text(html_page("CLIP and DiffCLIP", "One recipe, two models.", sections), encoding="utf-8")

All text is escaped; in `Text`, captions and notes, words between backticks are set as code. Figures are drawn as SVG
whose text has the colour of the page's text. Models have their colours of `figures.colours_of` in heads and bars.
"""

from __future__ import annotations

import html
import io
import re
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Protocol

from diffvision.analysis.figures.style import INK, colours_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PIXELS = 96  # of CSS in an inch


class Part(Protocol):
    """What a section is made of."""

    def html(self) -> str:
        """Return the part as HTML."""


@dataclass(frozen=True)
class Text:
    """A paragraph; words between backticks are set as code."""

    text: str

    def html(self) -> str:
        """Return the paragraph as HTML."""
        return f"<p>{_marked(self.text)}</p>\n"


@dataclass(frozen=True)
class Code:
    """Lines of code or output; `copied` gives them a button that copies them."""

    text: str
    copied: bool = True

    def html(self) -> str:
        """Return the lines as HTML."""
        button = '<button type="button" class="copy" hidden>Copy</button>' if self.copied else ""
        return f'<div class="code">{button}<pre><code>{html.escape(self.text)}</code></pre></div>\n'


@dataclass(frozen=True)
class Picture:
    """A figure with a caption, and what it shows in words for those who do not see it.

    Attributes:
        figure: of `diffvision.analysis.figures`, or any other of matplotlib.
        alt: what is seen.
        caption: below the figure.
        most: of the figure's size in inches, how much larger it may be shown.
    """

    figure: Figure
    alt: str
    caption: str = ""
    most: float = 1.25

    def html(self) -> str:
        """Return the figure as HTML, with the drawing in it."""
        width = self.figure.get_figwidth() * _PIXELS
        # Never so small that its text cannot be read: on a phone a wide figure is scrolled.
        size = f"max-width:{self.most * width:.0f}px;min-width:min({0.68 * width:.0f}px,60rem)"
        caption = f"<figcaption>{_marked(self.caption)}</figcaption>" if self.caption else ""
        drawing = f'<div class="drawing" style="{size}">{_svg(self.figure, self.alt)}</div>'
        return f'<figure><div class="scroll">{drawing}</div>{caption}</figure>\n'


@dataclass(frozen=True)
class Row:
    """Parts next to each other where there is room, and below each other where there is not.

    Attributes:
        parts: what is shown.
        least: the width that a part has at least, in rem (16 pixels); two of 19 or three of 17 fill the page.
    """

    parts: Sequence[Part]
    least: int = 19

    def html(self) -> str:
        """Return the row as HTML."""
        cells = "".join(f"<div>{part.html()}</div>" for part in self.parts)
        return f'<div class="row" style="--least:{self.least}rem">{cells}</div>\n'


def _joined(parts: Iterable[Part | Section]) -> str:
    return "".join(part.html() for part in parts)


@dataclass(frozen=True)
class Folded:
    """Parts that are shown after a click on their title."""

    title: str
    parts: Sequence[Part]

    def html(self) -> str:
        """Return the parts as HTML."""
        return f"<details><summary>{html.escape(self.title)}</summary>\n{_joined(self.parts)}</details>\n"


@dataclass(frozen=True)
class Bar:
    """A cell of a table: a number, with a bar below it and a dot for each value if there are several.

    Attributes:
        text: the number as it is written.
        values: one per seed; the bar is as long as their mean.
        top: the value of a bar as wide as the cell.
        colour: of the bar.
    """

    text: str
    values: Sequence[float]
    top: float
    colour: str

    def html(self) -> str:
        """Return the content of the cell as HTML."""
        dots = self.values if len(self.values) > 1 else []
        marks = "".join(f'<i style="left:{self._percent(value):.1f}%"></i>' for value in dots)
        length = self._percent(statistics.mean(self.values)) if self.values else 0.0
        fill = f'<b style="width:{length:.1f}%;background:{self.colour}"></b>'
        return f'{html.escape(self.text)}<span class="track" aria-hidden="true">{fill}{marks}</span>'

    def _percent(self, value: float) -> float:
        return 100 * min(max(value / self.top, 0.0), 1.0) if self.top > 0 else 0.0


@dataclass(frozen=True)
class Table:
    """A table; a row of one text is a heading of the rows below it.

    Attributes:
        head: of the columns; names of models get a mark in their colour, see `models`.
        rows: cells, texts or `Bar`; the first is the head of the row.
        note: below the table.
        models: names in the head that are models'; their order gives the colours. None takes all but the first.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | Bar]]
    note: str = ""
    models: Sequence[str] | None = None

    def html(self) -> str:
        """Return the table as HTML; a wide one is scrolled."""
        colours = colours_of(self.head[1:] if self.models is None else self.models)
        head = "".join(f'<th scope="col">{_swatch(colours.get(name))}{html.escape(name)}</th>' for name in self.head)
        rows = "".join(self._row(row) for row in self.rows)
        note = f'<p class="note">{_marked(self.note)}</p>\n' if self.note else ""
        return (
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n{note}'
        )

    def _row(self, row: Sequence[str | Bar]) -> str:
        first, *cells = row
        if not cells:
            return f'<tr class="group"><th scope="rowgroup" colspan="{len(self.head)}">{_cell(first)}</th></tr>\n'
        return f'<tr><th scope="row">{_cell(first)}</th>{"".join(f"<td>{_cell(cell)}</td>" for cell in cells)}</tr>\n'


@dataclass(frozen=True)
class Section:
    """A title and parts."""

    title: str
    parts: Sequence[Part]

    def html(self) -> str:
        """Return the section as HTML."""
        return f"<section><h2>{html.escape(self.title)}</h2>\n{_joined(self.parts)}</section>\n"


def html_page(title: str, lead: str, sections: Iterable[Section], foot: str = "") -> str:
    """Return one HTML page that refers to no other file.

    Args:
        title: of the page.
        lead: the paragraph below the title: what is shown, and what came of it.
        sections: the content.
        foot: the last line, such as how and when the page was made.
    """
    files = resources.files("diffvision.analysis")
    style = (files / "page.css").read_text(encoding="utf-8")
    script = (files / "page.js").read_text(encoding="utf-8")
    body = _joined(sections)
    last = f"<footer>{_marked(foot)}</footer>\n" if foot else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header><h1>{html.escape(title)}</h1>
<p class="lead">{_marked(lead)}</p></header>
{body}{last}</main>
<script>
{script}</script>
</body>
</html>
"""


def bars(
    values: Mapping[str, Sequence[float]], *, factor: float = 1, digits: int = 1, top: float | None = None
) -> list[Bar]:
    """Return the cells of a row: for each model its mean, over several seeds the spread, and a bar in its colour.

    Args:
        values: {model: one value per seed}; a model without values has an empty cell.
        factor: 100 shows fractions in percent.
        digits: decimals.
        top: the number, after the factor, of a bar as wide as its cell; None takes the largest of the row.
    """
    scaled = {model: [factor * value for value in of_model] for model, of_model in values.items()}
    largest = max((value for of_model in scaled.values() for value in of_model), default=0.0)
    colours = colours_of(values)
    return [
        Bar(spread(of_model, digits) if of_model else "–", of_model, largest if top is None else top, colours[model])
        for model, of_model in scaled.items()
    ]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean, followed by the standard deviation if there are several values."""
    mean = f"{statistics.mean(values):,.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else mean


def _marked(text: str) -> str:
    """Return a text as HTML, with words between backticks set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _swatch(colour: str | None) -> str:
    return f'<span class="swatch" style="background:{colour}"></span>' if colour else ""


def _cell(cell: str | Bar) -> str:
    return cell.html() if isinstance(cell, Bar) else _marked(cell)


# ---- figures -------------------------------------------------------------------------------------------------------


def _svg(figure: Figure, alt: str) -> str:
    """Return a figure as an SVG element: a transparent ground, and text in the colour and font of the page."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "diffvision"}):
        figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None})
    drawn = buffer.getvalue()
    box = re.search(r'viewBox="([^"]+)"', drawn)
    body = drawn[drawn.index("</metadata>") + len("</metadata>") : drawn.rindex("</svg>")]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;\"]*;?", "", body)
    body = re.sub(r"(font: (?:\w+ )*[\d.]+px) [^;\"]*", r"\1 system-ui, sans-serif", body)
    body = re.sub(re.escape(INK), "currentColor", body, flags=re.IGNORECASE)
    body = _unique_ids(body)
    assert box is not None
    return f'<svg role="img" aria-label="{html.escape(alt)}" viewBox="{box[1]}">{body}</svg>'


def _unique_ids(body: str) -> str:
    """Leave out ids that nothing refers to; the others get a prefix, so that no two figures of a page share them."""
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    prefix = f"f{zlib.crc32(body.encode()):08x}-"
    body = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", body)
    return re.sub(r'(href="#|url\(#)', rf"\1{prefix}", body)
