"""timm's differential and gated attention in our layout, and back: one fused projection there, three here.

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

import torch
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


def to_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state_dict of our V1 or gated layer (key/value heads as heads), or of a ViT, in timm's layout.

    Raises:
        ValueError: there is no V1 or gated layer, projections of queries, keys and values have different sizes, or a
            gate is one of heads.
    """
    layers = [name[:-11] for name in state if name.endswith("gate.weight") and f"{name[:-11]}q_proj.weight" in state]
    layers = [one for one in layers if not {f"{one}lambda_proj.weight", f"{one}lambda_q1"} & state.keys()]
    if other := [one for one in layers if state[f"{one}gate.weight"].shape != state[f"{one}q_proj.weight"].shape]:
        raise ValueError(f"{other[0]}gate.weight is of gates by head, and timm's are by channel: export a folder")
    if not layers and not any(
        name.endswith("head_norm.weight") and f"{name[:-16]}lambda_q1" in state for name in state
    ):
        raise ValueError(
            "the state_dict has no head_norm.weight next to a lambda_q1, and no gate: give weights of timm's V1"
        )
    weights: dict[str, Tensor] = {}
    for name, value in state.items():
        match = re.match(r"(^|.*\.)(q|k|v)_proj\.(weight|bias)$", name)
        if match is None:
            weights[re.sub(r"(^|.*\.)head_norm\.weight$", r"\1sub_norm.weight", name)] = value
        elif match[2] == "q":
            parts = [state[f"{match[1]}{letter}_proj.{match[3]}"] for letter in "qkv"]
            if len({part.shape for part in parts}) > 1:
                raise ValueError(
                    f"{match[1]}q_proj, k_proj and v_proj have sizes {[list(part.shape) for part in parts]}: give a "
                    "model whose num_kv_heads is num_heads"
                )
            weights[f"{match[1]}qkv.{match[3]}"] = torch.cat(parts)
    return weights
