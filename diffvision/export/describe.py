"""The description of a model in Markdown, from its layers and its configuration."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from diffvision.nn import AttentionLayer
from diffvision.opening import Model

PLAIN = {"standard", "gated", "sink", "integral"}  # variants without a difference
KIND = {"open_clip": "A CLIP model", "timm": "An image classifier", "language": "A language model"}


def text(value: Any) -> str:
    """Return a value as one line of escaped Markdown.

    Names in configurations and runs come from anywhere, and may look like HTML, the end of a table's cell, a link or a
    heading.
    """
    line = html.escape(" ".join(str(value).split()), quote=False)
    line = re.sub(r"([\\|`])", r"\\\1", line)
    return re.sub(r"\](?=[(\[:])", r"\\]", line)  # links and pictures


def describe(model: Model, towers: Mapping[str, list[AttentionLayer]]) -> str:
    """Return a sentence and a table in Markdown: parameters, and the attention of each tower."""
    attention = " with differential attention" if variants(towers) - PLAIN else ""
    rows = {"parameters": f"{sum(p.numel() for p in model.module.parameters()):,}"}
    for tower, layers in towers.items():
        rows["attention" if len(towers) == 1 else f"attention, {tower}"] = _attention(layers)
    table = "\n".join(f"| {name} | {text(value)} |" for name, value in rows.items())
    return f"{KIND[model.library]}{attention}.\n\n| | |\n|---|---|\n{table}"


def attention_layers(model: nn.Module) -> dict[str, list[AttentionLayer]]:
    """Return our attention layers of a model by tower: "image tower" and "text tower" of OpenCLIP's, else "model"."""
    towers: dict[str, list[AttentionLayer]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, AttentionLayer):
            tower = "model"
            if hasattr(model, "visual"):
                tower = "image tower" if name.startswith("visual.") else "text tower"
            towers.setdefault(tower, []).append(layer)
    return dict(sorted(towers.items()))


def variants(towers: Mapping[str, list[AttentionLayer]]) -> set[str]:
    """Return the variants, keys of `diffvision.nn.ATTENTION` or "vca", that layers of these towers are of."""
    return {layer.variant for layers in towers.values() for layer in layers}


def _shape(layer: AttentionLayer) -> tuple[str, int, int, int]:
    return layer.variant, layer.num_heads, layer.num_kv_heads, layer.head_dim


def _attention(layers: list[AttentionLayer]) -> str:
    """Return one line for a tower: "v1, 4 layers of 2 heads of 32, lambda_init 0.8"."""
    parts = []
    for (variant, heads, kv_heads, size), count in Counter(map(_shape, layers)).items():
        parts += [variant, f"{count} layer{'s' if count > 1 else ''} of {heads} heads of {size}"]
        parts += [f"{kv_heads} key/value heads"] if kv_heads != heads else []
    if starts := [float(layer.lambda_init) for layer in layers if hasattr(layer, "lambda_init")]:  # type: ignore[arg-type]
        low, high = min(starts), max(starts)
        parts.append(f"lambda_init {low:.3g}" + (f" to {high:.3g}" if high > low else ""))
    return ", ".join(parts)
