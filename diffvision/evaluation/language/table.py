"""The table that `evaluate-language` prints: headline numbers with their intervals, and paired differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping

from diffvision import tables
from diffvision.evaluation.intervals import FEWEST_SAMPLES, PARTS

Results = Mapping[str, Mapping[str, float]]
"""{model: metrics}."""


def show(results: Results, notes: Mapping[str, str] | None = None, hidden: Collection[str] = ()) -> None:
    """Print the headline numbers (those without a position or length in their names), and the paired differences.

    Args:
        results: metrics by model.
        notes: what follows a model's name at the head of its column.
        hidden: metrics without a row.
    """
    from rich.table import Column, Table

    table = Table(Column("metric", no_wrap=True), *(name + (notes or {}).get(name, "") for name in results))
    keys = dict.fromkeys(itertools.chain.from_iterable(results.values()))
    derived = {f"{key}{end}" for key in keys for end in PARTS}
    shown = [key for key in keys if key not in hidden]
    headlines = [key for key in shown if not any(part.replace(".", "", 1).isdecimal() for part in key.split("/"))]
    for key in (key for key in headlines if key not in derived):
        table.add_row(key, *(_cell(metrics, key) for metrics in results.values()))
    paired = Table(Column("difference", no_wrap=True), "model", f"from {next(iter(results))}", "McNemar's p")
    for key, (name, metrics) in itertools.product(headlines, results.items()):
        if f"{key}_difference" in metrics:
            p = metrics.get(f"{key}_mcnemar_p")
            paired.add_row(key, name, _cell(metrics, f"{key}_difference"), "" if p is None else f"{p:.2g}")
            if f"{key}_difference_low" not in metrics:
                paired.caption = f"no interval: fewer than {FEWEST_SAMPLES} independent samples"
    tables.show(table, *([paired] if paired.row_count else []), data=results)


def _cell(metrics: Mapping[str, float], key: str) -> str:
    """Return a number, and its interval where there is one."""
    if key not in metrics:
        return ""
    ends = [metrics[f"{key}{end}"] for end in ("_low", "_high") if f"{key}{end}" in metrics]
    if not ends:
        return f"{metrics[key]:.4g}"
    width = ends[1] - ends[0]
    digits = 3 if width >= 0.02 or not width > 0 else min(9, 1 - math.floor(math.log10(width)))
    return f"{metrics[key]:.{digits}f} [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"
