"""The page of an inspection: figures of all measurements, embedded in one HTML file.

The figures themselves are drawn in `analysis.figures`.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffvision.analysis.figures import png
from diffvision.analysis.figures.images import ModelAttention, compared_models
from diffvision.analysis.figures.layers import layer_panels
from diffvision.analysis.figures.mosaics import Block, mosaic, text_strips
from diffvision.inspection.inputs import Passage, TransformedPicture
from diffvision.inspection.measurements import LayerMeasurement, Measurement
from diffvision.inspection.summary import (
    TOWERS,
    LayerNumbers,
    Measurements,
    mean_numbers,
    norm_panels,
    number_panels,
    table,
)

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.2rem; border-top: 1px solid #ddd; padding-top: 1rem; }
img { max-width: 100%; height: auto; } p, figcaption, td.says { color: #555; } figure { margin: 1rem 0; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { text-align: left; padding: .2rem .9rem .2rem 0; }
th { border-bottom: 1px solid #999; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
details { margin: .6rem 0; } summary { cursor: pointer; color: #0059a0; }
"""


@dataclass
class PageFigure:
    """A figure of the page, which is also written as a file."""

    name: str  # of the file, without .png
    caption: str
    png: bytes
    details: bool = False  # folded until it is clicked


@dataclass
class Section:
    """A heading with a table and figures."""

    title: str
    numbers: LayerNumbers | None = None
    figures: list[PageFigure] = field(default_factory=list)


def sections(
    measurements: Measurements,
    pictures: Mapping[str, Mapping[str, TransformedPicture]],
    passages: Mapping[str, Passage],
    watch: Callable[[], None],
) -> list[Section]:
    """Draw all figures of some models' measurements.

    Args:
        measurements: by model; all models have the same inputs.
        pictures: by model and title, the images as each model gets them.
        passages: by title, the captions or texts.
        watch: called after each section.
    """
    drawn = []
    for tower in TOWERS:
        if any(one.tower == tower for inputs in measurements.values() for one in inputs):
            drawn.append(_numbers(measurements, tower))
            watch()
    first = next(iter(measurements.values()))
    for index, one in enumerate(first):
        of_input = {model: inputs[index] for model, inputs in measurements.items()}
        name = f"{one.tower}-{1 + sum(other.tower == one.tower for other in first[:index])}"
        if one.tower == "image":
            drawn.append(_image(name, of_input, {model: images[one.title] for model, images in pictures.items()}))
        else:
            drawn.append(_text(name, of_input, passages[one.title]))
        watch()
    return drawn


def page(title: str, about: Sequence[str], drawn: Sequence[Section]) -> str:
    """Return one HTML page with its pictures embedded, without references to other files.

    Args:
        title: of the page.
        about: lines below the title.
        drawn: as `sections` returns them.
    """
    body = "".join(f"<p>{html.escape(line)}</p>\n" for line in about)
    body += "".join(_section(section) for section in drawn)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style></head>
<body>
<h1>{html.escape(title)}</h1>
{body}</body></html>
"""


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>\n"]
    if section.numbers is not None:
        parts.append(_table(section.numbers))
    for figure in section.figures:
        source = f"data:image/png;base64,{base64.b64encode(figure.png).decode()}"
        caption = html.escape(figure.caption)
        image = f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>\n'
        parts.append(f"<details><summary>{caption}</summary>{image}</details>\n" if figure.details else image)
    return "".join(parts)


def _table(numbers: LayerNumbers) -> str:
    models = list(dict.fromkeys(model for kinds in numbers.values() for model in kinds))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("mean over layers and heads", *models, ""))
    rows = "".join(
        f"<tr><td>{html.escape(title)}</td>"
        + "".join(f'<td class="n">{html.escape(cells.get(model, ""))}</td>' for model in models)
        + f'<td class="says">{html.escape(says)}</td></tr>\n'
        for title, says, cells in table(numbers)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>\n"


# ---- figures -------------------------------------------------------------------------------------------------------


def _numbers(measurements: Measurements, tower: str) -> Section:
    numbers = mean_numbers(measurements, tower)
    count = max(sum(one.tower == tower for one in inputs) for inputs in measurements.values())
    over = f"mean over {count} inputs" if count > 1 else "of one input"
    caption = f"Numbers by layer, {over}: lines are means over heads, dots are heads of the applied map."
    figures = [PageFigure(f"layers-{tower}", caption, png(layer_panels(number_panels(numbers))))]
    if norms := norm_panels(numbers):
        caption = "Head outputs: root mean square before and after the head norm and the factor, by layer; dots are "
        figures.append(PageFigure(f"norm-{tower}", f"{caption}heads.", png(layer_panels(norms))))
    return Section(f"{TOWERS[tower]}: numbers", numbers, figures)


def _image(name: str, models: Mapping[str, Measurement], pictures: Mapping[str, TransformedPicture]) -> Section:
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
    caption = "Where the last layer looks, mean over heads"
    caption += ", and which patches answer the caption (gradient-weighted attention)." if first.relevance else "."
    caption += " The white line is the object." if region is not None else ""
    figures = [PageFigure(name, caption, png(compared_models(picture.shown, compared, region)))]
    blocks = _by_layer(models, lambda layer: {kind: maps.mean(0) for kind, maps in layer.heads.items()})
    figures.append(_layers(name, models, blocks))
    return Section(f"Image: {first.title}", None, figures + _by_head(name, models))


def _text(name: str, models: Mapping[str, Measurement], passage: Passage) -> Section:
    reads = {
        model: {kind: rows.mean(0).numpy()[: len(passage.words)] for kind, rows in one.layers[-1].read.items()}
        for model, one in models.items()
    }
    caption = "What the last token attends to in the last layer, mean over heads"
    caption += "; the answer's words are bold." if passage.answer else "."
    figures = [PageFigure(name, caption, png(text_strips(passage.words, reads, passage.answer)))]
    figures.append(_layers(name, models, _by_layer(models, lambda layer: layer.whole)))
    tower = TOWERS[next(iter(models.values())).tower]
    return Section(f"{tower}: {_short(passage.name)}", None, figures + _by_head(name, models))


def _layers(name: str, models: Mapping[str, Measurement], blocks: list[Block]) -> PageFigure:
    deepest = max(len(one.layers) for one in models.values())
    caption = "Every layer, mean over heads, percent of a row of attention."
    return PageFigure(f"{name}-layers", caption, png(mosaic(blocks, list(map(str, range(deepest))), "layer")))


def _by_layer(
    models: Mapping[str, Measurement], maps_of: Callable[[LayerMeasurement], Mapping[str, Any]]
) -> list[Block]:
    """Return one block per model and sign: rows are kinds of maps, columns layers."""
    blocks = []
    for model, one in models.items():
        rows = {kind: [maps_of(layer)[kind].numpy() for layer in one.layers] for kind in maps_of(one.layers[0])}
        for signed in (False, True):
            of_sign = {kind: cells for kind, cells in rows.items() if (kind == "difference") is signed}
            if of_sign:
                blocks.append(Block(model, signed, list(of_sign.values()), list(of_sign)))
    return blocks


def _by_head(name: str, models: Mapping[str, Measurement]) -> list[PageFigure]:
    """Draw one picture per model and kind of map: rows are heads, columns layers."""
    figures = []
    for number, (model, one) in enumerate(models.items(), start=1):
        for kind in one.layers[0].heads:
            heads = max(len(layer.heads[kind]) for layer in one.layers)
            cells = [[layer.heads[kind][head].numpy() for layer in one.layers] for head in range(heads)]
            block = Block(f"{model}: {kind}", kind == "difference", cells, [f"head {head}" for head in range(heads)])
            picture = png(mosaic([block], list(map(str, range(len(one.layers)))), "layer"))
            file = f"{name}-heads-{number}-{kind.replace(' ', '-')}"
            figures.append(PageFigure(file, f"By head: {model}, {kind}", picture, details=True))
    return figures


def _short(text: str, most: int = 70) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
