"""Pages: well-formed, without references to other files, escaped, and with the numbers that they were given."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from diffvision.analysis import figures
from diffvision.analysis.curves import Curve
from diffvision.analysis.html_page import (
    Bar,
    Code,
    Folded,
    Picture,
    Row,
    Section,
    Table,
    Text,
    bars,
    html_page,
    spread,
)

VOID = {"meta", "img"}
ACCURACY = {"CLIP": [0.5, 0.7], "DiffCLIP <0.2>": [0.4, 0.4]}


class Reader(HTMLParser):
    """Fails on tags that do not close as they opened; keeps cells, words, ids and what is referred to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.cells, self.words, self.ids, self.references, self.tags = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("th", "td"):
            self.cells.append("")
        self.ids += [value for name, value in attrs if name == "id"]
        self.references += [v for name, v in attrs if name in ("src", "href", "xlink:href", "action", "data", "srcset")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if {"th", "td"} & set(self.open):
            self.cells[-1] += data


def curves() -> Figure:
    return figures.run_curves({"loss": {"CLIP": [Curve([0, 1, 2], [3.0, 2.0, 1.0])]}})


def read(*parts, foot: str = "") -> tuple[Reader, str]:
    text = html_page("A <title>", "The `lead` & more", [Section("One & two", parts)], foot)
    return Reader(text), text


def test_a_page_refers_to_nothing_outside_of_it_and_escapes_its_text():
    figure = figures.difference_of_maps(figures.ImageAttention(*_image_and_maps()), 0.2)
    pictures = Row([Picture(curves(), "a <curve>", "its `caption`"), Picture(figure, "maps")])
    page, text = read(Text("1 < 2, `--seeds 3`"), pictures, Folded("More", [Code("a <b>\n  c")]), foot="made")
    assert "http" not in text
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert len(page.references) > 2  # marks of the axes, and the pictures in the drawing
    assert re.findall(r"url\((?!#)", text) == []
    assert "<title>A &lt;title&gt;</title>" in text
    assert "<p>1 &lt; 2, <code>--seeds 3</code></p>" in text
    assert "<code>a &lt;b&gt;\n  c</code>" in text
    assert 'aria-label="a &lt;curve&gt;"' in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport" content="width=device-width' in text


def _image_and_maps():
    rng = np.random.default_rng(0)
    return rng.random((8, 8, 3)), rng.random((3, 4, 4))


def test_a_table_holds_its_values_with_bars_on_one_scale():
    rows = [["retrieval"], ["R@1, %", *bars(ACCURACY, factor=100)], ["parameters", "12", "34"]]
    page, text = read(Table(["", *ACCURACY], rows, note="of `two` seeds"))
    expected = ["", "CLIP", "DiffCLIP <0.2>", "retrieval", "R@1, %", "60.0 ± 14.1", "40.0 ± 0.0"]
    assert page.cells == [*expected, "parameters", "12", "34"]
    widths = [float(width) for width in re.findall(r'<b style="width:([\d.]+)%', text)]
    assert widths == [pytest.approx(100 * 60 / 70, abs=0.1), pytest.approx(100 * 40 / 70, abs=0.1)]
    assert text.count("<i style=") == 4  # a dot for each seed
    colours = figures.colours_of(ACCURACY)
    for colour in colours.values():
        assert text.count(f"background:{colour}") == 2  # in the head and in the bar


def test_bars_end_at_the_cell_and_one_value_has_no_dots():
    (full, missing) = bars({"a": [3.0], "b": []}, top=2, digits=0)
    assert (full.text, missing.text) == ("3", "–")
    assert (full.length, full.dots, missing.length) == (100.0, [], 0.0)
    assert Bar("0", [0.0], 0.0, "#000000").length == 0.0


def test_spread_over_seeds():
    assert spread([1234.5]) == "1,234.5"
    assert spread([1.0, 2.0], 2) == "1.50 ± 0.71"


def test_figures_of_a_page_share_no_ids_and_follow_the_colour_of_its_text():
    twice = {"loss": {"CLIP": [Curve([0, 1], [1.0, 2.0])]}}
    page, text = read(Picture(curves(), "one"), Picture(figures.run_curves(twice), "two"))
    assert len(page.ids) == len(set(page.ids)) > 0
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        assert "fill: currentColor" in drawing
        assert "#333333" not in drawing
        assert ">step</text>" in drawing  # text stays text
        assert "<style" not in drawing
    assert text == read(Picture(curves(), "one"), Picture(figures.run_curves(twice), "two"))[1]


def test_a_figure_of_anyone_can_be_shown():
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2])
    page, _ = read(Picture(figure, "a line"))
    assert page.tags.count("svg") == 1
