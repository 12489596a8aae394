"""Figures of attention on images: maps next to the image, of one model or of several on one scale.

Maps of many layers and heads are in `mosaics`. Kinds of maps are "map 1", "map 2" and "difference", or "attention" in
models with one map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diffvision.analysis.figures.style import SIGNED, colour_bar, pictures, scale, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ImageAttention(NamedTuple):
    """An image and where a layer looks on it: a row of `attention_panels`."""

    image: Any  # [h, w, 3], 0..1 or uint8
    maps: Any  # [3, rows, columns]: map 1, map 2, map 1 - lambda * map 2; or [1, rows, columns], a standard layer's
    label: str = ""


class ModelAttention(NamedTuple):
    """Where a model looks on an image, and what answers captions there: a row of `compared_models`."""

    maps: Mapping[str, Any]  # {kind: [rows, columns]}
    relevance: Mapping[str, tuple[Any, float]]  # {caption: ([rows, columns], cosine)}


@styled
def attention_panels(rows: Sequence[ImageAttention], title: str = "") -> Figure:
    """Return images next to their attention: image, map 1, map 2, and the difference, with colours centred at 0.

    The two maps of a row share one scale, and its difference has another; both are printed next to the row, in percent
    of a row of attention.
    """
    columns = max(len(row.maps) for row in rows) + 1
    figure, grid = pictures(len(rows), columns, width=1.75, height=1.55, margin=(0.6, 0.4))
    heads = ["image", "map 1", "map 2", "map 1 − λ map 2"] if columns > 2 else ["image", "attention"]
    for axes, row in zip(grid, rows, strict=True):
        maps = 100 * np.asarray(row.maps, dtype=float)
        axes[0].imshow(np.asarray(row.image), interpolation="nearest")
        axes[0].set_ylabel(row.label)
        for ax, values in zip(axes[1:], maps[:2], strict=False):
            picture = ax.imshow(values, interpolation="nearest", **scale(False, maps[:2].max()))
        _percent_bar(figure, picture, axes[len(maps[:2])])
        if len(maps) > 2:
            picture = axes[3].imshow(maps[2], interpolation="nearest", **scale(True, _limit(maps[2])))
            _percent_bar(figure, picture, axes[3])
    for ax, head in zip(grid[0], heads, strict=False):
        ax.set_title(head)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _percent_bar(figure: Figure, picture: Any, ax: Any) -> None:
    bar = colour_bar(figure, picture, ax, fraction=0.05, pad=0.03)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")


@styled
def compared_models(image: Any, models: Mapping[str, ModelAttention], region: Any | None = None) -> Figure:
    """Return an image, and one row per model with its maps and each caption's relevance over the image.

    Maps are in percent of a row of attention, relevance in percent of all of it. All maps are on one scale, all
    differences on one, and all relevances on one.

    Args:
        image: [h, w, 3], 0 to 1, as the models see it.
        models: by name.
        region: [h, w]; its border is drawn. None draws none.
    """
    captions = list(dict.fromkeys(caption for model in models.values() for caption in model.relevance))
    widest = max(len(model.maps) for model in models.values())
    figure, grid = pictures(len(models), 1 + widest + len(captions), width=1.62, height=1.85, margin=(0.4, 1.1))
    limits = _limits(list(models.values()))
    drawn: dict[str, Any] = {}
    for axes, (name, model) in zip(grid, models.items(), strict=True):
        axes[0].imshow(image, interpolation="nearest")
        if region is not None and 0 < float(np.mean(region)) < 1:
            axes[0].contour(np.asarray(region), levels=[0.5], colors="white", linewidths=0.9)
        axes[0].set_ylabel(name, fontsize=9)
        for ax, (kind, values) in zip(axes[1:], model.maps.items(), strict=False):
            what = SIGNED if kind == SIGNED else "attention"
            percent = 100 * np.asarray(values)
            drawn[what] = ax.imshow(percent, interpolation="nearest", **scale(kind == SIGNED, limits[what]))
            ax.set_title(kind.replace(SIGNED, "map 1 − λ map 2"), fontsize=9)
        for ax, caption in zip(axes[1 + widest :], captions, strict=True):
            if caption in model.relevance:
                values, cosine = model.relevance[caption]
                drawn["relevance"] = _draw_over(ax, image, values, limits["relevance"])
                ax.set_xlabel(f"cosine {cosine:.2f}", fontsize=8)
    for ax, caption in zip(grid[0, 1 + widest :], captions, strict=True):
        ax.set_title(_wrapped(caption), fontsize=8)
    columns = {"attention": slice(1, 3 if widest > 1 else 2), SIGNED: slice(widest, widest + 1)}
    columns["relevance"] = slice(1 + widest, None)
    labels = {"attention": "attention", SIGNED: "difference", "relevance": "relevance of the caption"}
    for what, picture in drawn.items():
        _bar_below(figure, picture, grid[:, columns[what]].ravel().tolist(), f"{labels[what]}, %")
    return figure


def _limits(models: Sequence[ModelAttention]) -> dict[str, float]:
    """Return the tops of the three scales, in percent."""
    plain = [float(np.max(values)) for model in models for kind, values in model.maps.items() if kind != SIGNED]
    signed = [_limit(values) for model in models for kind, values in model.maps.items() if kind == SIGNED]
    relevance = [float(np.max(values)) for model in models for values, _ in model.relevance.values()]
    return {
        "attention": 100 * max(plain),
        SIGNED: 100 * max(signed, default=1.0),
        "relevance": 100 * max(relevance, default=1.0),
    }


def _limit(values: Any) -> float:
    return max(float(np.abs(values).max()), 1e-9)


def _draw_over(ax: Any, image: Any, values: Any, limit: float) -> Any:
    """Draw a map over the pale grey image: the more there is, the less of the image shows through."""
    height, width = np.shape(image)[:2]
    whole: Any = {"interpolation": "nearest", "extent": (0, width, height, 0)}
    percent = 100 * np.asarray(values, dtype=float)
    ax.imshow(0.35 + 0.65 * (np.asarray(image) @ np.array([0.299, 0.587, 0.114])), cmap="gray", vmin=0, vmax=1, **whole)
    opacity = np.clip(0.1 + 0.75 * percent / max(limit, 1e-9), 0, 1)
    return ax.imshow(percent, cmap="YlOrRd", vmin=0, vmax=limit, alpha=opacity, **whole)


def _bar_below(figure: Figure, picture: Any, axes: Sequence[Any], label: str) -> None:
    layout: Any = {"location": "bottom", "fraction": 0.05, "pad": 0.03, "shrink": min(0.9, 1.6 / len(axes) + 0.4)}
    bar = colour_bar(figure, picture, axes, **layout)
    if bar.solids is not None:
        bar.solids.set_alpha(1)
    bar.set_label(label, fontsize=8)


def _wrapped(text: str, width: int = 24) -> str:
    """Return a caption in lines, at most three."""
    lines = [""]
    for word in text.replace("$", r"\$").split():
        if len(lines[-1]) + len(word) > width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines if len(lines) <= 3 else [*lines[:2], f"{lines[2]} …"])
