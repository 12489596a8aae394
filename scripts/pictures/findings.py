"""Draws the pictures of docs/results/index.md from what the studies' reports print of their committed runs.

python scripts/pictures/findings.py --images docs/images
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from concepts import THEMES, styled
from diffvision.analysis.figures.style import COLOURS

STUDIES = Path(__file__).parents[1] / "studies"
DIFFERENCE = re.compile(r"([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\] (n\.s\.|unclear|higher|lower)")


class Panel(NamedTuple):
    """What one panel shows.

    Attributes:
        report: the study's script.
        axis: what is compared, and which way is better.
        rows: {how the row of the report starts: its label}; the first difference of a row is drawn.
    """

    report: str
    axis: str
    rows: dict[str, str]


FINDINGS = {
    "finding-1": [
        Panel(
            "scaling.py",
            "loss minus the Transformer's, nats (← better)",
            {
                "2e+12 | V1": "V1, best size",
                "0.03M | V1 | 3.70M": "V1, 150 tokens a parameter",
                "0.1M | V1 | 1.45M": "V1, 15",
                "0.3M | V1 | 0.58M": "V1, 2",
                "0.8M | V1 | 0.28M": "V1, 0.4",
                "2e+12 | V2": "V2, best size",
                "0.03M | V2 | 3.13M": "V2, 0.03M parameters",
                "0.1M | V2 | 1.27M": "V2, 0.1M",
                "0.3M | V2 | 0.51M": "V2, 0.3M",
                "0.8M | V2 | 0.25M": "V2, 0.8M",
            },
        )
    ],
    "finding-2": [
        Panel(
            "controls.py",
            "loss minus the Transformer's, nats (← better)",
            {
                "V1 | 726,016": "V1",
                "plain, head norm | 726,016": "with V1's head norm",
                "plain, V1's heads | 726,016": "with V1's heads",
            },
        ),
        Panel(
            "controls.py",
            "loss minus V1's, nats (← better)",
            {
                "V1, no norm | 726,016": "without head norm",
                "V1, lambda 0 | 726,016": "λ = 0, one map",
                "V1, free lambda | 726,016": "λ a free number",
                "V1, no factor | 726,016": "without 1 − λ_init",
            },
        ),
    ],
    "finding-3": [
        Panel(
            "clip.py",
            "image R@1 minus plain CLIP's, points (better →)",
            {"V1 0.8": "V1 0.8, both towers", "V1 0.2, text plain": "V1 0.2, image tower", "V2": "V2, both towers"},
        )
    ],
}


def read_report(report: str) -> list[str]:
    """Return the lines that a study's report prints."""
    command = [sys.executable, str(STUDIES / report), "report"]
    return subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout.splitlines()


def find_difference(lines: list[str], start: str) -> tuple[float, float, float, str]:
    """Return mean, lower and upper end and verdict of the first row that starts so and has a difference."""
    for line in lines:
        if line.startswith(f"| {start} |") and (found := DIFFERENCE.findall(line)):
            mean, low, high, verdict = found[0]
            return float(mean), float(low), float(high), verdict
    raise SystemExit(f"no row {start!r} in the report: mend FINDINGS in {Path(__file__).name}")


def draw(panels: list[Panel], reports: dict[str, list[str]], colour: str) -> Figure:
    """Draw the differences of a finding, one row each with its interval; filled where one is higher or lower."""
    counts = [len(panel.rows) for panel in panels]
    figure = Figure(figsize=(4.4, 0.27 * sum(counts) + 0.75 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, height_ratios=counts, squeeze=False)[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        for y, start in enumerate(panel.rows):
            mean, low, high, verdict = find_difference(reports[panel.report], start)
            ax.plot([low, high], [y, y], color=colour, linewidth=2)
            face = colour if verdict in ("higher", "lower") else "white"
            ax.plot(mean, y, "o", color=colour, markerfacecolor=face, markersize=6)
        ax.axvline(0, color=mpl.rcParams["axes.edgecolor"], linewidth=0.8)
        ax.set_yticks(range(len(panel.rows)), list(panel.rows.values()))
        ax.set(ylim=(len(panel.rows) - 0.5, -0.5), xlabel=panel.axis)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.grid(axis="x")
    # The longest label may be wider than its panel.
    for ax in axes:
        ax.xaxis.label.set(x=1, ha="right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    images = parser.parse_args().images
    reports = {name: read_report(name) for name in {panel.report for panels in FINDINGS.values() for panel in panels}}
    for panels in FINDINGS.values():
        for panel in panels:
            print(panel.axis)
            for start, label in panel.rows.items():
                mean, low, high, verdict = find_difference(reports[panel.report], start)
                print(f"  {label}: {mean:+g} [{low:+g}, {high:+g}] {verdict}")
    for theme in THEMES:
        for name, panels in FINDINGS.items():
            with mpl.rc_context(styled(theme)):
                figure = draw(panels, reports, COLOURS[5 if theme == "dark" else 0])
                figure.savefig(images / f"{name}-{theme}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
