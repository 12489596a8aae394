"""Vision-language models: an image tower, a projector and a causal language model, as a model of transformers.

An image stands in the text as `image_tokens` placeholders, whose embeddings are replaced by the projected features of
the tower. Cache, padding and generation are transformers'. It needs `pip install diffvision[hf]`. Importing this module
registers the classes with transformers' Auto classes.

Sources: LLaVA-1.5 (arXiv 2310.03744) for the two-layer projector and the second-last block, nanoVLM
(github.com/huggingface/nanoVLM) for the pixel shuffle.
"""

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from diffvision.models import language as languages
from diffvision.models.image_processor import IMAGE, make_processor, with_image_token
from diffvision.models.image_towers import create_tower, features, geometry
from diffvision.models.language.transformers import DiffTransformerForCausalLM
from diffvision.models.language.transformers_decoder import mark_as_initialised
from diffvision.models.names import unknown_model

__all__ = ["NAMES", "PROJECTORS", "VisionLanguageConfig", "VisionLanguageModel", "create", "make_processor"]

NAMES = {
    "vlm-debug": ("plain_vit_debug", "transformer-debug"),
    "diff-vlm-debug": ("diff_vit_debug", "diffv2-debug"),
}
"""Name of a vision-language model -> its tower and its language model."""


class VisionLanguageConfig(PreTrainedConfig):
    """The settings of a `VisionLanguageModel`.

    Attributes:
        tower: timm's or OpenCLIP's name of the image tower; of an OpenCLIP model the `visual`.
        tower_args: arguments of `timm.create_model` or `open_clip.create_model`, such as img_size.
        feature_layer: -1 for the last block with the tower's final norm, -2 for the second-last block without it, as
            LLaVA-1.5 has it.
        projector: key of `PROJECTORS`.
        shuffle: side of the squares of patches that "pixel_shuffle" joins into one token.
        preprocess: mean, std and interpolation of images, where they differ from the tower's own.
        image_token_id: the placeholder; by default the first id beyond the vocabulary, which cannot be generated.
        text_config: the configuration of any causal language model of transformers.
    """

    model_type = "diffvision_vlm"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    tower: str = "plain_vit_debug"
    tower_args: dict[str, Any] | None = None
    feature_layer: int = -2
    projector: str = "mlp"
    shuffle: int = 1
    preprocess: dict[str, Any] | None = None
    image_token_id: int | None = None
    text_config: dict[str, Any] | PreTrainedConfig | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.feature_layer not in (-1, -2):
            raise ValueError(f"feature_layer is {self.feature_layer!r}: give -1 (last block) or -2 (second-last)")
        if self.projector not in PROJECTORS:
            raise ValueError(f"projector is {self.projector!r}: choose one of {', '.join(PROJECTORS)}")
        text, self.text_config = self.text_config or {"model_type": "diff_transformer"}, None
        super().__post_init__(**kwargs)  # it would reset the attention of a language model's own configuration
        self.text_config = AutoConfig.for_model(**text) if isinstance(text, dict) else text
        if self.image_token_id is None:
            self.image_token_id = self.text_config.vocab_size


class MlpProjector(nn.Module):
    """Two linear layers with GELU between them, on each patch, as in LLaVA-1.5."""

    def __init__(self, width: int, dim: int, shuffle: int = 1) -> None:
        super().__init__()
        if shuffle != 1:
            raise ValueError(f"shuffle is {shuffle}, and projector 'mlp' joins no patches: leave it at 1")
        self.linear_1, self.act, self.linear_2 = nn.Linear(width, dim), nn.GELU(), nn.Linear(dim, dim)

    def forward(self, features: Float[Tensor, "I C h w"]) -> Float[Tensor, "I T dim"]:
        """Return a token for each patch, row by row."""
        return self.linear_2(self.act(self.linear_1(features.flatten(2).transpose(1, 2))))


class PixelShuffleProjector(nn.Module):
    """One linear layer on the joined features of a square of patches, as in nanoVLM."""

    def __init__(self, width: int, dim: int, shuffle: int) -> None:
        super().__init__()
        self.shuffle = shuffle
        self.proj = nn.Linear(width * shuffle**2, dim, bias=False)
        nn.init.normal_(self.proj.weight, std=0.02)

    def forward(self, features: Float[Tensor, "I C h w"]) -> Float[Tensor, "I T dim"]:
        """Return a token for each square of patches, row by row."""
        side = self.shuffle
        squares = features.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 3, 5, 1)
        return self.proj(squares.flatten(3).flatten(1, 2))


PROJECTORS: dict[str, type[nn.Module]] = {"mlp": MlpProjector, "pixel_shuffle": PixelShuffleProjector}


class VisionLanguageModel(PreTrainedModel, GenerationMixin):
    """An image tower, a projector and a causal language model.

    Args:
        config: the configuration.
        tower: as `create_tower` returns it; by default one with new weights.
        language_model: a causal language model of transformers; by default one with new weights.

    Attributes:
        tower: the image tower.
        projector: from the tower's features to embeddings of the language model.
        language_model: a `DiffTransformerForCausalLM`, or any of transformers.
        image_size: height and width of an image.
        image_tokens: tokens per image, after the shuffle.

    Raises:
        ValueError: the shuffle does not divide the grid of patches, or an image has more tokens than the language
            model's context.
    """

    config_class = VisionLanguageConfig
    main_input_name = "input_ids"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012  (as the base class has it)

    def __init__(self, config: VisionLanguageConfig, tower: Any = None, language_model: Any = None) -> None:
        super().__init__(config)
        self.tower = create_tower(config.tower, config.tower_args) if tower is None else tower
        if language_model is None:
            language_model = AutoModelForCausalLM.from_config(config.text_config)
        self.language_model = language_model
        self.image_size, self.patch_size, width = geometry(self.tower, config.feature_layer)
        rows, columns = (size // self.patch_size for size in self.image_size)
        if rows % config.shuffle or columns % config.shuffle:
            raise ValueError(
                f"shuffle is {config.shuffle}, and the tower has {rows} x {columns} patches: give a divisor of both"
            )
        self.image_tokens = rows * columns // config.shuffle**2
        self._check_length(self.image_tokens)
        self.projector = PROJECTORS[config.projector](width, config.text_config.hidden_size, config.shuffle)
        if config.image_token_id < config.text_config.vocab_size:
            self.generation_config.suppress_tokens = [config.image_token_id]
        mark_as_initialised(self)
        self.post_init()

    def image_features(self, pixel_values: Float[Tensor, "I 3 h w"]) -> Float[Tensor, "I T dim"]:
        """Return the tokens of images that the processor has transformed.

        Raises:
            ValueError: the images are not of the tower's size.
        """
        if tuple(pixel_values.shape[-2:]) != self.image_size:
            raise ValueError(
                f"images are {list(pixel_values.shape[-2:])}, and the tower takes {list(self.image_size)}: use the "
                "processor of this model"
            )
        return self.projector(features(self.tower, pixel_values.to(self.dtype), self.config.feature_layer))

    def embed(
        self,
        input_ids: Int[Tensor, "B N"],
        pixel_values: Float[Tensor, "I 3 h w"] | None = None,
        *,
        has_past: bool = False,
    ) -> Float[Tensor, "B N dim"]:
        """Return embeddings of tokens, with the images' in place of the placeholders, in reading order.

        Raises:
            ValueError: there are more or fewer placeholders than tokens of images.
        """
        places = input_ids == self.config.image_token_id
        if not torch.compiler.is_compiling() and not (has_past and pixel_values is None):
            self._check_count(places, 0 if pixel_values is None else len(pixel_values))
        embeds = self.get_input_embeddings()(input_ids.masked_fill(places, 0))
        if pixel_values is None:
            return embeds
        return embeds.masked_scatter(places[..., None], self.image_features(pixel_values).to(embeds))

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
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return what the language model returns for text with images.

        Args:
            input_ids: tokens, with `image_tokens` placeholders for each image.
            pixel_values: all images of the batch, in reading order; None for text alone.
            attention_mask: [B, past + N], 0 for padding at either side.
            position_ids: as the language model takes them.
            past_key_values: a cache of transformers; these tokens are added to it.
            inputs_embeds: embeddings in place of input_ids and pixel_values.
            labels: equal to input_ids, -100 where there is no loss; the language model shifts them.
            use_cache: return a cache for the tokens to follow.
            logits_to_keep: the logits of this many last tokens only; 0 for all.
            **kwargs: of the language model.

        Raises:
            ValueError: placeholders and images do not match, or there are more tokens than the context.
        """
        inputs_embeds = self._embeds(input_ids, pixel_values, past_key_values, inputs_embeds)
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            return_dict=True,
            **kwargs,
        )

    def hidden(
        self,
        input_ids: Int[Tensor, "B N"],
        pixel_values: Float[Tensor, "I 3 h w"] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "B N dim"]:
        """Return the input of the output projection; the arguments are those of `forward`."""
        embeds = self._embeds(input_ids, pixel_values, None, None)
        return self.language_model.base_model(
            inputs_embeds=embeds, attention_mask=attention_mask, use_cache=False, return_dict=True, **kwargs
        ).last_hidden_state

    @property
    def head_weight(self) -> Float[Tensor, "vocabulary dim"]:
        """The weight of the output projection."""
        return self.language_model.get_output_embeddings().weight

    def _embeds(self, input_ids: Any, pixel_values: Any, past: Any, inputs_embeds: Any) -> Tensor:
        start = 0 if past is None else past.get_seq_length()
        if inputs_embeds is None:
            inputs_embeds = self.embed(input_ids, pixel_values, has_past=not isinstance(start, int) or start > 0)
        elif pixel_values is not None:
            raise ValueError("inputs_embeds with pixel_values: give input_ids, or embeddings that hold the images")
        if isinstance(start, int):
            self._check_length(start + inputs_embeds.shape[1])
        return inputs_embeds

    def _check_count(self, places: Bool[Tensor, "B N"], images: int) -> None:
        if (count := int(places.sum())) != images * self.image_tokens:
            raise ValueError(
                f"{count} placeholders (token {self.config.image_token_id}) for {images} images of "
                f"{self.image_tokens} tokens: write one <image> for each image and use the model's processor"
            )

    def _check_length(self, tokens: int) -> None:
        longest = getattr(self.config.text_config, "max_position_embeddings", None)
        if longest is not None and tokens > longest:
            raise ValueError(
                f"{tokens} tokens ({self.image_tokens} for each image) exceed the model's context of {longest}: "
                "use fewer or smaller images, or a shuffle"
            )

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the weights as they were drawn."""


def create(
    name: str = "vlm-debug",
    *,
    tower: str | None = None,
    tower_args: dict[str, Any] | None = None,
    language: str | None = None,
    language_args: dict[str, Any] | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> VisionLanguageModel:
    """Return a vision-language model with new weights.

    Args:
        name: key of `NAMES`, which gives the tower and the language model.
        tower: another tower, by timm's or OpenCLIP's name.
        tower_args: arguments of the tower.
        language: another language model: a name of ours, `local-dir:FOLDER` or `hf:PATH`, with their weights.
        language_args: fields of `LanguageConfig`, for a name.
        tokenizer: as `make_processor` takes it, to set image_token_id; by default that is beyond the vocabulary.
        **settings: further fields of `VisionLanguageConfig`.

    Raises:
        ValueError: a name is unknown, or a setting does not fit.
    """
    if name not in NAMES:
        raise unknown_model(name, "diffvision.models.vision_language has no", NAMES)
    tower, language = tower or NAMES[name][0], language or NAMES[name][1]
    model = DiffTransformerForCausalLM.from_diffvision(languages.create(language, **(language_args or {})))
    if tokenizer is not None:
        settings["image_token_id"] = with_image_token(tokenizer, model.config).convert_tokens_to_ids(IMAGE)
    config = VisionLanguageConfig(tower=tower, tower_args=tower_args, text_config=model.config, **settings)
    return VisionLanguageModel(config, language_model=model)
