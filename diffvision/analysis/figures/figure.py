"""The Figure that this package's functions return: matplotlib's, in the package's style wherever it is drawn."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from diffvision.analysis.figures.style import STYLE, png


class StyledFigure(Figure):
    """A matplotlib Figure that is drawn in this package's style, and that a notebook shows as a picture.

    It is saved as any other: `figure.savefig("curves.png")`, or ".pdf" or ".svg".
    """

    def draw(self, renderer: Any) -> None:
        """Draw the figure; ticks and their labels are made only now, so the style is needed once more."""
        with mpl.rc_context(STYLE):
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows, also where pyplot was never imported."""
        return png(self)
