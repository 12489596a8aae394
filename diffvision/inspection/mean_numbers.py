"""Means of the measurements for a page's table and curves, and all of them for statistics.json.

Figures and HTML are made in `inspection_page`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diffvision.analysis.figures.layer_panels import LayerPanel
from diffvision.inspection.measurements import Measurement

TOWERS = {"image": "Image tower", "caption": "Text tower", "text": "Text"}
APPLIED = ("difference", "attention")

# number -> (name, meaning)
NAMES = {
    "lambda": ("λ", "what the second map counts; mean over tokens"),
    "row_sum": ("row sum of the attention", "1 − λ in differential layers, 1 in others"),
    "negative": ("share of negative entries", "of the attention"),
    "relative_entropy": ("entropy / log n", "of a row's magnitudes: 1 is attention to all alike, 0 to one token"),
    "entropy": ("entropy, nats", "of a row's magnitudes"),
    "effective_rank": ("effective rank", "exp of the entropy of a map's singular values (Roy and Vetterli 2007)"),
    "rank": ("rank at 1%", "singular values above 1% of the largest"),
    "redundancy": ("head redundancy", "mean cosine similarity of the heads' maps; 1: all alike"),
    "sink": ("mass on sinks", "magnitude on class and register tokens, or a text's first token"),
    "largest_column": ("largest column", "magnitude on the one token that has most of all rows"),
    "heads_sink": ("heads with a sink", "share of heads with 30% or more of their attention on one token"),
    "heads_nop": ("of them NOP", "share of heads whose sink's value is below half of the median"),
    "heads_broadcast": (
        "of them broadcast",
        "share of heads with a sink whose output is mostly the same for all queries",
    ),
    "sink_value": ("a sink's value", "its norm over the median of the head's values; NOP where small"),
    "common": ("common output", "part of a head's output that all queries share; with a sink, broadcast where large"),
    "output_rank": ("rank of the output", "effective rank of a head's outputs"),
    "on_class": ("on the class token", "magnitude, mean over queries"),
    "on_registers": ("on the registers", "magnitude, mean over queries"),
    "on_corners": ("on the corners", "magnitude on the four corner patches, mean over queries"),
    "on_first": ("on the first token", "magnitude, mean over queries"),
    "on_outliers": ("on outlier tokens", "magnitude on tokens with over 3 times the median norm, mean over queries"),
    "outliers": ("outlier tokens", "share of tokens with over 3 times the median norm, of the block's input"),
    "norm_ratio": ("largest over median norm", "of tokens, of the block's input"),
    "kurtosis": ("kurtosis", "of the block's input; 3 is a normal distribution"),
    "noise": ("attention noise", "magnitude outside of the object, or of a text's answer (its first token apart)"),
    "rms_before": ("RMS before head norm", "of a head's output"),
    "rms_after": ("RMS after head norm", "the same as before where there is no norm"),
    "rms_given": ("RMS after × (1 − λ_init)", "what the output projection takes"),
}
PANELS = {
    "layers": ("row_sum", "lambda", "relative_entropy", "effective_rank", "redundancy", "negative", "sink", "noise"),
    "sinks": ("largest_column", "sink_value", "common", "output_rank", "norm_ratio", "kurtosis"),
    "places": ("on_class", "on_registers", "on_corners", "on_first", "on_outliers"),
}
"""Figure -> the numbers in its panels."""

Measurements = Mapping[str, Sequence[Measurement]]
"""By model."""
LayerNumbers = dict[str, dict[str, dict[str, list[list[float]]]]]
"""{number: {model: {kind: [a layer's values, one a head]}}}; the kind is "" where a number has none.

In a model of several variants a layer without the number, or without maps of the kind, has one NaN.
"""


def mean_numbers(measurements: Measurements, tower: str) -> LayerNumbers:
    """Return the numbers of a tower, each the mean over its inputs."""
    numbers: LayerNumbers = {}
    for model, inputs in measurements.items():
        of_tower = [one for one in inputs if one.tower == tower]
        for key in dict.fromkeys(key for one in of_tower for layer in one.layers for key in layer.numbers):
            number, _, kind = key.partition("/")
            measured = [one for one in of_tower if any(key in layer.numbers for layer in one.layers)]
            layers = [
                [one.layers[i].numbers.get(key, [math.nan]) for one in measured] for i in range(len(measured[0].layers))
            ]
            means = [[_mean([head]) for head in zip(*layer, strict=True)] for layer in layers]
            numbers.setdefault(number, {}).setdefault(model, {})[kind] = means
    return numbers


def number_panels(numbers: LayerNumbers, figure: str) -> list[LayerPanel]:
    """Return the panels of a figure of `PANELS` over the layers."""
    return [LayerPanel(NAMES[number][0], numbers[number]) for number in PANELS[figure] if number in numbers]


def norm_panels(numbers: LayerNumbers) -> list[LayerPanel]:
    """Return the panels of head outputs before and after the norm and its factor; empty without captured values."""
    if "rms_before" not in numbers:
        return []
    titles = {"before": "before head norm", "after": "after head norm", "given": "after × (1 − λ_init)"}
    return [LayerPanel(f"RMS {title}", numbers[f"rms_{name}"], log=True) for name, title in titles.items()]


def table(numbers: LayerNumbers) -> list[tuple[str, str, dict[str, str]]]:
    """Return (name, meaning, {model: value}) of each number.

    Values are means over layers and heads of the map that is applied to the values, with those of its two softmax maps
    in brackets.
    """
    rows = []
    for number, (title, says) in NAMES.items():
        if number not in numbers:
            continue
        cells = {}
        for model, kinds in numbers[number].items():
            whole = [layer for kind in ("", *APPLIED) for layer in kinds.get(kind, [])]
            parts = [_number(_mean(kinds[kind])) for kind in ("map 1", "map 2") if kind in kinds]
            cells[model] = _number(_mean(whole)) + (f" ({', '.join(parts)})" if parts else "")
        rows.append((title, says, cells))
    return rows


def as_json(measurements: Measurements) -> dict[str, Any]:
    """Return every number by model, input, layer and head; a NaN (the redundancy of a single head) is null."""
    return {
        model: [
            {
                "tower": one.tower,
                "input": one.title,
                "captions": {name: {"cosine": cosine, "relevance": grid.tolist()}
                             for name, (grid, cosine) in (one.relevance or {}).items()},
                "layers": [{"name": layer.name, "numbers": {key: list(map(_finite, values))
                                                            for key, values in layer.numbers.items()}}
                           for layer in one.layers],
            }
            for one in inputs
        ]
        for model, inputs in measurements.items()
    }  # fmt: skip


def _mean(layers: Sequence[Sequence[float]]) -> float:
    values = [value for heads in layers for value in heads if math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
