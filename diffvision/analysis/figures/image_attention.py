"""Figures of attention on images: maps next to the image, of one or several models, with a shared colour scale.

Maps of many layers and heads are in `mosaics`. Kinds of maps are "map 1", "map 2" and "difference", or "attention" in
models with one map.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diffvision.analysis.figures.style import (
    colours_of,
    pictures,
    scale,
    scale_below,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ImageAttention(NamedTuple):
    """An image and a layer's attention on it: a row of `attention_panels`."""

    image: Any  # [h, w, 3], 0..1 or uint8
    maps: Any  # [3, rows, columns]: map 1, map 2, map 1 - lambda * map 2; or [1, rows, columns], a standard layer's
    label: str = ""


class ModelAttention(NamedTuple):
    """A model's attention on an image, and the relevance of its patches to captions: a row of `compared_models`."""

    maps: Mapping[str, Any]  # {kind: [rows, columns]}
    relevance: Mapping[str, tuple[Any, float]]  # {caption: ([rows, columns], cosine)}


@styled
def attention_panels(models: Mapping[str, Sequence[ImageAttention]], title: str = "") -> Figure:
    """Return a figure of images, each next to the models' attention on it; all maps share a colour scale.

    Dark is zero, bright is high, blue is below zero, in percent of a row of attention.

    Args:
        models: by name, their maps of the same images.
        title: of the figure.
    """
    first = next(iter(models.values()))
    columns = [(name, kind) for name, rows in models.items() for kind in range(len(rows[0].maps))]
    several = len(models) > 1
    # Room for the name of a model with one map
    width = max([1.02, *(0.1 * len(name) for name, rows in models.items() if several and len(rows[0].maps) == 1)])
    figure, grid = pictures(len(first), 1 + len(columns), width=width, height=1.02, margin=(0.3, 0.75 + 0.2 * several))
    limit = _limit([row.maps for rows in models.values() for row in rows])
    colours = colours_of(models)
    for index, axes in enumerate(grid):
        _draw(axes[0], first[index].image, None, limit)
        axes[0].set_ylabel(first[index].label)
        for ax, (name, kind) in zip(axes[1:], columns, strict=True):
            drawn = _draw(ax, first[index].image, models[name][index].maps[kind], limit)
    line = " \n" if several else ""
    grid[0, 0].set_title(f"{line}image")
    for ax, (name, kind) in zip(grid[0, 1:], columns, strict=True):
        kinds = ("map 1", "map 2", "difference") if len(models[name][0].maps) > 1 else ("attention",)
        ax.set_title(line + kinds[kind])
        if several and kind == 0:
            _name_above(ax, name, colours[name], 20)
    lowest = min(float(np.min(row.maps)) for rows in models.values() for row in rows)
    scale_below(figure, drawn, grid.ravel().tolist(), 100 * lowest)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _name_above(ax: Any, name: str, colour: str, points: float) -> None:
    """Write a model's name above the left edge of a picture, after a mark in its colour."""
    for text, right, mark in (("■", 0, {"color": colour}), (name, 12, {"fontweight": "bold"})):
        where: Any = {"xycoords": "axes fraction", "xytext": (right, points), "textcoords": "offset points"}
        ax.annotate(text, (0, 1), **where, **mark).set_in_layout(False)


@styled
def compared_models(image: Any, models: Mapping[str, ModelAttention], region: Any | None = None) -> Figure:
    """Return an image, and one row per model with its maps over the image; all share a colour scale.

    Dark is zero, bright is high, blue is below zero, in percent of a row of attention.

    Args:
        image: [h, w, 3], 0 to 1, as the models see it.
        models: by name.
        region: [h, w]; its border is drawn. None draws none.
    """
    widest = max(len(model.maps) for model in models.values())
    figure, grid = pictures(len(models), 1 + widest, width=1.35, height=1.5, margin=(0.4, 0.75))
    limit = _limit([values for model in models.values() for values in model.maps.values()])
    for axes, (name, model) in zip(grid, models.items(), strict=True):
        _draw(axes[0], image, None, limit)
        if region is not None and 0 < float(np.mean(region)) < 1:
            axes[0].contour(np.asarray(region), levels=[0.5], colors="white", linewidths=0.9)
        axes[0].set_ylabel(name, fontweight="bold")
        for ax, (kind, values) in zip(axes[1:], model.maps.items(), strict=False):
            drawn = _draw(ax, image, values, limit)
            ax.set_title(kind)
    grid[0, 0].set_title("image")
    lowest = min(float(np.min(values)) for model in models.values() for values in model.maps.values())
    scale_below(figure, drawn, grid.ravel().tolist(), 100 * lowest)
    return figure


@styled
def relevance_panels(image: Any, models: Mapping[str, ModelAttention]) -> Figure:
    """Return, for each model and caption, how much each part of an image counts for the caption, over the image.

    All share a colour scale: dark is zero, bright is high, in percent of the whole image's relevance.

    Args:
        image: [h, w, 3], 0 to 1, as the models see it.
        models: by name; at least one has relevance.
    """
    captions = list(dict.fromkeys(caption for model in models.values() for caption in model.relevance))
    size: Any = {"width": 1.6, "height": 1.8, "margin": (0.4, 0.9)}
    one = len(captions) == 1  # models are then next to each other
    figure, grid = pictures(*((1, len(models)) if one else (len(models), len(captions))), **size)
    limit = _limit([values for model in models.values() for values, _ in model.relevance.values()])
    for axes, (name, model) in zip(grid.T if one else grid, models.items(), strict=True):
        if one:
            axes[0].set_title(name, fontweight="bold")
        else:
            axes[0].set_ylabel(name, fontweight="bold")
        for ax, caption in zip(axes, captions, strict=True):
            if caption in model.relevance:
                values, cosine = model.relevance[caption]
                drawn = _draw(ax, image, values, limit, signed=False)
                ax.set_xlabel(f"cosine {cosine:.2f}")
    if one:
        figure.suptitle(_wrap_caption(f"“{captions[0]}”", 60), fontsize=9)
    else:
        for ax, caption in zip(grid[0], captions, strict=True):
            ax.set_title(_wrap_caption(caption), fontsize=9)
    scale_below(figure, drawn, grid.ravel().tolist(), 0, "% of the caption's relevance")
    return figure


def _limit(maps: Sequence[Any]) -> float:
    """Return the top of a scale in percent; the few highest values are above it, so that the others are not dark."""
    return max(100 * float(np.percentile(np.concatenate([np.abs(values).ravel() for values in maps]), 95)), 1e-7)


def _draw(ax: Any, image: Any, values: Any, limit: float, signed: bool = True) -> Any:
    """Draw an image, or its map: smooth, over the dimmed grey image, and the less of it shows the more there is."""
    height, width = np.shape(image)[:2]
    whole: Any = {"extent": (0, width, height, 0)}
    if values is None:
        return ax.imshow(np.asarray(image), interpolation="nearest", **whole)
    percent = 100 * np.asarray(values, dtype=float)
    scaled = np.asarray(image) / (255 if np.asarray(image).dtype == np.uint8 else 1)
    grey = scaled @ np.array([0.299, 0.587, 0.114])
    ax.imshow(0.5 * grey, cmap="gray", vmin=0, vmax=1, interpolation="nearest", **whole)
    opacity = np.clip(0.35 + 0.65 * np.abs(percent) / limit, 0, 1)
    return ax.imshow(percent, alpha=opacity, interpolation="bicubic", **whole, **scale(signed, limit))


def _wrap_caption(text: str, width: int = 24) -> str:
    """Return a caption in lines, at most three."""
    lines = textwrap.wrap(text.replace("$", r"\$"), width, max_lines=3, placeholder=" …")
    return "\n".join(lines)
