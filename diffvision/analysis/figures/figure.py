"""The Figure that this package's functions return: matplotlib's, in one style wherever it is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure


class StyledFigure(Figure):
    """A matplotlib Figure that is drawn in a style, and that a notebook shows as a picture.

    It is saved as any other: `figure.savefig("curves.png")`, or ".pdf" or ".svg".

    Args:
        style: matplotlib's settings while the figure is drawn.
        arguments: those of Figure.
    """

    def __init__(self, *, style: Mapping[str, Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._style: Any = dict(style)

    def draw(self, renderer: Any) -> None:
        """Draw the figure; ticks and their labels are made only now, so the style is needed once more."""
        with mpl.rc_context(self._style):
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows, also where pyplot was never imported."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()
