"""Layers with parameters: attention, its variants in the table `ATTENTION`, and the decoder's block.

Whole models are in `diffvision.models`, the operation without parameters in `diffvision.ops`.
"""

import inspect
from typing import Any

from diffvision.nn.attention import Attention, AttentionLayer, DifferentialLayer, HeadNorm, Inputs
from diffvision.nn.coda import CodaAttention
from diffvision.nn.contrast import VisualContrastAttention
from diffvision.nn.dex import DexAttention
from diffvision.nn.diff_attention import DiffAttention, DiffAttentionV2
from diffvision.nn.dint import DintAttention
from diffvision.nn.dna import DenoisingAttention
from diffvision.nn.gated import GatedAttention, GatedDiffAttention, GatedDiffAttentionV2
from diffvision.nn.grouped import GroupedDiffAttention
from diffvision.nn.integral import IntegralAttention
from diffvision.nn.lambda_init import depth_lambda_init
from diffvision.nn.lambda_variants import DualLambda, HeadLambda, TokenHeadLambda, TokenLambda
from diffvision.nn.sink import SinkAttention
from diffvision.plugins import PluginTable

_FORMS = (HeadLambda, TokenLambda, TokenHeadLambda, DualLambda)
_GATED = (GatedAttention, GatedDiffAttention, GatedDiffAttentionV2)
_OTHERS = (
    *_FORMS,
    DintAttention,
    DexAttention,
    *_GATED,
    SinkAttention,
    IntegralAttention,
    DenoisingAttention,
    CodaAttention,
)
_LAYERS = (Attention, DiffAttention, DiffAttentionV2, GroupedDiffAttention, *_OTHERS)
ATTENTION: PluginTable[type[AttentionLayer]] = PluginTable(
    "attention", {layer.variant: layer for layer in _LAYERS}, AttentionLayer
)
"""Variant -> its layer, of this package and of plugins (`diffvision.plugins`)."""

GRID_ATTENTION: dict[str, type[AttentionLayer]] = {VisualContrastAttention.variant: VisualContrastAttention}
"""Variants that attend over a grid of patches and nothing else."""


def build_attention(
    variant: str, dim: int, num_heads: int, num_kv_heads: int | None = None, **settings: Any
) -> AttentionLayer:
    """Build the attention layer of a variant, so that variants can share a block or a configuration.

    Args:
        variant: key of `ATTENTION`.
        dim: width of the tokens.
        num_heads: differential heads (V1: half of the matched standard layer's).
        num_kv_heads: key/value heads, as many as num_heads if None.
        **settings: arguments of any variant; those that this variant does not take are left out, such as
            `lambda_init` for "standard".

    Raises:
        ValueError: the variant is unknown.
        TypeError: no variant takes one of the settings.
    """
    if variant not in ATTENTION:
        raise ValueError(f"unknown attention variant {variant!r}: choose one of {', '.join(ATTENTION)}")
    layer = ATTENTION[variant]
    takes = settings_of(layer)
    taken = {name: value for name, value in settings.items() if name in takes}
    unknown = (settings.keys() - taken.keys()).difference(*map(settings_of, _LAYERS))
    if unknown and (unknown := unknown.difference(*map(settings_of, ATTENTION.values()))):  # those of plugins
        raise TypeError(f"no attention variant takes {', '.join(sorted(unknown))}")
    return layer(dim, num_heads, num_kv_heads, **taken)


def settings_of(layer: type[AttentionLayer]) -> set[str]:
    """Return the names of the arguments that a class of `ATTENTION` takes."""
    return set(inspect.signature(layer).parameters)


__all__ = [
    "ATTENTION",
    "GRID_ATTENTION",
    "Attention",
    "AttentionLayer",
    "CodaAttention",
    "DenoisingAttention",
    "DexAttention",
    "DiffAttention",
    "DiffAttentionV2",
    "DifferentialLayer",
    "DintAttention",
    "DualLambda",
    "GatedAttention",
    "GatedDiffAttention",
    "GatedDiffAttentionV2",
    "GroupedDiffAttention",
    "HeadLambda",
    "HeadNorm",
    "Inputs",
    "IntegralAttention",
    "SinkAttention",
    "TokenHeadLambda",
    "TokenLambda",
    "VisualContrastAttention",
    "build_attention",
    "depth_lambda_init",
    "settings_of",
]
