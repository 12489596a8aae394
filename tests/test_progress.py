"""Progress bars: in a terminal or a notebook, and elsewhere none."""

import sys
from types import SimpleNamespace

from diffvision import progress


def test_items_and_counts(capsys):
    assert not progress.in_notebook()
    assert list(progress.track(iter("abc"), "reading", total=3)) == ["a", "b", "c"]
    with progress.bar("packing") as advance:
        advance(1500)
    assert capsys.readouterr() == ("", "")  # no terminal, no bar


def test_a_notebook_has_a_bar_without_advice(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object())))
    assert progress.in_notebook()
    assert list(progress.track(["a", "b"], "reading")) == ["a", "b"]
    assert "reading" in capsys.readouterr().err
