"""Figures of many small maps, and of attention over a text. Maps share one scale and differences another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from diffvision.analysis.figures.style import COLOURS, SIGNED, colour_bar, scale, styled, without_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINE = 48  # tokens of a text in a line of its strips


@dataclass(frozen=True)
class Block:
    """Rows and columns of small maps of one size: a picture in a mosaic."""

    title: str
    signed: bool
    cells: Sequence[Sequence[Any]]  # [rows][columns] of [h, w]
    rows: Sequence[str] = field(default_factory=list)


@styled
def mosaic(blocks: Sequence[Block], columns: Sequence[str], across: str) -> Figure:
    """Return a figure of many small maps: one picture per block, with rows and columns of cells.

    The scales end at the 99.5th percentile of what is shown, so that one bright cell does not darken the others.

    Args:
        blocks: the pictures, from top to bottom.
        columns: labels below the columns; of a long list every second or so is written.
        across: what the columns are ("layer").
    """
    from diffvision.analysis.figures.figure import StyledFigure

    tiled = [_tiled(block.cells) for block in blocks]
    width = min(10.5, 1.7 * len(columns))
    heights = [max(0.55, width * picture.shape[0] / picture.shape[1]) for picture in tiled]
    if (total := sum(heights)) > 26:
        heights = [26 * height / total for height in heights]
    figure = StyledFigure(figsize=(width + 1.9, sum(heights) + 0.6 * len(blocks) + 0.4), layout="compressed")
    axes = figure.subplots(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    limits = {
        signed: _limit([picture for block, picture in zip(blocks, tiled, strict=True) if block.signed is signed])
        for signed in {block.signed for block in blocks}
    }
    for ax, block, picture in zip(axes, blocks, tiled, strict=True):
        image = ax.imshow(100 * picture, interpolation="nearest", **scale(block.signed, limits[block.signed]))
        without_frame(ax)
        _label_cells(ax, block, picture.shape, columns)
        bar = colour_bar(figure, image, ax, fraction=0.02, pad=0.01, extend="both" if block.signed else "max")
        bar.ax.set_title("%", fontsize=8)
    axes[-1].set_xlabel(across)
    return figure


def _label_cells(ax: Any, block: Block, shape: tuple[int, ...], columns: Sequence[str]) -> None:
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
    from diffvision.analysis.figures.figure import StyledFigure

    rows = [(f"{name}: {kind}", kind == SIGNED, np.asarray(values)) for name, kinds in reads.items()
            for kind, values in kinds.items()]  # fmt: skip
    limits = {signed: _limit([values for _, s, values in rows if s is signed], 100) for signed in (True, False)}
    lines = math.ceil(len(words) / _LINE)
    line = _LINE if lines > 1 else max(len(words), 1)
    width = 3.2 + 0.19 * max(16, line)
    figure = StyledFigure(figsize=(width, lines * (0.24 * len(rows) + 0.85) + 0.5), layout="constrained")
    axes = figure.subplots(lines * len(rows), 1, squeeze=False)[:, 0]
    last: dict[bool, Any] = {}
    for index, ax in enumerate(axes):
        start, (label, signed, values) = index // len(rows) * _LINE, rows[index % len(rows)]
        part = np.full((1, line), np.nan)
        part[0, : len(values[start : start + _LINE])] = 100 * values[start : start + _LINE]
        colours = scale(signed, limits[signed]) | ({} if signed else {"cmap": "magma_r"})
        last[signed] = ax.imshow(part, aspect="auto", interpolation="nearest", **colours)
        without_frame(ax)
        ax.set_yticks([0], [label], fontsize=8)
        ax.tick_params(length=0)
        if index % len(rows) == len(rows) - 1:
            _words_below(ax, words, start, answer)
        else:
            ax.set_xticks([])
    for signed, image in sorted(last.items()):
        bar = colour_bar(figure, image, list(axes), fraction=0.012, pad=0.01)
        bar.set_label("difference, %" if signed else "attention, %", fontsize=8)
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


def _tiled(cells: Sequence[Sequence[Any]]) -> np.ndarray:
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
