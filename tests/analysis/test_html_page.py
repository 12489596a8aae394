"""Pages: well-formed, without references to other files, escaped, and with the numbers that they were given."""

import re
from html.parser import HTMLParser

from matplotlib.figure import Figure

from diffvision.analysis.html_page import Code, Folded, Picture, Section, Table, Text, html_page

VOID = {"meta", "img"}


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


def test_a_page_refers_to_nothing_outside_of_it_and_escapes_its_text():
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2])
    table = Table(["", "DiffCLIP <0.2>"], [["`R@1`, %", "60.0 ± 14.1"], ["parameters", "12"]])
    parts = [Text("1 < 2, `--seeds 3`"), Picture(figure, "a <curve>"), table, Folded("More", [Code("a <b>\n  c")])]
    text = html_page("A <title>", "The `lead` & more", [Section("One & two", parts)], "made")
    page = Reader(text)
    assert "http" not in text
    assert [reference[:22] for reference in page.references] == ["data:image/png;base64,"]
    assert re.findall(r"url\((?!#)", text) == []
    assert "<title>A &lt;title&gt;</title>" in text
    assert "<p>1 &lt; 2, <code>--seeds 3</code></p>" in text
    assert "<code>a &lt;b&gt;\n  c</code>" in text
    assert 'alt="a &lt;curve&gt;"' in text
    assert page.cells == ["", "DiffCLIP <0.2>", "R@1, %", "60.0 ± 14.1", "parameters", "12"]
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport" content="width=device-width' in text
