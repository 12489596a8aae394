"""Progress bars: in a terminal or a notebook, and elsewhere none."""

import sys
from types import SimpleNamespace

from diffvision import progress


def test_a_notebook_has_a_bar_without_advice(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object())))
    assert progress.in_notebook()
    assert list(progress.track(["a", "b"], "reading")) == ["a", "b"]
    assert "reading" in capsys.readouterr().err
