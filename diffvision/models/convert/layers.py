"""A check that the attention layers in a state_dict are complete: no tensor missing or surplus, and consistent shapes.

Conversions only rename tensors, so without this check an incomplete layer would be written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from diffvision.models.convert.state import differences, few
from diffvision.nn import ATTENTION, AttentionLayer

TELLING = tuple(ATTENTION[variant].telling_weight for variant in ("v1", "v2", "gated"))


def check_layers(state: Mapping[str, Tensor], what: str) -> None:
    """Compare every V1, V2 and gated attention of a state_dict with the layer that its tensors describe.

    Args:
        state: with our layers' names, at the top or anywhere within a model.
        what: name of the state_dict in errors.

    Raises:
        ValueError: a layer has missing, surplus or wrongly shaped tensors; the message names them.
    """
    prefixes = {name[: -len(mark)] for name in state for mark in ("head_norm.weight", *TELLING) if name.endswith(mark)}
    prefixes = {prefix for prefix in prefixes if not prefix.endswith("mlp.")}  # its gate is SwiGLU's
    faults = [f"{prefix}{fault}" for prefix in sorted(prefixes) for fault in _faults(_under(state, prefix))]
    if faults:
        raise ValueError(f"{what} does not hold whole attention layers; in our names: {few(faults)}")


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def _faults(weights: Mapping[str, Tensor]) -> list[str]:
    """Return what keeps a layer's weights from being loaded."""
    try:
        layer = _build_meta(weights)
    except KeyError as error:
        return [f"{error.args[0]} is missing"]
    except (ValueError, IndexError, ZeroDivisionError) as error:
        shapes = {
            name: list(value.shape) for name, value in weights.items() if "proj.weight" in name or "lambda" in name
        }
        return [f"* has sizes that do not fit ({error}): {shapes}"]
    return differences(weights, layer.state_dict())


def _build_meta(weights: Mapping[str, Tensor]) -> AttentionLayer:
    """Return the layer of these sizes on the meta device."""
    is_v2, gate = ATTENTION["v2"].telling_weight in weights, weights.get(ATTENTION["gated"].telling_weight)
    is_gated = gate is not None and not is_v2 and "lambda_q1" not in weights
    variant = ATTENTION["v2" if is_v2 else "gated" if is_gated else "v1"]
    queries, width = weights["q_proj.weight"].shape
    if is_gated:  # the size of a head changes no other shape than that of its norms
        head_dim = len(weights.get("q_norm.weight", torch.empty(math.gcd(queries, len(weights["k_proj.weight"])))))
        heads = queries // head_dim
    elif is_v2:
        heads = len(weights["lambda_proj.weight"])
        head_dim = queries // (2 * heads)
    else:
        head_dim = len(weights["lambda_q1"])
        heads = queries // (2 * head_dim)
    return variant(
        width,
        heads,
        len(weights["k_proj.weight"]) // (variant.key_maps * head_dim),
        head_dim=head_dim,
        head_norm="head_norm.weight" in weights,
        qkv_bias="q_proj.bias" in weights,
        proj_bias="proj.bias" in weights,
        qk_norm="q_norm.weight" in weights,
        device="meta",
    )
