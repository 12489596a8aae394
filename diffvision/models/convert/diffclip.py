"""Conversion of DiffCLIP's released checkpoints to our OpenCLIP models: the same function, other names.

| | here (OpenCLIP) | hammoudhasan/DiffCLIP |
|---|---|---|
| image tower | visual.trunk.* (timm) | visual.* |
| image projection | visual.head.proj.weight [embed, width] | image_projection [width, embed] |
| output projection of attention | attn.proj | attn.out_proj |
| head norm | attn.head_norm | attn.diff_norm |

A checkpoint (`checkpoint_best.pt`, 1.8 GB) keeps its weights in `state_dict`, each name after `module.`, next to
an argparse.Namespace, paths and numpy scalars. Lambda starts from 0.8 in every layer. "DiffCLIP*", where its start
depends on the depth, has the same names: pass lambda_init="depth" for it. Images are normalised by ImageNet's mean and
standard deviation.

Source: hammoudhasan/DiffCLIP diff_clip.py and diff_attention.py; arXiv 2503.06626. The names of the published files
were derived from that code; the files themselves were not available.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from diffvision.models.checkpoint import State
from diffvision.nn import AttentionLayer
from diffvision.nn.lambda_init import depth_lambda_init

TOWER = "diff_vit_{}_patch{}_clip_{}"

_RENAMED = ((r"\battn\.out_proj\.", "attn.proj."), (r"\battn\.diff_norm\.", "attn.head_norm."))
_PROJECTIONS = ("image_projection", "visual.head.proj.weight")
_MARKS = ("image_projection", "visual.blocks.0.attn.diff_norm.weight", "transformer.resblocks.0.attn.diff_norm.weight")


def is_diffclip(names: Mapping[str, Any]) -> bool:
    """Return whether these are names of a DiffCLIP checkpoint's weights, without their prefix."""
    return set(_MARKS) <= set(names)


def from_diffclip(
    weights: Mapping[str, Tensor], *, tower: str | None = None, lambda_init: float | str = 0.8
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return OpenCLIP's configuration and state_dict from a DiffCLIP state_dict.

    Args:
        weights: names without `module.`. The result shares all tensors with it except the image projection.
        tower: the timm model of the image tower, if none of ours has its size: OpenCLIP builds it by name only.
        lambda_init: 0.8, or "depth" for DiffCLIP*.

    Raises:
        ValueError: a tensor is missing, or no image tower of ours has these sizes and `tower` is None.
    """
    given = State(weights, "the DiffCLIP state_dict")
    config = _config(given, tower, lambda_init)
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name == _PROJECTIONS[0]:
            state[_PROJECTIONS[1]] = value.T.contiguous()
            continue
        for theirs, ours in _RENAMED:
            name = re.sub(theirs, ours, name)
        state[re.sub(r"^visual\.", "visual.trunk.", name)] = value
    return config, state


def check_layers_are_v1(model: Any, lambda_init: float | str) -> None:
    """Raise a ValueError that names the first attention layer of an OpenCLIP model that is not DiffCLIP's V1.

    Weights alone do not show this: other variants have the same names and shapes, and `lambda_init` is not a weight.

    Args:
        model: an OpenCLIP model.
        lambda_init: of DiffCLIP's layers: a number, or "depth".
    """
    towers: dict[str, nn.Module] = {"image": model.visual, "text": model.transformer}
    for tower, module in towers.items():
        layers = [layer for layer in module.modules() if isinstance(layer, AttentionLayer)]
        for depth, layer in enumerate(layers):
            expected = depth_lambda_init(depth) if lambda_init == "depth" else float(lambda_init)
            actual = getattr(layer, "lambda_init", math.nan)
            if layer.variant != "v1" or not math.isclose(actual, expected):
                raise ValueError(
                    f"layer {depth} of the {tower} tower is {layer.variant} with lambda_init {actual:.4g}: DiffCLIP "
                    f"with lambda_init={lambda_init} takes {expected:.4g} there"
                )


def _config(given: State, tower: str | None, lambda_init: float | str) -> dict[str, Any]:
    """Return the OpenCLIP configuration of a DiffCLIP state_dict, from the shapes of its tensors."""
    from diffvision.models.vit import MODELS, SIZES

    width, _, patch, _ = given["visual.patch_embed.proj.weight"].shape
    tokens, depth = given["visual.pos_embed"].shape[1], given.layers("visual.blocks")
    heads = width // (2 * len(given["visual.blocks.0.attn.lambda_q1"]))
    image = round((tokens - 1) ** 0.5) * patch
    if tower is None:
        sizes = {(size.width, size.depth, size.diff_heads): name for name, size in SIZES.items()}
        tower = TOWER.format(sizes.get((width, depth, heads)), patch, image)
        if lambda_init == "depth":
            tower = tower.replace("_clip_", "_clip_dynamic_")
        if tower not in MODELS:
            raise ValueError(
                f"no timm model of ours has width {width}, {depth} layers, {heads} heads, patch {patch} and image "
                f"{image}: register one, and give --tower"
            )
    text = given["token_embedding.weight"]
    return {
        "embed_dim": given["text_projection"].shape[1],
        "quick_gelu": True,
        "vision_cfg": {
            "image_size": image,
            "timm_model_name": tower,
            "timm_model_pretrained": False,
            "timm_pool": "",
            "timm_proj": "linear",
        },
        "text_cfg": {
            "context_length": len(given["positional_embedding"]),
            "vocab_size": len(text),
            "width": text.shape[1],
            "heads": text.shape[1] // (2 * len(given["transformer.resblocks.0.attn.lambda_q1"])),
            "layers": given.layers("transformer.resblocks"),
            "block_type": f"diffvision:v1:lambda_init={lambda_init}",
        },
    }
