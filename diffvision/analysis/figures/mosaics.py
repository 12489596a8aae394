"""Figures of many small maps, and of attention over a text; maps in a figure share a colour scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from diffvision.analysis.figures.style import COLOURS, new_figure, scale, scale_below, styled, without_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINE = 24  # tokens of a text in a line of its strips


@dataclass(frozen=True)
class Block:
    """Rows and columns of small maps of one size: a picture in a mosaic."""

    title: str
    cells: Sequence[Sequence[Any]]  # [rows][columns] of [h, w]
    rows: Sequence[str] = field(default_factory=list)


@styled
def mosaic(blocks: Sequence[Block], columns: Sequence[str], across: str) -> Figure:
    """Return a figure of many small maps: one picture per block, with rows and columns of cells.

    The scale ends at the 99.5th percentile of what is shown, so that one bright cell does not darken the others.

    Args:
        blocks: the pictures, from top to bottom.
        columns: labels below the columns; of a long list every second or so is written.
        across: what the columns are ("layer").
    """
    tiled = [_join_tiles(block.cells) for block in blocks]
    width = min(8.0, 1.15 * len(columns))
    heights = [max(0.55, width * picture.shape[0] / picture.shape[1]) for picture in tiled]
    if (total := sum(heights)) > 26:
        heights = [26 * height / total for height in heights]
    figure = new_figure(width + 0.7, sum(heights) + 0.5 * len(blocks) + 0.7, layout="compressed")
    axes = figure.subplots(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    colours = scale(True, _limit(tiled))
    for ax, block, picture in zip(axes, blocks, tiled, strict=True):
        image = ax.imshow(100 * picture, interpolation="nearest", **colours)
        without_frame(ax)
        _label_cells(ax, block, picture.shape, columns)
    axes[-1].set_xlabel(across)
    scale_below(figure, image, axes, min(100 * float(np.nanmin(picture)) for picture in tiled))
    return figure


def _label_cells(ax: Any, block: Block, shape: tuple[int, ...], columns: Sequence[str]) -> None:
    """Name the rows and columns of a mosaic."""
    height, width = shape[0] / len(block.cells), shape[1] / len(block.cells[0])
    every = max(1, len(columns) // 32)
    ax.set_xticks([(i + 0.5) * width - 1 for i in range(0, len(columns), every)], columns[::every], fontsize=7)
    ax.set_yticks([(i + 0.5) * height - 1 for i in range(len(block.rows))], block.rows, fontsize=7)
    ax.tick_params(length=0)
    ax.set_title(block.title, fontsize=9, loc="left")


@styled
def text_strips(words: Sequence[str], reads: Mapping[str, Mapping[str, Any]], answer: tuple[int, int] | None) -> Figure:
    """Return a figure of what a text's last token attends to: one row per model and kind of map, above the text.

    Args:
        words: of each token, N.
        reads: {model: {kind: [N]}}.
        answer: positions of its tokens, [start, stop); they are bold.
    """
    rows = [(f"{name}: {kind}" if len(kinds) > 1 else name, 100 * np.asarray(values))
            for name, kinds in reads.items() for kind, values in kinds.items()]  # fmt: skip
    # The first token takes most of a row in many layers, and would leave all others dark
    colours = scale(True, _limit([values / 100 for _, values in rows], 97))
    lines = math.ceil(len(words) / _LINE)
    line = _LINE if lines > 1 else max(len(words), 1)
    width = 0.5 + 0.085 * max(len(label) for label, _ in rows) + 0.2 * max(16, line)
    figure = new_figure(width, lines * (0.24 * len(rows) + 0.85) + 0.6)
    axes = figure.subplots(lines * len(rows), 1, squeeze=False)[:, 0]
    for index, ax in enumerate(axes):
        start, (label, values) = index // len(rows) * _LINE, rows[index % len(rows)]
        part = np.full((1, line), np.nan)
        part[0, : len(values[start : start + _LINE])] = values[start : start + _LINE]
        image = ax.imshow(part, aspect="auto", interpolation="nearest", **colours)
        without_frame(ax)
        ax.set_yticks([0], [label], fontsize=8)
        ax.tick_params(length=0)
        if index % len(rows) == len(rows) - 1:
            _words_below(ax, words, start, answer)
        else:
            ax.set_xticks([])
    scale_below(figure, image, axes, min(float(values.min()) for _, values in rows))
    return figure


def _words_below(ax: Any, words: Sequence[str], start: int, answer: tuple[int, int] | None) -> None:
    line = words[start : start + _LINE]
    ax.set_xticks(range(len(line)), [_label(word)[:18] for word in line], rotation=90, fontsize=7)
    for index, label in enumerate(ax.get_xticklabels()):
        if answer is not None and answer[0] <= start + index < answer[1]:
            label.set(fontweight="bold", color=COLOURS[1])


def _label(word: str) -> str:
    """Return a token as a label, without matplotlib's mathematics."""
    return word.strip().replace("$", r"\$") or "␣"


def _join_tiles(cells: Sequence[Sequence[Any]]) -> np.ndarray:
    """Join cells [rows][columns] of [h, w] in one picture, with gaps of NaN; small maps are enlarged."""
    height, width = np.shape(cells[0][0])
    times = max(1, 24 // max(height, width))
    gap = max(1, round(0.08 * times * max(height, width)))
    rows = []
    for row in cells:
        enlarged = [np.kron(np.asarray(cell, dtype=float), np.ones((times, times))) for cell in row]
        rows.append(np.concatenate([np.pad(cell, (0, gap), constant_values=np.nan) for cell in enlarged], axis=1))
    return np.concatenate(rows)


def _limit(pictures: Iterable[np.ndarray], percentile: float = 99.5) -> float:
    """Return the top of a scale, in percent of a row of attention."""
    values = np.concatenate([np.abs(picture[np.isfinite(picture)]).ravel() for picture in pictures] or [np.ones(1)])
    return max(100 * float(np.percentile(values, percentile)), 1e-9)
