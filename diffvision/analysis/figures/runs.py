"""Figures of training runs: curves over steps, lambda by layer, and bars of metrics. Runs are read by `curves`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from diffvision.analysis.curves import Curve
from diffvision.analysis.figures.style import COLOURS, colours_of, draw_bars, legend_below, new_figure, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def run_curves(metrics: Mapping[str, Mapping[str, Sequence[Curve]]], xlabel: str = "step") -> Figure:
    """Return a figure that compares runs over their steps, one panel per metric.

    Each run is the mean over its seeds, with a band of one standard deviation around it where there are several.

    Args:
        metrics: {metric: {run: [one curve per seed]}}.
        xlabel: what the curves are over.
    """
    colours = colours_of(run for runs in metrics.values() for run in runs)
    figure, axes = panels(len(metrics), width=3.6, height=2.8)
    for ax, (metric, runs) in zip(axes, metrics.items(), strict=True):
        for run, curves in runs.items():
            steps, mean, spread = _over_seeds(curves)
            ax.plot(steps, mean, color=colours[run], linewidth=1.8, label=run, marker="o" if len(steps) == 1 else None)
            if len(curves) > 1:
                ax.fill_between(steps, mean - spread, mean + spread, color=colours[run], alpha=0.18, linewidth=0)
        ax.set(title=metric, xlabel=xlabel)
        ax.margins(x=0.02)
    return legend_below(figure, axes[0], columns=len(colours))


@styled
def run_overview(curves: Mapping[str, Curve]) -> Figure:
    """Return a figure of one run: a panel for each metric over the steps, and one for lambda of all layers.

    Args:
        curves: as `curves.read_metrics` returns them; the counts of samples (`data/...`) and the metrics of single
            kinds (`composition/DATASET/acc/KIND`) are left out.
    """
    import matplotlib as mpl

    layers = {name: curve for name, curve in curves.items() if name.startswith("lambda/")}
    named = [name for name in curves if not name.startswith(("data/", "lambda")) and name.count("/") < 3]
    shown = [name for name in named if _says_something(curves[name])]
    shown.sort(key=lambda name: (not name.endswith("loss"), name.startswith("train/"), name))
    count = len(shown) + bool(layers)
    columns = min(4, max(count, 1))
    rows = math.ceil(count / columns) or 1
    figure = new_figure(2.7 * columns, 2.1 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax, name in zip(axes, shown, strict=False):
        dots = "o" if len(curves[name].steps) < 20 else None
        ax.plot(*curves[name], color=COLOURS[0], linewidth=1.4, marker=dots, markersize=3)
        ax.set_title(name, fontsize=9)
    if layers:
        shades = mpl.colormaps["viridis_r"](np.linspace(0.1, 0.95, len(layers)))
        for curve, shade in zip(layers.values(), shades, strict=True):
            axes[count - 1].plot(*curve, color=shade, linewidth=1.2)
        axes[count - 1].set_title("λ, a line a layer", fontsize=9)
    for ax in axes[count:]:
        ax.set_axis_off()
    for ax in axes[max(count - columns, 0) : count]:
        ax.set_xlabel("step")
    return figure


@styled
def lambda_curves(curves: Mapping[str, Curve]) -> Figure:
    """Return lambda of every layer over the steps: one panel per tower, light to dark from first to last layer.

    Args:
        curves: {layer's module name: curve}; names with the same part before the layer's number are one tower.
    """
    import matplotlib as mpl

    towers: dict[str, list[Curve]] = {}
    for name, curve in curves.items():
        towers.setdefault(_tower(name), []).append(curve)
    towers = dict(sorted(towers.items()))  # the image tower before the text tower
    figure, axes = panels(len(towers), width=4.2, height=2.8, sharey=True)
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
def metric_bars(metrics: Mapping[str, Mapping[str, Sequence[float]]], unit: str = "%") -> Figure:
    """Return a figure that compares runs by metrics: one labelled bar per run, one dot per seed if there are several.

    Args:
        metrics: {metric: {run: [one value per seed]}}.
        unit: "%" shows fractions of 1 as percent; anything else is a label, and values are not scaled.
    """
    names = list(dict.fromkeys(run for runs in metrics.values() for run in runs))
    figure, (ax,) = panels(1, width=max(4.0, 0.42 * len(metrics) * (len(names) + 0.8)), height=3.2)
    if unit == "%":
        percent = {
            metric: {run: [100 * value for value in values] for run, values in runs.items()}
            for metric, runs in metrics.items()
        }
        draw_bars(ax, percent, lambda mean: f"{mean:.1f}")
    else:
        draw_bars(ax, metrics, lambda mean: f"{mean:.3g}")
    ax.set_ylabel(unit)
    return legend_below(figure, ax, columns=len(names))


def _says_something(curve: Curve) -> bool:
    """Return whether a value is finite and not 0, unlike the accuracy of five of three classes, or skipped steps."""
    return any(math.isfinite(value) and value for value in curve.values)


def _over_seeds(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (steps, mean, standard deviation) over the steps that all curves cover."""
    first, last = max(c.steps[0] for c in curves), min(c.steps[-1] for c in curves)
    steps = np.array(sorted({s for c in curves for s in c.steps if first <= s <= last}))
    values = np.stack([np.interp(steps, c.steps, c.values) for c in curves])
    return steps, values.mean(axis=0), values.std(axis=0, ddof=1 if len(curves) > 1 else 0)


def _tower(name: str) -> str:
    """Return what a layer's name has before its number, in words where it is one of OpenCLIP's towers."""
    before = ".".join(itertools.takewhile(lambda part: not part.isdigit(), name.split(".")))
    if before.startswith("visual"):
        return "image tower"
    return "text tower" if "resblocks" in before else before
