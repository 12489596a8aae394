"""Figures of numbers over a model's layers. The numbers are computed in `statistics` and `inspection`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diffvision.analysis.figures.style import INK, SOFT, colours_of, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES = {"difference": "-", "attention": "-", "map 1": "--", "map 2": ":", "chance": (0, (1, 4))}
_COLUMNS = 4  # panels side by side


class LayerPanel(NamedTuple):
    """A number over the layers."""

    title: str
    runs: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]  # {run: {kind: [a layer's values, one a head]}}
    log: bool = False


@styled
def layer_panels(panels: Sequence[LayerPanel]) -> Figure:
    """Return numbers over the layers.

    Each model has a colour, and each kind of map a line, its mean over heads. Dots are the heads of the map that is
    applied to the values.
    """
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(2.9 * columns + 0.3, 2.2 * rows + 0.5)
    one_quantity = all(panel.log for panel in panels)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=one_quantity).flat)
    colours = colours_of(run for panel in panels for run in panel.runs)
    for ax, panel in zip(axes, panels, strict=False):
        for run, lines in panel.runs.items():
            for kind, layers in lines.items():
                _draw_line(ax, layers, kind, colours[run])
        ax.set_title(panel.title)
        if panel.log:
            _logarithmic(ax)
        ax.xaxis.get_major_locator().set_params(integer=True, nbins=6)
        last = max((len(layers) for lines in panel.runs.values() for layers in lines.values()), default=1) - 1
        if last:  # layers without the number too
            ax.set_xlim(-0.06 * last, 1.06 * last)
    for ax in axes[max(0, len(panels) - columns) : len(panels)]:
        ax.set_xlabel("layer")
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    handles = _handles(colours, {kind for panel in panels for lines in panel.runs.values() for kind in lines})
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)))
    return figure


def _handles(colours: Mapping[str, str], kinds: set[str]) -> list[Any]:
    """Return the legend: colours of models, then lines of kinds."""
    from matplotlib.lines import Line2D

    labels: dict[Any, list[str]] = {}
    for kind, style in _LINES.items():
        if kind in kinds:
            labels.setdefault(style, []).append(kind)
    models = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    return models + [
        Line2D([], [], color=INK, linestyle=style, label=" or ".join(alike)) for style, alike in labels.items()
    ]


def _draw_line(ax: Any, layers: Sequence[Sequence[float]], kind: str, colour: str) -> None:
    """Draw the mean over heads by layer; for a solid line also a point for each head. `layers` has heads' values.

    Heads without the number have NaN and are left out of the mean.
    """
    finite = [[head for head in heads if math.isfinite(head)] for heads in layers]
    means = [float(np.mean(heads)) if heads else math.nan for heads in finite]
    style, colour = _LINES.get(kind, "-"), SOFT if kind == "chance" else colour
    marker = "o" if sum(map(math.isfinite, means)) == 1 else None
    ax.plot(range(len(layers)), means, linestyle=style, color=colour, linewidth=1.7, marker=marker)
    if style == "-":
        for layer, heads in enumerate(layers):
            if len(heads) > 1:
                ax.plot([layer] * len(heads), heads, "o", color=colour, markersize=2.6, alpha=0.35, markeredgewidth=0)


def _logarithmic(ax: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
