"""The page of an inspection: figures of all measurements, embedded in one HTML file.

The figures themselves are drawn in `analysis.figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from diffvision.analysis import html_page as html
from diffvision.analysis.figures.image_attention import (
    ModelAttention,
    compared_models,
    relevance_panels,
)
from diffvision.analysis.figures.layer_panels import layer_panels
from diffvision.analysis.figures.mosaics import Block, mosaic, text_strips
from diffvision.inspection.inputs import Passage, TransformedPicture
from diffvision.inspection.mean_numbers import (
    TOWERS,
    LayerNumbers,
    Measurements,
    mean_numbers,
    norm_panels,
    number_panels,
    table,
)
from diffvision.inspection.measurements import LayerMeasurement, Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "Means over layers and heads. “Difference” is what multiplies the values in differential layers, map 1 − λ map 2; "
    "“attention” is the one map of standard layers. Entropy, sinks and noise are of a row's magnitudes, as shares of "
    "their sum. In brackets: map 1, map 2. All numbers by head are in statistics.json."
)

Files = dict[str, bytes]
"""PNG files by name."""


def draw(
    measurements: Measurements,
    pictures: Mapping[str, Mapping[str, TransformedPicture]],
    passages: Mapping[str, Passage],
) -> tuple[list[html.Section], Files]:
    """Return the page's sections (pictures, curves over the layers, tables of all numbers) and the pictures as files.

    Args:
        measurements: by model; all models have the same inputs.
        pictures: by model and title, the images as each model gets them.
        passages: by title, the captions or texts.
    """
    files: Files = {}
    sections, tables = [], []
    first = next(iter(measurements.values()))
    for index, one in enumerate(first):
        of_input = {model: inputs[index] for model, inputs in measurements.items()}
        name = f"{one.tower}-{1 + sum(other.tower == one.tower for other in first[:index])}"
        if one.tower == "image":
            images = {model: by_title[one.title] for model, by_title in pictures.items()}
            sections.append(_image(files, name, of_input, images))
        else:
            sections.append(_text(files, name, of_input, passages[one.title]))
    for tower, title in TOWERS.items():
        if any(one.tower == tower for inputs in measurements.values() for one in inputs):
            numbers = mean_numbers(measurements, tower)
            count = max(sum(one.tower == tower for one in inputs) for inputs in measurements.values())
            sections += [_curves(files, tower, numbers, count), _sinks(files, tower, numbers)]
            tables.append(_table(f"{title}, layer by layer", numbers))
    if tables:
        sections.append(html.Section("All numbers", [html.Text(NOTE), *tables]))
    return sections, files


def _picture(files: Files, name: str, figure: Figure, caption: str) -> html.Picture:
    """Return a figure for the page, and keep it as a file of that name too."""
    picture = html.Picture(figure, caption)
    files[f"{name}.png"] = picture.png
    return picture


def _table(title: str, numbers: LayerNumbers) -> html.Table:
    models = list(dict.fromkeys(model for kinds in numbers.values() for model in kinds))
    rows = [[name, *(cells.get(model, "–") for model in models), says] for name, says, cells in table(numbers)]
    return html.Table([title, *models, ""], rows)


# ---- figures -------------------------------------------------------------------------------------------------------


def _curves(files: Files, tower: str, numbers: LayerNumbers, count: int) -> html.Section:
    over = f"mean over {count} inputs" if count > 1 else "of one input"
    caption = f"How the maps change from layer to layer, {over}: lines are means over heads, dots are heads."
    parts: list[html.Part] = [
        _picture(files, f"layers-{tower}", layer_panels(number_panels(numbers, "layers")), caption)
    ]
    if norms := norm_panels(numbers):
        caption = "How large a head's output is before and after the head norm and the factor: its root mean square."
        parts.append(_picture(files, f"norm-{tower}", layer_panels(norms), caption))
    return html.Section(f"{TOWERS[tower]}, layer by layer", parts)


def _sinks(files: Files, tower: str, numbers: LayerNumbers) -> html.Section:
    """Return the section on sinks: what sinks do, and where the attention goes."""
    text = (
        "A head has a sink if one token receives 30% or more of its attention, mean over the queries. The sink is NOP "
        "if its value is below half of the median, so that the head adds little; it is broadcast if more than half of "
        "the head's output is the same for all queries. It may be both, or neither. A sink is not a fault by itself."
    )
    parts: list[html.Part] = [html.Text(text)]
    captions = {
        "sinks": "What the sinks of each layer do, and the outliers of the block's input: lines are means over heads.",
        "places": "Where the attention of each layer goes, as a share of all queries' attention.",
    }
    for name, caption in captions.items():
        parts.append(_picture(files, f"{name}-{tower}", layer_panels(number_panels(numbers, name)), caption))
    return html.Section(f"{TOWERS[tower]}, sinks", parts)


def _image(
    files: Files, name: str, models: Mapping[str, Measurement], pictures: Mapping[str, TransformedPicture]
) -> html.Section:
    first = next(iter(models.values()))
    picture = next(iter(pictures.values()))
    compared = {
        model: ModelAttention(
            {kind: maps.mean(0).numpy() for kind, maps in one.layers[-1].heads.items()},
            {caption: (grid.numpy(), cosine) for caption, (grid, cosine) in (one.relevance or {}).items()},
        )
        for model, one in models.items()
    }
    region = None if picture.inside is None else picture.inside.numpy()
    caption = (
        "Where the last layer looks on the image, mean over heads: dark is zero, bright is high, blue is below zero."
    )
    caption += " The white line is the object." if region is not None else ""
    parts: list[html.Part] = [_picture(files, name, compared_models(picture.shown, compared, region), caption)]
    if first.relevance:
        caption = "What the cosine of image and caption depends on, to first order: gradient-weighted attention."
        parts.append(_picture(files, f"{name}-captions", relevance_panels(picture.shown, compared), caption))
    blocks = _by_layer(models, lambda layer: {kind: maps.mean(0) for kind, maps in layer.heads.items()})
    parts += [_layers(files, name, models, blocks), *_by_head(files, name, models)]
    return html.Section(f"Image: {first.title}", parts)


def _text(files: Files, name: str, models: Mapping[str, Measurement], passage: Passage) -> html.Section:
    reads = {
        model: {kind: rows.mean(0).numpy()[: len(passage.words)] for kind, rows in one.layers[-1].read.items()}
        for model, one in models.items()
    }
    caption = "What the last token reads in the last layer, mean over heads"
    caption += "; the answer's words are bold." if passage.answer else "."
    parts: list[html.Part] = [_picture(files, name, text_strips(passage.words, reads, passage.answer), caption)]
    blocks = _by_layer(models, lambda layer: layer.whole)
    parts += [_layers(files, name, models, blocks), *_by_head(files, name, models)]
    tower = TOWERS[next(iter(models.values())).tower]
    return html.Section(f"{tower}: {_short(passage.name)}", parts)


def _layers(files: Files, name: str, models: Mapping[str, Measurement], blocks: list[Block]) -> html.Picture:
    deepest = max(len(one.layers) for one in models.values())
    caption = "The same for every layer, mean over heads, from the first layer to the last."
    return _picture(files, f"{name}-layers", mosaic(blocks, list(map(str, range(deepest))), "layer"), caption)


def _by_layer(
    models: Mapping[str, Measurement], maps_of: Callable[[LayerMeasurement], Mapping[str, Any]]
) -> list[Block]:
    """Return one block per model: rows are kinds of maps, columns layers."""
    blocks = []
    for model, one in models.items():
        layers = [{kind: maps.numpy() for kind, maps in maps_of(layer).items()} for layer in one.layers]
        blank = np.full_like(next(iter(layers[0].values())), np.nan)
        rows = {kind: [layer.get(kind, blank) for layer in layers] for kind in _kinds(layers)}
        blocks.append(Block(model, list(rows.values()), list(rows)))
    return blocks


def _by_head(files: Files, name: str, models: Mapping[str, Measurement]) -> list[html.Folded]:
    """Return for each model one picture per kind of map: rows are heads, columns layers."""
    folded = []
    for number, (model, one) in enumerate(models.items(), start=1):
        pictures = []
        for kind in _kinds([layer.heads for layer in one.layers]):
            layers = [list(layer.heads.get(kind, ())) for layer in one.layers]
            heads = max(map(len, layers))
            blank = np.full_like(next(iter(one.layers[0].heads.values()))[0].numpy(), np.nan)
            cells = [[maps[i].numpy() if i < len(maps) else blank for maps in layers] for i in range(heads)]
            block = Block(f"{model}: {kind}", cells, [f"head {head}" for head in range(heads)])
            figure = mosaic([block], list(map(str, range(len(one.layers)))), "layer")
            file = f"{name}-heads-{number}-{kind.replace(' ', '-')}"
            pictures.append(_picture(files, file, figure, f"The {kind} of every head of {model}."))
        folded.append(html.Folded(f"By head: {model}", pictures))
    return folded


def _kinds(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the kinds of maps that the layers have; with `variant_by_layer` not all have the same."""
    return list(dict.fromkeys(kind for layer in layers for kind in layer))


def _short(text: str) -> str:
    return text if len(text) <= 70 else f"{text[:69]}…"
