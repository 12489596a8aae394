"""Progress bars: in a terminal, in a notebook without ipywidgets, and elsewhere none."""

import sys
from types import SimpleNamespace

import pytest

from diffvision import progress
from diffvision.evaluation.output_files import bar


@pytest.fixture
def notebook(monkeypatch):
    """A kernel's IPython, whose display keeps what a cell shows."""
    cell: list[dict] = []

    class Handle:
        def __init__(self, row: int):
            self.row = row

        def update(self, data, raw):
            assert raw
            cell[self.row] = data

    def display(data, raw, display_id):
        assert raw
        assert display_id
        cell.append(data)
        return Handle(len(cell) - 1)

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return cell


def test_outside_of_notebooks(monkeypatch, capsys):
    assert not progress.in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not progress.in_notebook()
    assert list(progress.track(iter("abc"), "reading", total=3)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")  # no terminal, no bar


def test_in_a_notebook_one_line_changes(notebook, monkeypatch, capsys):
    monkeypatch.setattr(progress, "REDRAWN", 0.0)
    seen = []
    for item in progress.track(["a", "b"], "reading"):
        seen.append((item, list(notebook)))
    assert seen == [("a", []), ("b", [{"text/plain": "reading 1 of 2"}])]
    assert notebook == [{"text/plain": "reading 2 of 2"}]
    with progress.bar("packing") as advance:
        advance(1500)
    assert notebook[1:] == [{"text/plain": "packing 1,500"}]
    assert capsys.readouterr() == ("", "")


def test_what_takes_no_time_shows_nothing(notebook):
    assert list(bar([1, 2], "images")) == [1, 2]
    assert notebook == []
