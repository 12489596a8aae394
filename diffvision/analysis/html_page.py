"""Self-contained HTML pages: text, figures, tables and code, for light and dark screens and for phones.

A page is a title, a lead paragraph and sections; a section is a title and parts:

    from diffvision.analysis import figures
    from diffvision.analysis.html_page import Code, Picture, Section, Table, Text, html_page

    sections = [
        Section("Results", [Text("Two seeds of each, `--seeds 2`."), Table(["", "CLIP"], [["top-1, %", "95.0"]])]),
        Section("Training", [Picture(figures.run_curves(metrics), "Training loss.")]),
        Section("Next", [Code("diffvision inspect runs/a/final.ckpt")]),
    ]
    Path("page.html").write_text(html_page("CLIP and DiffCLIP", "One recipe, two models.", sections), encoding="utf-8")

`templates/page.html` has the HTML of every part. All text is escaped; in `Text` and captions words between backticks
are set as code.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from diffvision.analysis.figures.style import png

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
    """A figure of `diffvision.analysis.figures`, or any other of matplotlib, with a caption."""

    figure: Figure
    caption: str

    @property
    def width(self) -> float:
        """The figure's width in CSS pixels."""
        return self.figure.get_figwidth() * _PIXELS

    @functools.cached_property
    def png(self) -> bytes:
        """The figure as a PNG file's bytes."""
        return png(self.figure)

    @property
    def source(self) -> str:
        """The figure as the address of an image."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True)
class Folded:
    """Parts that are shown after a click on their title."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


Part = Text | Code | Picture | Folded | Table
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
