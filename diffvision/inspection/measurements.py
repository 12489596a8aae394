"""Measurements of one model on one input: numbers by layer and head, and the maps to show.

Inputs are made in `inputs`; means over several inputs are in `mean_numbers`, pictures in `inspection_page`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffvision.analysis import statistics
from diffvision.analysis.maps import LayerMaps, find_patches, open_layers
from diffvision.analysis.relevance import caption_relevance
from diffvision.analysis.sinks import OUTLIER, SINK, measure_sinks, relative_norms
from diffvision.inspection.inputs import Passage, TransformedPicture, share_by_patch

THUMBNAIL = 32  # tokens a side of a single head's map of a text

Numbers = dict[str, list[float]]
"""{number, or number/kind of map: one value per head}."""


@dataclass(frozen=True)
class Focus:
    """The queries and keys among N tokens for which attention is shown and summed up.

    Attributes:
        readers: queries of which attention is shown: the class token, all patches, or a text's last token.
        keys: tokens over which it is shown: patches, or all tokens of a text.
        sink: [N], 1 for tokens without content (class and register tokens, a text's first token).
        places: by name, the tokens whose share of the attention is measured.
        noise: [keys], the part of each that is outside of the object or the answer, 0 to 1; None if that is unknown.
    """

    readers: slice
    keys: slice
    sink: Tensor
    places: dict[str, slice | list[int]]
    noise: Tensor | None = None


@dataclass(frozen=True)
class LayerMeasurement:
    """The measurements of one layer on one input.

    Kinds of maps are "map 1", "map 2" and "difference", or "attention" in standard layers.
    """

    name: str
    numbers: Numbers
    read: dict[str, Tensor]  # by kind, [H, keys]: rows of the readers, their mean
    whole: dict[str, Tensor]  # by kind, texts only: [N, N], mean over heads
    heads: dict[str, Tensor]  # by kind, [H, r, c]: what each head's picture is of


@dataclass(frozen=True)
class Measurement:
    """The measurements of one model on one image or text.

    Attributes:
        tower: "image", "caption" or "text".
        title: of the input.
        layers: in the model's order.
        grid: rows and columns of patches, images only.
        relevance: by caption, [rows, columns], shares that sum to 1, and its cosine with the image.
    """

    tower: str
    title: str
    layers: list[LayerMeasurement]
    grid: tuple[int, int] | None = None
    relevance: dict[str, tuple[Tensor, float]] | None = None


def measure_image(
    model: nn.Module, picture: TransformedPicture, title: str, captions: Iterable[Passage]
) -> Measurement:
    """Measure an image tower on an image.

    Args:
        model: a timm or OpenCLIP model.
        picture: the image as the model gets it.
        title: name of the image.
        captions: texts to show the relevance of.
    """
    device = next(model.parameters()).device
    image = picture.tensor.to(device)
    patches = find_patches(model, image)
    rows, columns, first, count = patches.rows, patches.columns, patches.first, patches.rows * patches.columns
    noise = None if picture.inside is None else 1 - share_by_patch(picture.inside, rows, columns)
    places: dict[str, slice | list[int]] = {"class": slice(0, 1)} if patches.has_class else {}
    if first > patches.has_class:
        places["registers"] = slice(int(patches.has_class), first)
    places["corners"] = [first, first + columns - 1, first + count - columns, first + count - 1]
    focus = Focus(
        readers=slice(0, 1) if patches.has_class else slice(first, None),
        keys=slice(first, None),
        sink=torch.cat([torch.ones(first), torch.zeros(count)]),
        places=places,
        noise=noise,
    )
    layers = [_measure_layer(layer, focus, (rows, columns)) for layer in open_layers(model, {"image": image[None]})]
    relevance = {}
    for passage in captions:
        (grid,), (cosine,) = caption_relevance(model, image, passage.tokens[None].to(device))
        relevance[passage.name] = (grid.cpu() / grid.sum().clamp(min=1e-30).cpu(), cosine.item())
    return Measurement("image", title, layers, (rows, columns), relevance)


def measure_text(model: nn.Module, passage: Passage, tower: str = "text") -> Measurement:
    """Measure a language model on a text, or the text tower ("caption") of an OpenCLIP model on a caption.

    Padding is left out if the tower is causal.
    """
    tokens = passage.tokens[None].to(next(model.parameters()).device)
    layers = [
        _measure_layer(layer.first(len(passage.words)) if layer.causal else layer, _text_focus(passage), None)
        for layer in open_layers(model, {"tokens" if tower == "text" else "text": tokens})
    ]
    return Measurement(tower, passage.name, layers)


def _text_focus(passage: Passage) -> Focus:
    """Look at what the last token reads; the first token is the sink, and words outside the answer are noise."""
    count = len(passage.words)
    sink = torch.zeros(count)
    sink[0] = 1
    noise = None
    if passage.answer is not None:
        noise = 1 - sink
        noise[slice(*passage.answer)] = 0
    return Focus(slice(count - 1, count), slice(None), sink, {"first": slice(0, 1)}, noise)


def _measure_layer(layer: LayerMaps, focus: Focus, grid: tuple[int, int] | None) -> LayerMeasurement:
    """Return one layer's numbers, what its readers read, and its maps for the page."""
    weights = layer.weights
    kinds = {kind: maps.float().cpu() for kind, maps in layer.by_kind().items()}
    focus = _pad(focus, weights.shape[-1])
    numbers = {
        key: value for kind, maps in kinds.items() for key, value in _measure_maps(kind, maps, layer.causal, focus)
    }
    if focus.noise is not None:
        numbers["noise/chance"] = [focus.noise.mean().item()]  # uniform attention
    numbers |= _measure_heads(layer, weights) | _measure_sinks(layer, focus)
    read = {kind: maps[:, focus.readers, focus.keys].mean(dim=1) for kind, maps in kinds.items()}
    if grid is not None:
        whole, heads = {}, {kind: rows.unflatten(-1, grid) for kind, rows in read.items()}
    else:
        whole = {kind: maps.mean(dim=0) for kind, maps in kinds.items()}
        size = min(THUMBNAIL, weights.shape[-1])
        heads = {kind: F.adaptive_avg_pool2d(maps[None], size)[0] for kind, maps in kinds.items()}
    return LayerMeasurement(layer.name, numbers, read, whole, heads)


def _pad(focus: Focus, tokens: int) -> Focus:
    """Return the focus extended by padding, which a tower that is not causal attends to; padding is not a sink."""
    missing = tokens - len(focus.sink)
    return focus if not missing else Focus(focus.readers, focus.keys, F.pad(focus.sink, (0, missing)), focus.places)


def _measure_maps(kind: str, maps: Tensor, causal: bool, focus: Focus) -> Iterable[tuple[str, list[float]]]:
    """Yield the numbers of one kind of map [H, N, N], one value per head."""
    yield f"entropy/{kind}", statistics.entropy(maps).mean(-1).tolist()
    yield f"relative_entropy/{kind}", statistics.relative_entropy(maps, causal=causal).nanmean(-1).tolist()
    yield f"effective_rank/{kind}", statistics.effective_rank(maps).tolist()
    yield f"rank/{kind}", statistics.numerical_rank(maps).tolist()
    yield f"sink/{kind}", statistics.share_on_keys(maps, focus.sink).mean(-1).tolist()
    yield f"largest_column/{kind}", statistics.largest_column(maps).tolist()
    if focus.noise is not None:
        rows = maps[:, focus.readers, focus.keys]
        yield f"noise/{kind}", statistics.share_on_keys(rows, focus.noise).mean(-1).tolist()
    yield f"redundancy/{kind}", [statistics.head_redundancy(maps).item()]  # of the layer
    if kind in ("difference", "attention"):
        yield "row_sum", statistics.row_sums(maps).mean(-1).tolist()
        yield "negative", statistics.negative_share(maps, causal=causal).tolist()


@torch.no_grad()
def _measure_heads(layer: LayerMaps, weights: Tensor) -> Numbers:
    """Return lambda, and the sizes of the heads' outputs before and after the head norm."""
    numbers = {}
    if layer.lam is not None:
        numbers["lambda"] = layer.lam.mean(dim=(1, 2)).tolist()
    if layer.values is not None:
        for name, heads in zip(("before", "after", "given"), layer.outputs(weights), strict=True):
            numbers[f"rms_{name}"] = statistics.rms(heads).mean(-1).tolist()
    return numbers


@torch.no_grad()
def _measure_sinks(layer: LayerMaps, focus: Focus) -> Numbers:
    """Return where the attention goes, what its sinks are for, and how far the block's input has outliers."""
    sinks = measure_sinks(layer)
    numbers = {f"on_{name}": sinks.share_by_key[:, tokens].sum(-1).tolist() for name, tokens in focus.places.items()}
    numbers |= {f"heads_{kind}": heads.float().tolist() for kind, heads in sinks.kinds().items()}
    if sinks.outputs is not None:
        numbers["sink_value"] = sinks.value.where(sinks.share >= SINK, torch.nan).tolist()
        numbers["common"] = sinks.shared_fraction.tolist()
        numbers["output_rank"] = statistics.effective_rank(sinks.outputs).tolist()
    if layer.hidden is not None:
        norms = relative_norms(layer.hidden)
        outliers = norms > OUTLIER
        numbers["norm_ratio"] = [norms.max().item()]
        numbers["outliers"] = [outliers.float().mean().item()]
        numbers["on_outliers"] = sinks.share_by_key[:, outliers].sum(-1).tolist()
        numbers["kurtosis"] = [statistics.kurtosis(layer.hidden.float()).item()]
    return numbers
