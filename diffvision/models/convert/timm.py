"""timm's differential and gated attention in our layout: one fused projection there, three here.

| here | timm.layers.DiffAttention, and Attention(gated=True) |
|---|---|
| q_proj, k_proj, v_proj | the rows of qkv, in this order |
| head_norm | sub_norm |
| gate | gate |

Both count differential heads, keep a head's two queries side by side, and have one value of 2D per head. timm's models
keep the plain model's number of heads and halve their size, where ours keep the size and halve the number.

Source: huggingface/pytorch-image-models timm/layers/diff_attention.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_SUB_NORM, _QKV = r"(^|.*\.)sub_norm\.weight$", r"(^|.*\.)qkv\.(weight|bias)$"
_IDENTIFYING = r"(^|.*\.)(?:sub_norm|(?<!mlp\.)gate)\.weight$"


def recognised(names: Mapping[str, Tensor]) -> bool:
    """Return whether these are names of timm's differential or gated attention, at the top or within a model."""
    attentions = {match[1] for name in names if (match := re.match(_IDENTIFYING, name))}
    return bool(attentions) and all(f"{prefix}qkv.weight" in names for prefix in attentions)


def from_timm(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state_dict with every attention in our layout, the rest unchanged. Tensors are views of those given.

    Raises:
        ValueError: an attention is not V1: its lambda is two scalars, or it has one norm for all heads together.
    """
    if other := [name for name in weights if re.search(r"(^|\.)(lambda_a|attn\.norm\.weight)$", name)]:
        raise ValueError(f"the timm model has {other[0]}, which V1 does not: use it in timm")
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        if match := re.match(_QKV, name):
            parts = zip("qkv", value.chunk(3), strict=True)
            state |= {f"{match[1]}{letter}_proj.{match[2]}": part for letter, part in parts}
        else:
            state[re.sub(_SUB_NORM, r"\1head_norm.weight", name)] = value
    return state
