"""Bars of the metrics of language evaluations, of one model or of several."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from diffvision.analysis.figures.language_results import HEIGHT, Results, draw_numbers
from diffvision.analysis.figures.style import legend_below, panels, styled
from diffvision.evaluation.intervals import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bars(*patterns: str, log: bool = False) -> Callable[[Results], Figure]:
    """Return a function that draws metrics as bars.

    Args:
        patterns: of metrics' names, a panel each. A * is one part of a name, and labels the bars.
        log: whether the axis is logarithmic.
    """

    @styled
    def draw(results: Results) -> Figure:
        groups = {pattern: _groups(results, pattern) for pattern in patterns}
        groups = {pattern: found for pattern, found in groups.items() if found}
        figure, axes = panels(len(groups), width=max(3.4, 0.6 * max(map(len, groups.values()))), height=HEIGHT)
        for ax, (pattern, found) in zip(axes, groups.items(), strict=True):
            draw_numbers(ax, found, log=log)
            ax.tick_params(axis="x", rotation=90 if len(found) > 6 else 0)
            title = " ".join(part for part in pattern.split("/") if "*" not in part)
            ax.set(title=title.replace("_", " "))
        return legend_below(figure, axes[0])

    return draw


def _groups(results: Results, pattern: str) -> dict[str, dict[str, float]]:
    """Return the metrics that match a pattern by label and model, without what `with_intervals` adds."""
    keys = dict.fromkeys(key for metrics in results.values() for key in metrics)
    derived = {f"{key}{end}" for key in keys for end in PARTS}
    matches = {key: re.fullmatch(pattern.replace("*", "([^/]+)"), key) for key in keys if key not in derived}
    return {
        "".join(match.groups()).replace("_", " "): {name: metrics[key] for name, metrics in results.items()}
        for key, match in matches.items()
        if match and all(key in metrics for metrics in results.values())
    }
