"""The class of vision-language models: transformers' Llava with an image tower of timm.

Importing this module registers the classes with transformers' Auto classes. `vision_language` creates models.

Sources: LLaVA-1.5 (arXiv 2310.03744) for the two-layer projector and the second-last block, nanoVLM
(github.com/huggingface/nanoVLM) for the pixel shuffle.
"""

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector, LlavaPreTrainedModel
from transformers.utils import can_return_tuple

import diffvision.models.language.modeling_diffllama_v2  # noqa: F401  # registers V2, which may be the language model

IMAGE = "<image>"
"""The placeholder of an image in a text."""


class TimmLlavaConfig(LlavaConfig):
    """Llava's configuration; `vision_config` is a `TimmWrapperConfig`, which names the tower and its arguments.

    Attributes:
        feature_layer: -1 for the last block with the tower's final norm, -2 for the second-last block without it, as
            LLaVA-1.5 has it; Llava's `vision_feature_layer`.
        projector: "mlp", as in LLaVA-1.5, or "pixel_shuffle", as in nanoVLM.
        shuffle: side of the squares of patches that become one token.
        preprocess: mean, std and interpolation of images, where they differ from the tower's own.
        image_token_id: the placeholder; Llava's `image_token_index`. An id beyond the vocabulary is never generated.
    """

    model_type = "timm_llava"
    attribute_map: ClassVar[dict[str, str]] = {
        **LlavaConfig.attribute_map,
        "image_token_id": "image_token_index",
        "feature_layer": "vision_feature_layer",
    }

    vision_feature_select_strategy: Literal["default", "full"] = "full"  # timm's features have no class token
    vision_config: Any = None
    text_config: Any = None
    projector: str = "mlp"
    shuffle: int = 1
    preprocess: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.feature_layer not in (-1, -2):
            raise ValueError(f"feature_layer must be -1 (last block) or -2 (second-last), got {self.feature_layer!r}")
        if self.projector not in ("mlp", "pixel_shuffle"):
            raise ValueError(f"projector must be mlp or pixel_shuffle, got {self.projector!r}")

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save as transformers does, with a file of one line for `trust_remote_code=True`; a model calls this too."""
        classes = {"AutoConfig": "TimmLlavaConfig", "AutoModelForImageTextToText": "TimmLlava"}
        self.auto_map = {auto: f"modeling_timm_llava.{name}" for auto, name in classes.items()}
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        line = f"from {__name__} import {', '.join(classes.values())}  # noqa: F401\n"
        (Path(save_directory) / "modeling_timm_llava.py").write_text(line, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing, where transformers would copy this file into the folders that it saves."""


class TimmLlava(LlavaForConditionalGeneration):
    """Transformers' Llava with a tower of timm and a whole causal language model, whose own logits are the model's.

    Args:
        config: the configuration.

    Attributes:
        vision_tower: a `TimmWrapperModel`; its `timm_model` is timm's.
        multi_modal_projector: from the tower's features to embeddings of the language model.
        language_model: the causal language model.
        image_size: height and width of an image.
        patch_size: side of a patch.
        image_tokens: tokens per image, after the shuffle.

    Raises:
        ValueError: the tower gives no features of its blocks, the shuffle does not divide the grid of patches, or an
            image has more tokens than the language model's context.
    """

    config_class = TimmLlavaConfig
    config: TimmLlavaConfig
    main_input_name = "input_ids"
    _tied_weights_keys: ClassVar[dict[str, str]] = {}  # type: ignore[misc]  # the language model has its own
    _tp_plan: ClassVar[dict[str, str]] = {}  # type: ignore[misc]

    def __init__(self, config: TimmLlavaConfig) -> None:
        LlavaPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.language_model: Any = AutoModelForCausalLM.from_config(config.text_config)
        config.text_config = self.language_model.config
        self.image_size, self.patch_size, width = geometry(self.vision_tower.timm_model, config.feature_layer)
        rows, columns = (size // self.patch_size for size in self.image_size)
        side = config.shuffle
        if side < 1 or rows % side or columns % side:
            raise ValueError(f"shuffle must divide the tower's {rows} x {columns} patches, got {side}")
        self.image_tokens = config.image_seq_length = rows * columns // side**2
        self._check_length(self.image_tokens)
        config.vision_config.hidden_size = width * side**2
        self.multi_modal_projector = create_projector(config)
        if config.image_token_id < config.text_config.vocab_size:
            self.generation_config.suppress_tokens = [config.image_token_id]
        self.post_init()

    def get_image_features(self, pixel_values: Float[Tensor, "I 3 h w"], **kwargs: Any) -> BaseModelOutputWithPooling:
        """Return the tower's features, and as `pooler_output` the tokens of each image, [I, T, dim].

        Raises:
            ValueError: the images are not of the tower's size.
        """
        if tuple(pixel_values.shape[-2:]) != self.image_size:
            raise ValueError(
                f"images must be {list(self.image_size)}, the tower's size, got {list(pixel_values.shape[-2:])}: "
                "use the processor of this model"
            )
        layer, side = self.config.feature_layer, self.config.shuffle
        seen = self.vision_tower(
            pixel_values, output_hidden_states=[layer], norm=layer == -1, stop_early=True, do_pooling=False
        )
        maps = seen.hidden_states[0]  # [I, C, rows, columns]
        squares = maps.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 3, 5, 1)
        features = squares.flatten(3).flatten(1, 2)  # row by row; in a square its patches, row by row
        return BaseModelOutputWithPooling(
            last_hidden_state=features, pooler_output=self.multi_modal_projector(features)
        )

    def embed(
        self, input_ids: Int[Tensor, "B N"], images: Float[Tensor, "I T dim"] | None = None
    ) -> Float[Tensor, "B N dim"]:
        """Return embeddings of tokens, with the images' tokens in reading order in place of the placeholders.

        Placeholders and images are not compared, which would wait for a GPU.
        """
        places = input_ids == self.config.image_token_id
        embeds = self.get_input_embeddings()(input_ids.masked_fill(places, 0))
        return embeds if images is None else embeds.masked_scatter(places[..., None], images.to(embeds))

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B N"] | None = None,
        pixel_values: Float[Tensor, "I 3 h w"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "B N"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B N dim"] | None = None,
        labels: Int[Tensor, "B N"] | None = None,
        logits_to_keep: int | Tensor = 0,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return what the language model returns for text with images.

        Args:
            input_ids: tokens, with `image_tokens` placeholders for each image.
            pixel_values: all images of the batch, in reading order; None for text alone.
            inputs_embeds: embeddings in place of input_ids and pixel_values.
            labels: equal to input_ids, -100 where there is no loss; the language model shifts them.
            mm_encoder_outputs: what `get_image_features` returned, under "image", in place of pixel_values.
            attention_mask, position_ids, past_key_values, logits_to_keep, **kwargs: as the language model takes them.

        Raises:
            ValueError: placeholders and images do not match, or there are more tokens than the context.
        """
        if (input_ids is None) == (inputs_embeds is None) or (inputs_embeds is not None and pixel_values is not None):
            raise ValueError("give input_ids, with or without pixel_values, or inputs_embeds")
        if input_ids is not None:
            seen = (mm_encoder_outputs or {}).get("image")
            seen = self.get_image_features(pixel_values) if pixel_values is not None else seen
            images = None if seen is None else seen.pooler_output
            self._check(input_ids, 0 if images is None else len(images), past_key_values)
            inputs_embeds = self.embed(input_ids, images)
        output: CausalLMOutputWithPast = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            labels=labels,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )
        return output

    def _check(self, input_ids: Int[Tensor, "B N"], images: int, past_key_values: Cache | None) -> None:
        """Raise a ValueError for too many tokens, or placeholders that do not match the images."""
        start: Any = 0 if past_key_values is None else past_key_values.get_seq_length()
        if not isinstance(start, int) or torch.compiler.is_compiling():
            return
        self._check_length(start + input_ids.shape[1])
        if start and not images and input_ids.shape[1] == 1:
            return
        if (count := int((input_ids == self.config.image_token_id).sum())) != images * self.image_tokens:
            raise ValueError(
                f"{count} placeholders (token {self.config.image_token_id}) for {images} images of "
                f"{self.image_tokens} tokens: write one {IMAGE} for each image and use the model's processor"
            )

    def _check_length(self, tokens: int) -> None:
        longest = getattr(self.config.text_config, "max_position_embeddings", None)
        if longest is not None and tokens > longest:
            raise ValueError(
                f"{tokens} tokens ({self.image_tokens} for each image) exceed the model's context of {longest}: "
                "use fewer or smaller images, or a shuffle"
            )

    def get_output_embeddings(self) -> nn.Module:
        """Return the language model's output projection."""
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the language model's output projection."""
        self.language_model.set_output_embeddings(value)

    register_for_auto_class = TimmLlavaConfig.register_for_auto_class  # which does nothing


def create_projector(config: TimmLlavaConfig) -> nn.Module:
    """Return a projector with new weights, as LLaVA's and nanoVLM's trainers draw them."""
    if config.projector == "mlp":
        return LlavaMultiModalProjector(config)
    layer = nn.Linear(config.vision_config.hidden_size, config.text_config.hidden_size, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def geometry(tower: Any, layer: int) -> tuple[tuple[int, int], int, int]:
    """Return the height and width of an image, the side of a patch, and the channels of features of block `layer`.

    Raises:
        ValueError: the tower has no such block, or gives no features of it.
    """
    if not hasattr(tower, "forward_intermediates") or len(tower.feature_info) < -layer:
        raise ValueError(f"tower must be a ViT with a block {layer} (feature_layer), got {type(tower).__name__}")
    size = getattr(getattr(tower, "patch_embed", None), "img_size", None)
    size = size or resolve_model_data_config(tower)["input_size"][-2:]
    return tuple(size), tower.feature_info[layer]["reduction"], tower.feature_info[layer]["num_chs"]


AutoConfig.register(TimmLlavaConfig.model_type, TimmLlavaConfig, exist_ok=True)
AutoModelForImageTextToText.register(TimmLlavaConfig, TimmLlava, exist_ok=True)
