"""Figures of training runs: curves over steps, lambda by layer, and bars of metrics. Runs are read by `curves`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from diffvision.analysis.curves import Curve
from diffvision.analysis.figures.style import colours_of, legend_below, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
def lambda_curves(curves: Mapping[str, Curve]) -> Figure:
    """Return lambda of every layer over the steps: one panel per tower, light to dark from first to last layer.

    Args:
        curves: {layer's module name: curve}; names with the same part before the layer's number are one tower.
    """
    towers = _by_tower(curves)
    figure, axes = panels(len(towers), width=4.2, height=2.8, sharey=True)
    for ax, (tower, layers) in zip(axes, towers.items(), strict=True):
        _draw_layers(ax, layers, linewidth=1.6, fontsize=8)
        ax.set(title=tower, xlabel="step")
    axes[0].set_ylabel("λ")
    return figure


def _by_tower(curves: Mapping[str, Curve]) -> dict[str, dict[str, Curve]]:
    """Return {tower: {layer's number: curve}} of {layer's module name: curve}."""
    towers: dict[str, dict[str, Curve]] = {}
    for name, curve in curves.items():
        number = next((part for part in name.split(".") if part.isdigit()), name)
        towers.setdefault(_tower(name), {})[number] = curve
    return dict(sorted(towers.items()))  # the image tower before the text tower


def _draw_layers(ax: Axes, layers: Mapping[str, Curve], *, linewidth: float, fontsize: float) -> None:
    """Draw one line per layer, light to dark, with the layers' numbers beside them; of many the first and the last."""
    import matplotlib as mpl

    shades = mpl.colormaps["viridis_r"](np.linspace(0.1, 0.95, len(layers)))
    for index, ((number, curve), shade) in enumerate(zip(layers.items(), shades, strict=True)):
        label = f"layer {number}" if index in (0, len(layers) - 1) or len(layers) <= 6 else None
        ax.plot(*curve, color=shade, linewidth=linewidth, label=label)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.2, fontsize=fontsize)


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
