"""The benchmarks' picture: ratios to the baseline, a dot a way, a row a shape."""

from pathlib import Path
from typing import NamedTuple

# One look a way, whatever else is in the picture: colour and marker together, for who cannot tell colours.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31", "#5F9E6E", "#999999"]
MARKERS = "osD^vP*X<>"


class Panel(NamedTuple):
    """One drawing: row -> way -> ratio, and row -> floor."""

    title: str
    ratios: dict[str, dict[str, float]]
    floors: dict[str, float]


def draw(
    path: Path, title: str, panels: list[Panel], ours: set[str], note: str = "", than: str = "plain attention's"
) -> None:
    """Draw the panels side by side, in rows of the same order.

    Args:
        ours: ways that are drawn larger and on top.
        note: a line below the title.
        than: whose time the ratios are to.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = list(dict.fromkeys(row for panel in panels for row in panel.ratios))
    ways = list(dict.fromkeys(way for panel in panels for row in panel.ratios.values() for way in row))
    height = 1.9 + 0.42 * len(rows)
    figure, axes = plt.subplots(1, len(panels), figsize=(1.8 + 5.2 * len(panels), height), sharey=True, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        _draw_panel(axis, panel, rows, ways, ours)
        axis.set_xlabel(f"time / {than} (lower is better)", fontsize=9)
    axes[0][0].set_yticks(range(len(rows)), rows)
    axes[0][0].set_ylim(len(rows) - 0.5, -0.5)
    handles, labels = axes[0][0].get_legend_handles_labels()
    for axis in axes[0][1:]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles, labels = [*handles, handle], [*labels, label]
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    columns = min(6, len(labels))
    lines = -(-len(labels) // columns)
    figure.legend(handles, labels, loc="lower center", ncols=columns, fontsize=8.5, frameon=False)
    if note:
        figure.text(0.01, 1 - 0.42 / height, note, fontsize=8, color="#444444", va="top")
    figure.tight_layout(rect=(0, (0.12 + 0.22 * lines) / height, 1, 1 - (0.42 if note else 0.15) / height))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_panel(axis, panel: Panel, rows: list[str], ways: list[str], ours: set[str]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for row in range(0, len(rows), 2):
        axis.axhspan(row - 0.5, row + 0.5, color="#f3f3f3", zorder=0)
    axis.axvline(1.0, color="black", linewidth=1, zorder=1)
    for index, way in enumerate(ways):
        points = [(panel.ratios[row][way], y) for y, row in enumerate(rows) if way in panel.ratios.get(row, {})]
        if points:
            x, y = zip(*points, strict=True)
            # The eleventh way has the first one's colour with another marker.
            look = {
                "color": COLOURS[index % len(COLOURS)],
                "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
            }
            mine = way in ours
            edge = {"edgecolors": "black", "linewidths": 0.9} if mine else {"alpha": 0.85, "linewidths": 0}
            axis.scatter(x, y, s=75 if mine else 38, zorder=4 if mine else 3, label=way, **look, **edge)
    floors = [(panel.floors[row], y) for y, row in enumerate(rows) if row in panel.floors]
    if floors:
        x, y = zip(*floors, strict=True)
        axis.scatter(x, y, marker="|", s=230, color="black", linewidths=2, zorder=2, label="floor")
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xticks(_ticks(low, high))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axis.set_title(panel.title, fontsize=10)
    axis.tick_params(labelsize=8.5)
    axis.spines[["top", "right"]].set_visible(False)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers on a logarithmic axis: few on a wide one, evenly spaced ones on a narrow one."""
    if high > 2 * low:
        wide = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
        ticks = wide if high > 10 * low else [0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 4, 6, 9]
    else:
        step = next((step for step in (0.01, 0.02, 0.05, 0.1) if high - low < 8 * step), 0.2)
        ticks = [round(step * count, 2) for count in range(int(low / step), int(high / step) + 1)]
    return [tick for tick in ticks if low <= tick <= high]
