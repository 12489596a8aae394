"""Conversion of DiffCLIP's released checkpoints to our OpenCLIP models, and back: the same function under other names.

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

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from torch import Tensor, nn

from diffvision.models.checkpoint import State
from diffvision.nn import AttentionLayer
from diffvision.nn.lambda_init import depth_lambda_init

TOWER = "diff_vit_{}_patch{}_clip_{}"

_RENAMED = ((r"\battn\.out_proj\.", "attn.proj."), (r"\battn\.diff_norm\.", "attn.head_norm."))
_PROJECTIONS = ("image_projection", "visual.head.proj.weight")
_SECTIONS = {"vision_cfg": CLIPVisionCfg, "text_cfg": CLIPTextCfg}
_NOT_COMPARED = ("block_type", "timm_model_pretrained")  # layers are compared themselves; the other is no architecture
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


def to_diffclip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a DiffCLIP state_dict, without `module.`, of one of our OpenCLIP models with V1 in both towers."""
    given = State(state, "the OpenCLIP state_dict")
    weights = {_PROJECTIONS[0]: given[_PROJECTIONS[1]].T.contiguous()}
    for name, value in state.items():
        if name != _PROJECTIONS[1]:
            name = name.replace("visual.trunk.", "visual.")
            name = re.sub(r"\battn\.proj\.", "attn.out_proj.", name)
            weights[re.sub(r"\battn\.head_norm\.", "attn.diff_norm.", name)] = value
    return weights


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


def lost_settings(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> list[str]:
    """Return the settings of an OpenCLIP configuration that a conversion to DiffCLIP would lose; empty if none.

    Args:
        config: the folder's model_cfg.
        weights: result of `to_diffclip` for the same model.
    """
    back = _config(State(weights, "the DiffCLIP state_dict"), config.get("vision_cfg", {}).get("timm_model_name"), 0.8)
    rows = [("quick_gelu", bool(config.get("quick_gelu")), back["quick_gelu"])]
    rows += [(name, config[name], None) for name in ("custom_text", "init_logit_bias") if config.get(name) is not None]
    for section, kind in _SECTIONS.items():
        usual = {field.name: field.default for field in dataclasses.fields(kind)}
        given, wanted = usual | config.get(section, {}), usual | back[section]
        rows += [(f"{section}.{name}", given[name], wanted.get(name)) for name in given if name not in _NOT_COMPARED]
    return [f"{name} is {given!r}, DiffCLIP's {wanted!r}" for name, given, wanted in rows if given != wanted]


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
