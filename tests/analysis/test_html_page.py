"""A page refers to nothing outside of it, and shows names and texts of others as text."""

import re

from matplotlib.figure import Figure

from diffvision.analysis.html_page import Code, Folded, Picture, Section, Table, Text, html_page


def test_a_page_is_whole_and_its_text_is_no_markup():
    hostile = "<script>alert(1)</script>"
    table = Table(["", hostile], [["`R@1`, %", hostile]])
    parts = [Text(hostile), Picture(Figure(figsize=(2, 1)), hostile), table, Folded(hostile, [Code(hostile)])]
    page = html_page(hostile, hostile, [Section(hostile, parts)], hostile)
    assert hostile not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page
    assert [found[:22] for found in re.findall(r'(?:src|href)="([^"]*)', page)] == ["data:image/png;base64,"]
