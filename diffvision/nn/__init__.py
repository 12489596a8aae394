"""Layers with parameters. `ATTENTION` is the one table of attention variants."""

import inspect
from typing import Any

from diffvision.nn.attention import Attention, AttentionLayer, HeadNorm
from diffvision.nn.diff_attention import DiffAttention, DiffAttentionV2, depth_lambda_init

ATTENTION: dict[str, type[AttentionLayer]] = {
    layer.variant: layer for layer in (Attention, DiffAttention, DiffAttentionV2)
}


def build_attention(variant: str, dim: int, num_heads: int, **settings: Any) -> AttentionLayer:
    """Makes the attention of a variant, so that a block or a configuration can be shared by variants.

    Args:
        variant: key of `ATTENTION`.
        dim: width of the tokens.
        num_heads: differential heads (V1: half of the matched standard layer's).
        **settings: of any variant; each class is handed those it takes (`lambda_init` means nothing to "standard").

    Raises:
        ValueError: unknown variant. TypeError: a setting that no variant takes.
    """
    if variant not in ATTENTION:
        raise ValueError(f"unknown attention variant {variant!r}: choose one of {', '.join(ATTENTION)}")
    takes = {name: _settings(layer) for name, layer in ATTENTION.items()}
    if unknown := set(settings) - set.union(*takes.values()):
        raise TypeError(f"no attention variant takes {', '.join(sorted(unknown))}")
    return ATTENTION[variant](dim, num_heads, **{k: v for k, v in settings.items() if k in takes[variant]})


def _settings(layer: type[AttentionLayer]) -> set[str]:
    """Names of the constructor's arguments, those handed on to the parent class included."""
    constructors = [cls.__init__ for cls in layer.__mro__ if issubclass(cls, AttentionLayer)]
    return {name for constructor in constructors for name in inspect.signature(constructor).parameters}


__all__ = [
    "ATTENTION",
    "Attention",
    "AttentionLayer",
    "DiffAttention",
    "DiffAttentionV2",
    "HeadNorm",
    "build_attention",
    "depth_lambda_init",
]
