"""Looks as numbers: what a page's table and curves show, and what statistics.json holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diffvision.analysis.panels import LayerPanel
from diffvision.inspection.measurements import Look

TOWERS = {"image": "Image tower", "caption": "Text tower", "text": "Text"}
APPLIED = ("difference", "attention")

# number -> (what it is called, what it says)
NAMES = {
    "lambda": ("λ", "what the second map counts; mean over tokens"),
    "row_sum": ("row sum of what is applied", "1 − λ in differential layers, 1 in others"),
    "negative": ("share of negative entries", "of what is applied"),
    "relative_entropy": ("entropy / log n", "of a row's magnitudes: 1 is attention to all alike, 0 to one token"),
    "entropy": ("entropy, nats", "of a row's magnitudes"),
    "effective_rank": ("effective rank", "exp of the entropy of a map's singular values (Roy and Vetterli 2007)"),
    "rank": ("rank at 1%", "singular values above 1% of the largest"),
    "redundancy": ("head redundancy", "mean cosine similarity of the heads' maps; 1: all alike"),
    "sink": ("mass on sinks", "magnitude on class and register tokens, or a text's first token"),
    "largest_column": ("largest column", "magnitude on the one token that has most of all rows"),
    "noise": ("attention noise", "magnitude outside of the object, or of a text's answer (its first token apart)"),
    "rms_before": ("RMS before head norm", "of a head's output"),
    "rms_after": ("RMS after head norm", "the same as before where there is no norm"),
    "rms_given": ("RMS after × (1 − λ_init)", "what the output projection takes"),
}
_CURVES = ("row_sum", "lambda", "relative_entropy", "effective_rank", "redundancy", "negative", "sink", "noise")

Looks = Mapping[str, Sequence[Look]]
"""By model."""
Curves = dict[str, dict[str, dict[str, list[list[float]]]]]
"""{number: {model: {kind: [a layer's values, one a head]}}}; the kind is "" where a number has none."""


def curves(looks: Looks, tower: str) -> Curves:
    """The numbers of a tower, each the mean over its inputs."""
    found: Curves = {}
    for model, own in looks.items():
        inputs = [look for look in own if look.tower == tower]
        for key in dict.fromkeys(key for look in inputs for layer in look.layers for key in layer.numbers):
            number, _, kind = key.partition("/")
            having = [look for look in inputs if key in look.layers[0].numbers]
            layers = [[look.layers[place].numbers[key] for look in having] for place in range(len(having[0].layers))]
            means = [[sum(head) / len(head) for head in zip(*layer, strict=True)] for layer in layers]
            found.setdefault(number, {}).setdefault(model, {})[kind] = means
    return found


def layer_curves(found: Curves) -> list[LayerPanel]:
    """The panels of numbers over the layers."""
    return [LayerPanel(NAMES[number][0], found[number]) for number in _CURVES if number in found]


def norm_curves(found: Curves) -> list[LayerPanel]:
    """The panel of head outputs before and after the norm and its factor, a model each; none where nothing is known."""
    models = found.get("rms_before", {})
    titles = {"before": "before head norm", "after": "after head norm", "given": "after × (1 − λ_init)"}
    return [
        LayerPanel(f"RMS {title}", {model: found[f"rms_{name}"][model] for model in models}, log=True)
        for name, title in titles.items()
        if models
    ]


def table(found: Curves) -> list[tuple[str, str, dict[str, str]]]:
    """(number, what it says, {model: value}) of each: means over layers and heads of what is applied, with those of
    its two maps in brackets."""
    rows = []
    for number, (title, says) in NAMES.items():
        if number not in found:
            continue
        shown = {}
        for model, kinds in found[number].items():
            whole = next((kinds[kind] for kind in ("", *APPLIED) if kind in kinds), None)
            parts = [_number(_mean(kinds[kind])) for kind in ("map 1", "map 2") if kind in kinds]
            shown[model] = _number(_mean(whole or [])) + (f" ({', '.join(parts)})" if parts else "")
        rows.append((title, says, shown))
    return rows


def as_json(looks: Looks) -> dict[str, Any]:
    """Every number by model, input, layer and head; a NaN (the redundancy of a single head) is null."""
    return {
        model: [
            {
                "tower": look.tower,
                "input": look.title,
                "captions": {name: {"cosine": cosine, "relevance": grid.tolist()}
                             for name, (grid, cosine) in (look.relevance or {}).items()},
                "layers": [{"name": layer.name, "numbers": {key: list(map(_finite, values))
                                                            for key, values in layer.numbers.items()}}
                           for layer in look.layers],
            }
            for look in own
        ]
        for model, own in looks.items()
    }  # fmt: skip


def _mean(layers: Sequence[Sequence[float]]) -> float:
    values = [value for heads in layers for value in heads if math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
