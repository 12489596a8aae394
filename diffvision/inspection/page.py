"""The page: figures of all that was looked at, and one HTML file with them inside."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffvision.analysis import mosaics, panels
from diffvision.analysis.mosaics import Tiles
from diffvision.analysis.panels import Looked
from diffvision.inspection.inputs import Passage, Seen
from diffvision.inspection.measurements import LayerLook, Look
from diffvision.inspection.summary import TOWERS, Curves, Looks, curves, layer_curves, norm_curves, table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.2rem; border-top: 1px solid #ddd; padding-top: 1rem; }
img { max-width: 100%; height: auto; } p, figcaption, td.says { color: #555; } figure { margin: 1rem 0; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { text-align: left; padding: .2rem .9rem .2rem 0; }
th { border-bottom: 1px solid #999; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
details { margin: .6rem 0; } summary { cursor: pointer; color: #0059a0; }
"""


@dataclass
class Figure:
    """A picture of the page, and the file that it is as well."""

    name: str  # of the file, without .png
    caption: str
    png: bytes
    details: bool = False  # shown when asked for


@dataclass
class Section:
    """A heading with a table and figures."""

    title: str
    numbers: Curves | None = None
    figures: list[Figure] = field(default_factory=list)


def sections(
    looks: Looks, seen: Mapping[str, Mapping[str, Seen]], passages: Mapping[str, Passage], watch: Callable[[], None]
) -> list[Section]:
    """All figures of some models' looks.

    Args:
        looks: by model; all models have looked at the same inputs.
        seen: by model and title, the pictures as each sees them.
        passages: by title, the captions or texts.
        watch: called after each section.
    """
    made = []
    for tower in TOWERS:
        if any(look.tower == tower for own in looks.values() for look in own):
            made.append(_numbers(looks, tower))
            watch()
    first = next(iter(looks.values()))
    for place, look in enumerate(first):
        same = {model: own[place] for model, own in looks.items()}
        name = f"{look.tower}-{1 + sum(other.tower == look.tower for other in first[:place])}"
        if look.tower == "image":
            made.append(_image(name, same, {model: own[look.title] for model, own in seen.items()}))
        else:
            made.append(_text(name, same, passages[look.title]))
        watch()
    return made


def page(title: str, about: Sequence[str], made: Sequence[Section]) -> str:
    """One HTML file with its pictures inside; it refers to nothing else.

    Args:
        about: lines below the title.
    """
    body = "".join(f"<p>{html.escape(line)}</p>\n" for line in about)
    body += "".join(_section(section) for section in made)
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


def _table(numbers: Curves) -> str:
    models = list(dict.fromkeys(model for kinds in numbers.values() for model in kinds))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("mean over layers and heads", *models, ""))
    rows = "".join(
        f"<tr><td>{html.escape(title)}</td>"
        + "".join(f'<td class="n">{html.escape(shown.get(model, ""))}</td>' for model in models)
        + f'<td class="says">{html.escape(says)}</td></tr>\n'
        for title, says, shown in table(numbers)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>\n"


# ---- figures -------------------------------------------------------------------------------------------------------


def _numbers(looks: Looks, tower: str) -> Section:
    found = curves(looks, tower)
    count = max(sum(look.tower == tower for look in own) for own in looks.values())
    over = f"mean over {count} inputs" if count > 1 else "of one input"
    told = f"Numbers by layer, {over}: lines are means over heads, dots are heads of what is applied to the values."
    figures = [Figure(f"layers-{tower}", told, panels.layer_panels(layer_curves(found)))]
    if norms := norm_curves(found):
        told = "Head outputs: root mean square before and after the head norm and the factor, by layer; dots are heads."
        figures.append(Figure(f"norm-{tower}", told, panels.layer_panels(norms)))
    return Section(f"{TOWERS[tower]}: numbers", found, figures)


def _image(name: str, looks: Mapping[str, Look], seen: Mapping[str, Seen]) -> Section:
    first = next(iter(looks.values()))
    shown = next(iter(seen.values()))
    compared = {
        model: Looked(
            {kind: maps.mean(0).numpy() for kind, maps in look.layers[-1].heads.items()},
            {caption: (grid.numpy(), cosine) for caption, (grid, cosine) in (look.relevance or {}).items()},
        )
        for model, look in looks.items()
    }
    region = None if shown.inside is None else shown.inside.numpy()
    told = "Where the last layer looks, mean over heads"
    told += ", and which patches answer the caption (gradient-weighted attention)." if first.relevance else "."
    told += " The white line is the object." if region is not None else ""
    figures = [Figure(name, told, panels.compared_looks(shown.shown, compared, region))]
    blocks = _by_layer(looks, lambda layer: {kind: maps.mean(0) for kind, maps in layer.heads.items()})
    figures.append(_layers(name, looks, blocks))
    return Section(f"Image: {first.title}", None, figures + _by_head(name, looks))


def _text(name: str, looks: Mapping[str, Look], passage: Passage) -> Section:
    reads = {
        model: {kind: rows.mean(0).numpy()[: len(passage.words)] for kind, rows in look.layers[-1].read.items()}
        for model, look in looks.items()
    }
    told = "What the last token attends to in the last layer, mean over heads"
    told += "; the answer's words are bold." if passage.answer else "."
    figures = [Figure(name, told, mosaics.text_strips(passage.words, reads, passage.answer))]
    figures.append(_layers(name, looks, _by_layer(looks, lambda layer: layer.whole)))
    tower = TOWERS[next(iter(looks.values())).tower]
    return Section(f"{tower}: {_short(passage.name)}", None, figures + _by_head(name, looks))


def _layers(name: str, looks: Mapping[str, Look], blocks: list[Tiles]) -> Figure:
    deepest = max(len(look.layers) for look in looks.values())
    png = mosaics.mosaics(blocks, list(map(str, range(deepest))), "layer")
    return Figure(f"{name}-layers", "Every layer, mean over heads, percent of a row of attention.", png)


def _by_layer(looks: Mapping[str, Look], of: Callable[[LayerLook], Mapping[str, Any]]) -> list[Tiles]:
    """A block a model and sign: rows are kinds, columns layers."""
    blocks = []
    for model, look in looks.items():
        rows = {kind: [of(layer)[kind].numpy() for layer in look.layers] for kind in of(look.layers[0])}
        for signed in (False, True):
            own = {kind: cells for kind, cells in rows.items() if (kind == "difference") is signed}
            if own:
                blocks.append(Tiles(model, signed, list(own.values()), list(own)))
    return blocks


def _by_head(name: str, looks: Mapping[str, Look]) -> list[Figure]:
    """A picture a model and kind: rows are heads, columns layers."""
    figures = []
    for number, (model, look) in enumerate(looks.items()):
        for kind in look.layers[0].heads:
            heads = max(len(layer.heads[kind]) for layer in look.layers)
            cells = [[layer.heads[kind][head].numpy() for layer in look.layers] for head in range(heads)]
            block = Tiles(f"{model}: {kind}", kind == "difference", cells, [f"head {head}" for head in range(heads)])
            png = mosaics.mosaics([block], list(map(str, range(len(look.layers)))), "layer")
            file = f"{name}-heads-{number + 1}-{kind.replace(' ', '-')}"
            figures.append(Figure(file, f"By head: {model}, {kind}", png, details=True))
    return figures


def _short(text: str, most: int = 70) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
