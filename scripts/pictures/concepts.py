"""Draws the figures of docs/concepts, each for light and for dark pages. Nothing in them is measured.

python scripts/pictures/concepts.py --images docs/images
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from diffvision.analysis.figures.style import COLOURS
from diffvision.nn.lambda_init import depth_lambda_init

BLUE, ORANGE, GREEN, PINK = COLOURS[:4]
THEMES = {"light": ("#1f2328", "#d5d9de"), "dark": ("#e2e8ee", "#3d4650")}  # ink, lines of the grid


def styled(theme: str) -> dict[str, Any]:
    ink, grid = THEMES[theme]
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    return dict.fromkeys(names, ink) | {
        "svg.fonttype": "none",
        "svg.hashsalt": "diffvision",
        "font.family": "sans-serif",
        "font.size": 10,
        "grid.color": grid,
        "legend.frameon": False,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }


def idea() -> Figure:
    """Draw a row of two maps that share their noise, and of their difference."""
    rng, tokens = np.random.default_rng(3), 40
    noise = rng.normal(0, 0.6, tokens)
    signal = 2.4 * np.exp(-(((np.arange(tokens) - 26) / 1.1) ** 2))
    first, second = (np.exp(logits) / np.exp(logits).sum() for logits in (noise + signal, noise))
    figure = Figure(figsize=(8.4, 2.3), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True)
    titles = ("map 1", "map 2", "map 1 − 0.8 × map 2")
    for ax, row, title, colour in zip(
        panels, (first, second, first - 0.8 * second), titles, (BLUE, ORANGE, GREEN), strict=True
    ):
        ax.bar(range(tokens), row, color=colour, width=0.85)
        ax.axhline(0, color=mpl.rcParams["axes.edgecolor"], linewidth=0.8)
        ax.set(title=title, xticks=[26], xticklabels=["the answer"], ylim=(-0.06, 0.31))
        ax.set_yticks([0, 0.1, 0.2, 0.3])
        ax.text(0.02, 0.93, f"sums to {row.sum():.1f}", transform=ax.transAxes, fontsize=9, va="top")
    return figure


def heads() -> Figure:
    """Draw the projections of a layer with four heads' worth of width: standard, V1, V2 and grouped."""
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    layouts = {
        "standard: 4 heads": (["q"] * 4, ["k"] * 4, [("v", 1)] * 4),
        "V1: 2 heads, values twice as wide": (["q1", "q2"] * 2, ["k1", "k2"] * 2, [("v", 2)] * 2),
        "V2: 4 heads, two queries each": (["q1", "q2"] * 4, ["k"] * 4, [("v", 1)] * 4),
        "grouped: 3 signal heads, 1 noise head": (["q1"] * 3 + ["q2"], ["k1", "k2"], [("v", 2)]),
    }
    for ax, (title, (queries, keys, values)) in zip(figure.subplots(2, 2).flat, layouts.items(), strict=True):
        ax.set_title(title, fontsize=10)
        for y, texts in ((2, [(text, 1) for text in queries]), (1, [(text, 1) for text in keys]), (0, values)):
            x = 0.0
            for text, width in texts:
                colour = ORANGE if text in ("q2", "k2") else GREEN if text == "v" else BLUE
                ax.add_patch(
                    FancyBboxPatch(
                        (x + 0.06, y + 0.1), width - 0.12, 0.7, "round,pad=0,rounding_size=0.1", color=colour
                    )
                )
                ax.text(x + width / 2, y + 0.45, text, color="white", ha="center", va="center", fontsize=9)
                x += width
        ax.set(xlim=(-0.2, 8.2), ylim=(-0.1, 3), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    return figure


def lambdas() -> Figure:
    """Draw lambda_init by depth."""
    figure = Figure(figsize=(6, 2.7), layout="constrained")
    ax = figure.subplots()
    depth = np.arange(24)
    ax.plot(
        depth,
        [depth_lambda_init(d) for d in depth],
        "o-",
        color=BLUE,
        markersize=3.5,
        label='"depth": the DIFF Transformer',
    )
    ax.plot(depth, [0.8] * 24, "--", color=ORANGE, label="0.8: DiffCLIP")
    ax.plot(depth, [0.2] * 24, ":", color=GREEN, linewidth=2, label="0.2: the demo")
    ax.set(xlabel="layer, counted from 0", ylabel="lambda_init", ylim=(0, 1))
    ax.grid(axis="y")
    ax.legend(loc="center right", bbox_to_anchor=(1, 0.45), fontsize=9)
    return figure


def common_mode() -> Figure:
    """Draw how much of what all tokens share passes through a difference, over lambda."""
    figure = Figure(figsize=(8.4, 2.5), layout="constrained")
    lam = np.linspace(0, 1, 50)
    left, right = figure.subplots(1, 2)
    left.plot(lam, 1 - lam, color=ORANGE, linewidth=2, label="what all tokens share: 1 − λ")
    left.plot(lam, np.ones(50), color=BLUE, linewidth=2, label="what only map 1 picks out: 1")
    left.set(xlabel="λ", ylabel="passes", ylim=(0, 1.25), xticks=[0, 0.2, 0.5, 0.8, 1])
    left.legend(loc="lower left", fontsize=9)
    right.plot(lam[:-1], 1 / np.maximum(1 - lam[:-1], 0.02), color=GREEN, linewidth=2)
    for value in (0.2, 0.8):
        right.plot(value, 1 / (1 - value), "o", color=GREEN)
        at = (value, 1 / (1 - value))
        right.annotate(f"{at[1]:g} at λ {value}", at, xytext=(-4, 8), textcoords="offset points", ha="center")
    right.set(xlabel="λ", ylabel="picked out : shared", ylim=(0, 10), xticks=[0, 0.2, 0.5, 0.8, 1])
    for ax in (left, right):
        ax.grid(axis="y")
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "idea": idea,
    "heads": heads,
    "lambdas": lambdas,
    "common-mode": common_mode,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    images = parser.parse_args().images
    for theme in THEMES:
        for name, make in FIGURES.items():
            with mpl.rc_context(styled(theme)):
                make().savefig(images / f"{name}-{theme}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
