"""Figures of language evaluations, of one model or of several.

Each takes {model: metrics} as the evaluations of `diffvision.evaluation.language` return them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffvision.analysis.figures.style import colour_bar, colours_of, legend_below, panels, pictures, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Mapping[str, Mapping[str, float]]
HEIGHT = 3.3  # of a panel, in inches


@styled
def position_curves(results: Results) -> Figure:
    """Return the running mean of the loss over positions, one curve per model."""
    figure, (ax,) = panels(1, width=5.4, height=HEIGHT)
    draw_curves(ax, {name: numbered(metrics, "nll") for name, metrics in results.items()})
    ax.set(title="Cumulative average loss by position", xlabel="position", ylabel="nats a token")
    return legend_below(figure, ax)


@styled
def needle_maps(results: Results) -> Figure:
    """Return accuracy by depth and length: one row of maps per model, one column per number of needles."""
    pairs = list(dict.fromkeys(key.partition("/")[0] for metrics in results.values() for key in metrics))
    figure, grid = pictures(len(results), len(pairs), width=2.6, height=2.1, margin=(0.8, 0.4))
    for row, (name, metrics) in zip(grid, results.items(), strict=True):
        for ax, pair in zip(row, pairs, strict=True):
            cells = {k.removeprefix(f"{pair}/"): v for k, v in metrics.items() if k.startswith(f"{pair}/")}
            picture = _heat_map(ax, cells)
            needles, _, queries = pair.partition("x")
            asked = f"{needles} needle{'s' * (needles != '1')}, {queries} asked for"
            ax.set_title(f"{asked}\n{name}: {100 * cells['accuracy']:.0f}%", fontsize=9)
        row[0].set_ylabel("depth of the answer")
    for ax in grid[-1]:
        ax.set_xlabel("length in tokens")
    colour_bar(figure, picture, grid.ravel().tolist(), fraction=0.02, pad=0.02).set_label("accuracy")
    return figure


def numbered(metrics: Mapping[str, float], kind: str) -> dict[float, float]:
    """Return {x: value} of the keys "<kind>/<x>" with a number for x, in its order."""
    values = {key.removeprefix(f"{kind}/"): value for key, value in metrics.items() if key.startswith(f"{kind}/")}
    points = {float(x): value for x, value in values.items() if x.replace(".", "", 1).isdecimal()}
    return dict(sorted(points.items()))


def draw_curves(ax: Any, curves: Mapping[str, Mapping[float, float]]) -> None:
    """Draw {model: {x: y}}, one line per model."""
    colours = colours_of(curves)
    for name, points in curves.items():
        line: Any = {"color": colours[name], "linewidth": 1.8, "markersize": 4, "label": name}
        ax.plot(list(points), list(points.values()), marker="o" if len(points) < 10 else None, **line)


def _heat_map(ax: Any, cells: Mapping[str, float]) -> Any:
    """Draw "accuracy/<length>/<depth>": lengths across, depths downwards, numbers in percent."""
    accuracies = {tuple(map(float, key.split("/")[1:])): value for key, value in cells.items() if key.count("/") == 2}
    lengths, depths = (sorted({key[axis] for key in accuracies}) for axis in (0, 1))
    values = [[accuracies[length, depth] for length in lengths] for depth in depths]
    picture = ax.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, across in enumerate(values):
        for column, value in enumerate(across):
            colour = "black" if value > 0.6 else "white"
            ax.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=8)
    ax.set_xticks(range(len(lengths)), [f"{length:g}" for length in lengths])
    ax.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
    ax.tick_params(length=0)
    return picture
