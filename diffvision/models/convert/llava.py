"""Plain vision-language models as transformers' `LlavaForConditionalGeneration`, and back, with equal outputs.

| here | LlavaForConditionalGeneration |
|---|---|
| tower: timm's or OpenCLIP's CLIP ViT | model.vision_tower: CLIPVisionModel, with a projection each for q, k and v |
| projector.0, projector.2 | model.multi_modal_projector.linear_1, linear_2 |
| language_model, any causal one | model.language_model, lm_head |
| feature_layer -2 | vision_feature_layer -2, vision_feature_select_strategy "default" |

A plain language model of ours becomes a Llama; others are the same in both. Folders are read by
`LlavaForConditionalGeneration.from_pretrained` and written by `save_pretrained`.

Source: transformers models/llava/modeling_llava.py and models/clip/modeling_clip.py (5.x).
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from diffvision.models.convert.state import check_fits
from diffvision.models.convert.transformers import check_settings
from diffvision.models.vision_language import VisionLanguageModel
from diffvision.models.vision_language_parts import VisionLanguageConfig, create_tower, geometry

_TOWERS = {"quick_gelu": "vit_large_patch14_clip_quickgelu_336", "gelu": "vit_large_patch14_clip_336"}
_NAMES = (
    ("cls_token", "embeddings.class_embedding"),
    ("pos_embed", "embeddings.position_embedding.weight"),
    ("patch_embed.proj", "embeddings.patch_embedding"),
    ("norm_pre", "pre_layrnorm"),
    ("norm", "post_layernorm"),
    (r"blocks\.(\d+)\.norm(\d)", r"encoder.layers.\1.layer_norm\2"),
    (r"blocks\.(\d+)\.attn\.proj", r"encoder.layers.\1.self_attn.out_proj"),
    (r"blocks\.(\d+)\.attn\.qkv", r"encoder.layers.\1.self_attn.qkv"),
    (r"blocks\.(\d+)\.mlp", r"encoder.layers.\1.mlp"),
)


def from_llava(llava: LlavaForConditionalGeneration) -> VisionLanguageModel:
    """Return a Llava with a CLIP tower as our model, which shares its projector and language model.

    Raises:
        ValueError: its tower is not CLIP's, or it has a setting that ours does not have.
    """
    theirs: Any = llava.config
    images = theirs.vision_config
    fixed = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"}
    check_settings("the Llava", theirs.to_dict(), "ours", {**fixed, "multimodal_projector_bias": True})
    check_settings("its tower", images.to_dict(), "CLIP's", {"model_type": "clip_vision_model", "layer_norm_eps": 1e-5})
    if images.hidden_act not in _TOWERS:
        raise ValueError(f"its tower has hidden_act {images.hidden_act!r}: give one with {' or '.join(_TOWERS)}")
    args = _timm_args(images)
    text = copy.deepcopy(theirs.text_config)
    config = VisionLanguageConfig(
        tower=_TOWERS[images.hidden_act], tower_args=args, image_token_id=theirs.image_token_id, text_config=text
    )
    with torch.device("meta"):
        language_model = AutoModelForCausalLM.from_config(text)
    setattr(language_model, language_model.base_model_prefix, llava.model.language_model)
    language_model.set_output_embeddings(llava.lm_head)
    tower, weights = create_tower(config.tower, args).to(llava.dtype), llava.model.vision_tower.state_dict()
    for name, value in tower.state_dict().items():
        value.copy_(torch.cat([weights[part] for part in _names(name, _prefix(weights))]).view_as(value))
    model = VisionLanguageModel(config, tower, language_model)
    projector = llava.model.multi_modal_projector
    model.projector[0], model.projector[2] = projector.linear_1, projector.linear_2
    return model.train(llava.training)


def to_llava(model: VisionLanguageModel) -> LlavaForConditionalGeneration:
    """Return a plain model with a CLIP tower as a Llava, which shares its projector and a foreign language model.

    Raises:
        ValueError: the tower is not a plain CLIP ViT, the projector or the feature layer is not LLaVA-1.5's, the
            placeholder is beyond the vocabulary, or transformers does not have the language model.
    """
    config, words = model.config, model.language_model
    check_settings(
        "this model", config.to_dict(), "transformers' Llava", {"feature_layer": -2, "projector": "mlp", "shuffle": 1}
    )
    if config.image_token_id >= config.text_config.vocab_size:
        raise ValueError(
            f"image_token_id is {config.image_token_id}, beyond the vocabulary of {config.text_config.vocab_size}, "
            "where a Llava's is within it: create the model with an id below"
        )
    images, weights = _clip(model)
    made = LlavaConfig(
        vision_config=images,
        text_config=copy.deepcopy(words.config),
        image_token_index=config.image_token_id,
        image_seq_length=model.image_tokens,
    )
    with torch.device("meta"):
        llava = LlavaForConditionalGeneration(made)
    tower = CLIPVisionModel(images).to(next(model.tower.parameters()).dtype)
    target = tower.state_dict()
    for name, value in weights.items():
        names = _names(name, _prefix(target))
        for part, rows in zip(names, value.squeeze(0).chunk(len(names)), strict=True):
            target[part].copy_(rows.view_as(target[part]))
    parts = llava.model
    parts.vision_tower, parts.language_model, llava.lm_head = tower, words.base_model, words.get_output_embeddings()
    projector = parts.multi_modal_projector
    projector.linear_1, projector.linear_2 = model.projector[0], model.projector[2]
    return llava.train(model.training)


def _clip(model: VisionLanguageModel) -> tuple[CLIPVisionConfig, dict[str, Tensor]]:
    """Return a tower's configuration as CLIPVisionModel, and its weights under timm's names."""
    tower, name = model.tower, model.config.tower
    blocks = getattr(tower, "blocks", None) or getattr(getattr(tower, "transformer", None), "resblocks", [None])
    attention: Any = getattr(blocks[0], "attn", None)
    mlp: Any = getattr(blocks[0], "mlp", None)
    kinds = {"QuickGELU": "quick_gelu", "QuickGELUActivation": "quick_gelu", "GELU": "gelu"}
    act = kinds.get(type(getattr(mlp, "act", getattr(mlp, "gelu", None))).__name__)
    if act is None or not hasattr(attention, "num_heads"):
        raise ValueError(
            f"tower {name!r} is not a CLIP ViT, which transformers' Llava needs: give one, such as ViT-B-16"
        )
    width, rows = geometry(tower, -2)[2], (mlp.fc1 if hasattr(mlp, "fc1") else mlp.c_fc).out_features
    config = CLIPVisionConfig(
        image_size=model.image_size[0],
        patch_size=model.patch_size,
        hidden_size=width,
        num_hidden_layers=len(blocks),
        num_attention_heads=attention.num_heads,
        intermediate_size=rows,
        hidden_act=act,
    )
    with torch.device("meta"):
        twin = create_tower(_TOWERS[act], _timm_args(config))
    state = tower.state_dict()
    if "class_embedding" in state:  # OpenCLIP's
        state = checkpoint_filter_fn({f"visual.{key}": value for key, value in state.items()}, twin)
        state = {key: value for key, value in state.items() if not key.startswith("head.")}
    check_fits(state, twin.state_dict(), f"tower {name!r} as a CLIP ViT")
    return config, state


def _timm_args(images: CLIPVisionConfig) -> dict[str, Any]:
    """Return the arguments of timm's model."""
    return {
        "img_size": images.image_size,
        "patch_size": images.patch_size,
        "embed_dim": images.hidden_size,
        "depth": images.num_hidden_layers,
        "num_heads": images.num_attention_heads,
        "mlp_ratio": (images.intermediate_size + 0.5) / images.hidden_size,
    }


def _names(name: str, prefix: str) -> list[str]:
    """Return the weights of CLIPVisionModel that make up timm's weight of a name: three for qkv, else one."""
    theirs = next(re.sub(f"^{ours}", other, name) for ours, other in _NAMES if re.match(rf"{ours}(\.|$)", name))
    return [prefix + theirs.replace(".qkv.", f".{part}_proj.") for part in ("qkv" if ".qkv." in theirs else "q")]


def _prefix(weights: Mapping[str, Tensor]) -> str:
    """Return what names of CLIPVisionModel begin with, in older versions of transformers."""
    return "vision_model." if "vision_model.pre_layrnorm.weight" in weights else ""
