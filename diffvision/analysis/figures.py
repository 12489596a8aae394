"""Figures as PNG bytes: curves of runs, lambda by layer, attention on images, bars of metrics.

Drawn on canvases of their own (Agg), so no display is needed and no global state of matplotlib is touched.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import numpy as np

from diffvision.analysis.curves import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")

# Okabe and Ito's colours, told apart by the colour-blind too; a run keeps its colour in every panel of a figure.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLE: Any = {
    "figure.dpi": 140,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "axes.edgecolor": "#888888",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
}


class LookedAt(NamedTuple):
    """An image and where a layer looks on it: a row of `attention_panels`."""

    image: Any  # [h, w, 3], 0..1 or uint8
    maps: Any  # [3, rows, columns]: map 1, map 2, map 1 - lambda * map 2; or [1, rows, columns], a standard layer's
    label: str = ""


def styled(draw: Callable[P, Figure]) -> Callable[P, bytes]:
    """Makes a function that draws a figure into one that returns it as PNG, in the style above."""

    @functools.wraps(draw)
    def png(*args: P.args, **kwargs: P.kwargs) -> bytes:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        with mpl.rc_context(_STYLE):
            figure = draw(*args, **kwargs)
            buffer = io.BytesIO()
            FigureCanvasAgg(figure).print_png(buffer)
        return buffer.getvalue()

    return png


@styled
def run_curves(panels: Mapping[str, Mapping[str, Sequence[Curve]]]) -> Figure:
    """Runs compared over their steps: a panel a metric; in it, for each run, the mean over its seeds, and a band of one
    standard deviation around it where there are several.

    Args:
        panels: {metric: {run: [a curve a seed]}}.
    """
    names = list(dict.fromkeys(run for runs in panels.values() for run in runs))
    figure, axes = _figure(len(panels), width=3.6, height=2.8)
    for ax, (metric, runs) in zip(axes, panels.items(), strict=True):
        for run, curves in runs.items():
            colour = COLOURS[names.index(run) % len(COLOURS)]
            steps, mean, spread = _over_seeds(curves)
            ax.plot(steps, mean, color=colour, linewidth=1.8, label=run)
            if len(curves) > 1:
                ax.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
        ax.set(title=metric, xlabel="step")
        ax.margins(x=0.02)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    return figure


@styled
def lambda_curves(curves: Mapping[str, Curve]) -> Figure:
    """lambda of every layer over the steps: a panel a tower, light to dark from the first layer to the last.

    Args:
        curves: {layer's module name: curve}; names that begin alike up to the layer's number are one tower.
    """
    import matplotlib as mpl

    towers: dict[str, list[Curve]] = {}
    for name, curve in curves.items():
        towers.setdefault(_tower(name), []).append(curve)
    towers = dict(sorted(towers.items()))  # the image tower before the text tower
    figure, axes = _figure(len(towers), width=4.2, height=2.8, sharey=True)
    for ax, (tower, layers) in zip(axes, towers.items(), strict=True):
        shades = mpl.colormaps["viridis_r"](np.linspace(0.1, 0.95, len(layers)))
        for depth, (curve, shade) in enumerate(zip(layers, shades, strict=True)):
            label = f"layer {depth}" if depth in (0, len(layers) - 1) or len(layers) <= 6 else None
            ax.plot(curve.steps, curve.values, color=shade, linewidth=1.6, label=label)
        ax.set(title=tower, xlabel="step")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.2, fontsize=8)
    axes[0].set_ylabel("λ")
    return figure


@styled
def attention_panels(rows: Sequence[LookedAt], title: str = "") -> Figure:
    """Images beside their attention: image, map 1, map 2, and the difference, whose colours are centred at 0.

    A row has one scale for its two maps, and one for its difference; both are printed beside it, in percent of a row of
    attention.
    """
    columns = max(len(row.maps) for row in rows) + 1
    figure, grid = _grid(len(rows), columns)
    heads = ["image", "map 1", "map 2", "map 1 − λ map 2"] if columns > 2 else ["image", "attention"]
    for axes, row in zip(grid, rows, strict=True):
        maps = 100 * np.asarray(row.maps, dtype=float)
        axes[0].imshow(np.asarray(row.image), interpolation="nearest")
        axes[0].set_ylabel(row.label)
        top = maps[:2].max()
        for ax, values in zip(axes[1:], maps[:2], strict=False):
            shown = ax.imshow(values, cmap="magma", vmin=0, vmax=top, interpolation="nearest")
        colour_bar(figure, shown, axes[len(maps[:2])])
        if len(maps) > 2:
            limit = max(np.abs(maps[2]).max(), 1e-9)
            shown = axes[3].imshow(maps[2], cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
            colour_bar(figure, shown, axes[3])
    for ax, head in zip(grid[0], heads, strict=False):
        ax.set_title(head)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


@styled
def metric_bars(metrics: Mapping[str, Mapping[str, Sequence[float]]], unit: str = "%") -> Figure:
    """Runs compared by their metrics: a bar a run with its number on it, a dot a seed where there are several.

    Args:
        metrics: {metric: {run: [a value a seed]}}.
        unit: "%" shows fractions of 1 as percent; anything else is a label, and the values are shown as they are.
    """
    names = list(dict.fromkeys(run for runs in metrics.values() for run in runs))
    factor = 100 if unit == "%" else 1
    wide = 0.8 / len(names)
    figure, (ax,) = _figure(1, width=max(4.0, 0.55 * len(metrics) * (len(names) + 0.8)), height=3.2)
    for number, run in enumerate(names):
        places = np.arange(len(metrics)) + (number - (len(names) - 1) / 2) * wide
        values = [factor * np.asarray(runs[run], dtype=float) for runs in metrics.values()]
        means = [own.mean() for own in values]
        colour = COLOURS[number % len(COLOURS)]
        ax.bar(places, means, width=0.92 * wide, color=colour, label=run)
        for place, own, mean in zip(places, values, means, strict=True):
            if len(own) > 1:
                dots = place + np.linspace(-0.2, 0.2, len(own)) * wide
                ax.plot(dots, own, "o", color="white", markeredgecolor="#333333", markeredgewidth=0.8, markersize=3.5)
            ax.annotate(
                f"{mean:.1f}" if unit == "%" else f"{mean:.3g}",
                (place, max(mean, own.max())),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color="#333333",
            )
    ax.set_xticks(range(len(metrics)), list(metrics))
    ax.set_ylabel(unit)
    ax.grid(axis="x", visible=False)
    ax.margins(y=0.12)
    figure.legend(loc="outside lower center", ncols=len(names))
    return figure


def _figure(panels: int, *, width: float, height: float, sharey: bool = False) -> tuple[Figure, Any]:
    """A figure with panels side by side, each of a size in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, height), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False, sharey=sharey)[0]


def _grid(rows: int, columns: int) -> tuple[Figure, Any]:
    """A figure with rows of pictures, without ticks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.75 * columns + 0.6, 1.55 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for ax in grid.flat:
        ax.set(xticks=[], yticks=[])
        for spine in ax.spines.values():
            spine.set_visible(False)
    return figure, grid


def colour_bar(figure: Figure, shown: Any, ax: Any) -> None:
    """In percent, small, beside a picture."""
    bar = figure.colorbar(shown, ax=ax, fraction=0.05, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.ax.locator_params(nbins=4)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")


def _over_seeds(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps, mean, standard deviation) over the steps that all curves cover."""
    first, last = max(c.steps[0] for c in curves), min(c.steps[-1] for c in curves)
    steps = np.array(sorted({s for c in curves for s in c.steps if first <= s <= last}))
    values = np.stack([np.interp(steps, c.steps, c.values) for c in curves])
    return steps, values.mean(axis=0), values.std(axis=0, ddof=1 if len(curves) > 1 else 0)


def _tower(name: str) -> str:
    """What a layer's name has before its number, in words where it is one of OpenCLIP's towers."""
    before = ".".join(itertools.takewhile(lambda part: not part.isdigit(), name.split(".")))
    if before.startswith("visual"):
        return "image tower"
    return "text tower" if "resblocks" in before else before
