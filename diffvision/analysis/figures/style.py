"""The style that all figures share, and functions to draw panels, bars, pictures and colour bars.

Figures are drawn on Agg canvases, so no display is needed and no global state of matplotlib is touched.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")

# Okabe and Ito's colours, which the colour-blind can tell apart; grey instead of black, to be seen on a dark page too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")
INK = "#333333"  # of text and ticks; a page replaces it by the colour of its text
SOFT = "#808080"  # of lines in the background, visible on light and dark

# what a model's name has in it -> the index of the colour that it takes, if no earlier model of the figure has it
_FAMILIES = (
    (re.compile(r"grouped", re.IGNORECASE), 3),
    (re.compile(r"v2", re.IGNORECASE), 2),
    (re.compile(r"diff.*-0\.\d", re.IGNORECASE), 4),
    (re.compile(r"diff|\bv1\b|\bdex\b", re.IGNORECASE), 1),
    (re.compile(r"clip|vit|transformer|plain", re.IGNORECASE), 0),
)
STYLE: Any = {
    "figure.dpi": 140,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "grid.color": SOFT,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorate a function so that it draws its figure in the style above."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        import matplotlib as mpl

        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG file's bytes; `figure.savefig` writes a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each model or run, which a model keeps in every figure.

    The colour follows from the name where it says what the model is: plain models are blue, V1 vermilion, V2 green,
    grouped ones pink, V1 with a number for lambda_init amber. Other names, and a second model of one kind, take the
    next colour that no other has.
    """
    names = list(dict.fromkeys(names))
    wanted = {name: next((index for words, index in _FAMILIES if words.search(name)), None) for name in names}
    taken: dict[int, str] = {}
    for name, index in wanted.items():
        if index is not None:
            taken.setdefault(index, name)
    free = itertools.chain((i for i in range(len(COLOURS)) if i not in taken), itertools.cycle(range(len(COLOURS))))
    by_name = {name: index for index, name in taken.items()}
    return {name: COLOURS[by_name[name] if name in by_name else next(free)] for name in names}


# ---- panels --------------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> Figure:
    """Return an empty figure in the style above, of a size in inches."""
    from diffvision.analysis.figures.figure import StyledFigure

    return StyledFigure(figsize=(width, height), layout=layout, style=STYLE)


def panels(count: int, *, width: float, height: float, sharey: bool = False) -> tuple[Figure, Any]:
    """Return a figure with panels side by side, each of a size in inches."""
    figure = new_figure(width * count, height)
    return figure, figure.subplots(1, count, squeeze=False, sharey=sharey)[0]


def legend_below(figure: Figure, ax: Any, columns: int = 4) -> Figure:
    """Return the figure with the legend of one of its panels below it."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns) or 1)
    return figure


# ---- pictures ------------------------------------------------------------------------------------------------------


def pictures(
    rows: int, columns: int, *, width: float, height: float, margin: tuple[float, float]
) -> tuple[Figure, Any]:
    """Return a figure with rows of pictures without frames, each of a size in inches."""
    figure = new_figure(width * columns + margin[0], height * rows + margin[1], layout="compressed")
    grid = figure.subplots(rows, columns, squeeze=False)
    for ax in grid.flat:
        without_frame(ax)
        ax.set(facecolor="none")
    return figure, grid


def without_frame(ax: Any) -> None:
    """Prepare an axes for a picture: no ticks, grid or frame."""
    ax.set(xticks=[], yticks=[])
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)


def scale(signed: bool, limit: float) -> dict[str, Any]:
    """Return the colours of a map, in percent: dark at 0, bright at the limit; of a difference, blue below 0."""
    if signed:
        return {"cmap": _signed_colours(), "vmin": -limit, "vmax": limit}
    return {"cmap": "magma", "vmin": 0, "vmax": limit}


@functools.cache
def _signed_colours() -> Any:
    """Return magma, extended below zero by blue; what is high is brighter than what is low."""
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    below = LinearSegmentedColormap.from_list("below", ["#3d8fe0", "#123a6b", "#000004"])
    both = [below(np.linspace(0, 1, 128)), mpl.colormaps["magma"](np.linspace(0, 1, 128))]
    return ListedColormap(np.concatenate(both), name="magma_and_blue")


def colour_bar(figure: Figure, picture: Any, axes: Any, **layout: Any) -> Any:
    """Return a colour bar with small ticks and no frame."""
    bar = figure.colorbar(picture, ax=axes, **layout)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.ax.locator_params(nbins=4)
    return bar


def scale_below(figure: Figure, picture: Any, axes: Any, lowest: float, label: str = "% of a row of attention") -> None:
    """Draw the scale of a figure's maps below them, from their lowest value; a few values exceed its upper end."""
    bar = colour_bar(figure, picture, axes, location="bottom", fraction=0.05, pad=0.03, shrink=0.6, extend="max")
    if bar.solids is not None:
        bar.solids.set_alpha(1)
    bar.ax.set_xlim(max(min(lowest, 0), picture.norm.vmin), picture.norm.vmax)
    bar.set_label(label, fontsize=8)
