"""Self-contained HTML pages: text, figures, tables with bars, and code, for light and dark screens and for phones.

A page is a title, a lead paragraph and sections; a section is a title and parts:

    from diffvision.analysis import figures
    from diffvision.analysis.html_page import Code, Picture, Row, Section, Table, Text, bars, html_page

    accuracy = {"CLIP": [0.94, 0.96], "DiffCLIP": [0.93, 0.97]}  # one value per seed
    table = Table(["", *accuracy], [["zero-shot top-1, %", *bars(accuracy, factor=100, top=100)]])
    curves = Picture(figures.run_curves(metrics), alt="Loss of both models over steps", caption="Training loss.")
    sections = [
        Section("Results", [Text("Two seeds of each, `--seeds 2`."), table]),
        Section("Training", [Row([curves, other])]),  # next to each other where there is room
        Section("Next", [Code("diffvision inspect runs/a/final.ckpt")]),
    ]
    Path("page.html").write_text(html_page("CLIP and DiffCLIP", "One recipe, two models.", sections), encoding="utf-8")

`templates/page.html` has the HTML of every part. All text is escaped; in `Text`, captions and notes, words between
backticks are set as code. Figures are drawn as SVG whose text has the colour of the page's text. Models have their
colours of `figures.colours_of` in heads and bars.
"""

from __future__ import annotations

import functools
import html
import io
import re
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from diffvision.analysis.figures.style import INK, colours_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PIXELS = 96  # of CSS in an inch


@dataclass(frozen=True)
class Text:
    """A paragraph; words between backticks are set as code."""

    text: str


@dataclass(frozen=True)
class Code:
    """Lines of code or output, with a button that copies them."""

    text: str


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

    @property
    def width(self) -> float:
        """The figure's width in CSS pixels."""
        return self.figure.get_figwidth() * _PIXELS

    def svg(self) -> Markup:
        """Return the figure as an SVG element."""
        return Markup(_svg(self.figure, self.alt))


@dataclass(frozen=True)
class Row:
    """Parts next to each other where there is room, and below each other where there is not."""

    parts: Sequence[Part]


@dataclass(frozen=True)
class Folded:
    """Parts that are shown after a click on their title."""

    title: str
    parts: Sequence[Part]


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

    @property
    def length(self) -> float:
        """The bar's length in percent of the cell."""
        return self._percent(statistics.mean(self.values)) if self.values else 0.0

    @property
    def dots(self) -> list[float]:
        """The positions of the dots in percent of the cell."""
        return [self._percent(value) for value in self.values] if len(self.values) > 1 else []

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

    @property
    def colours(self) -> dict[str, str]:
        """The colour of each model in the head."""
        return colours_of(self.head[1:] if self.models is None else self.models)


Part = Text | Code | Picture | Row | Folded | Table
"""What a section is made of."""


@dataclass(frozen=True)
class Section:
    """A title and parts."""

    title: str
    parts: Sequence[Part]


def html_page(title: str, lead: str, sections: Iterable[Section], foot: str = "") -> str:
    """Return one HTML page that refers to no other file.

    Args:
        title: of the page.
        lead: the paragraph below the title: what is shown, and what came of it.
        sections: the content.
        foot: the last line, such as how and when the page was made.
    """
    return _template().render(title=title, lead=lead, sections=sections, foot=foot)


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("diffvision.analysis")
    settings: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **settings)
    environment.filters["marked"] = _mark_code
    return environment.get_template("page.html")


def _mark_code(text: str) -> Markup:
    """Return a text as HTML, with words between backticks set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


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


def _svg(figure: Figure, alt: str) -> str:
    """Return a figure as an SVG element with a transparent background, and the page's text colour and font."""
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
