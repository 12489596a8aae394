"""Vision-language models: an image tower, a projector and a causal language model, as a model of transformers.

An image stands in the text as `image_tokens` placeholders, whose embeddings are replaced by the projected features of
the tower. Cache, padding and generation are transformers'. It needs `pip install diffvision[hf]`. Importing this module
registers the classes with transformers' Auto classes.

Sources: LLaVA-1.5 (arXiv 2310.03744) for the two-layer projector and the second-last block, nanoVLM
(github.com/huggingface/nanoVLM) for the pixel shuffle.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from diffvision.models import vision_language_parts as parts
from diffvision.models.names import unknown_model
from diffvision.models.vision_language_parts import NAMES, Projector, VisionLanguageConfig
from diffvision.models.vision_language_processor import IMAGE, make_processor, with_image_token

__all__ = ["NAMES", "VisionLanguageConfig", "VisionLanguageModel", "create", "make_processor"]


class VisionLanguageModel(PreTrainedModel, GenerationMixin):
    """An image tower, a projector and a causal language model.

    Args:
        config: the configuration.
        tower: as `create_tower` returns it; by default one with new weights.
        language_model: a causal language model of transformers; by default one with new weights.

    Attributes:
        tower: the image tower.
        projector: from the tower's features to embeddings of the language model.
        language_model: any causal language model of transformers.
        image_size: height and width of an image.
        image_tokens: tokens per image, after the shuffle.

    Raises:
        ValueError: the shuffle does not divide the grid of patches, or an image has more tokens than the language
            model's context.
    """

    config_class = VisionLanguageConfig
    main_input_name = "input_ids"
    input_modalities = ["image", "text"]  # noqa: RUF012  (as the base class has it)
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: VisionLanguageConfig, tower: Any = None, language_model: Any = None) -> None:
        super().__init__(config)
        self.tower = parts.create_tower(config.tower, config.tower_args) if tower is None else tower
        if language_model is None:
            language_model = AutoModelForCausalLM.from_config(config.text_config)
        self.language_model = language_model
        self.image_size, self.patch_size, width = parts.geometry(self.tower, config.feature_layer)
        rows, columns = (size // self.patch_size for size in self.image_size)
        if rows % config.shuffle or columns % config.shuffle:
            raise ValueError(
                f"shuffle is {config.shuffle}, and the tower has {rows} x {columns} patches: give a divisor of both"
            )
        self.image_tokens = rows * columns // config.shuffle**2
        self._check_length(self.image_tokens)
        self.projector = Projector(config.projector, width, config.text_config.hidden_size, config.shuffle)
        if config.image_token_id < config.text_config.vocab_size:
            self.generation_config.suppress_tokens = [config.image_token_id]
        parts.mark_as_initialised(self)
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
        return self.projector(
            parts.features(self.tower, pixel_values.to(next(self.tower.parameters()).dtype), self.config.feature_layer)
        )

    def embed(
        self,
        input_ids: Int[Tensor, "B N"],
        pixel_values: Float[Tensor, "I 3 h w"] | None = None,
        past_key_values: Cache | None = None,
    ) -> Float[Tensor, "B N dim"]:
        """Return embeddings of tokens, with the images' in place of the placeholders.

        Args:
            input_ids: tokens, with `image_tokens` placeholders for each image.
            pixel_values: all images of the batch, in reading order; None for text alone.
            past_key_values: a cache with the tokens before these.

        Raises:
            ValueError: placeholders and images do not match, or there are more tokens than the context.
        """
        start: Any = 0 if past_key_values is None else past_key_values.get_seq_length()
        images = 0 if pixel_values is None else len(pixel_values)
        if isinstance(start, int) and not torch.compiler.is_compiling():
            self._check_length(start + input_ids.shape[1])
            if start == 0 or images or input_ids.shape[1] > 1:
                self._check_count(input_ids, images)
        return self._merge(input_ids, pixel_values)

    def _merge(
        self, input_ids: Int[Tensor, "B N"], pixel_values: Float[Tensor, "I 3 h w"] | None
    ) -> Float[Tensor, "B N dim"]:
        places = input_ids == self.config.image_token_id
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
            input_ids, pixel_values: as in `embed`.
            attention_mask: [B, past + N], 0 for padding at either side.
            position_ids, past_key_values, use_cache, logits_to_keep, **kwargs: as the language model takes them.
            inputs_embeds: embeddings in place of input_ids and pixel_values.
            labels: equal to input_ids, -100 where there is no loss; the language model shifts them.

        Raises:
            ValueError: placeholders and images do not match, or there are more tokens than the context.
        """
        if (input_ids is None) == (inputs_embeds is None) or (inputs_embeds is not None and pixel_values is not None):
            raise ValueError("give input_ids, with or without pixel_values, or inputs_embeds")
        if input_ids is not None:
            inputs_embeds = self.embed(input_ids, pixel_values, past_key_values)
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def hidden(
        self,
        input_ids: Int[Tensor, "B N"],
        pixel_values: Float[Tensor, "I 3 h w"] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "B N dim"]:
        """Return the input of the output projection, for training; the arguments are those of `forward`.

        Placeholders and images are not compared, which would wait for a GPU: `VisionLanguageData` has done so.

        Raises:
            ValueError: there are more tokens than the context.
        """
        self._check_length(input_ids.shape[1])
        embeds = self._merge(input_ids, pixel_values)
        decoder = self.language_model.base_model
        return decoder(inputs_embeds=embeds, attention_mask=attention_mask, use_cache=False, **kwargs).last_hidden_state

    def logits(
        self, input_ids: Int[Tensor, "B N"], pixel_values: Float[Tensor, "I 3 h w"] | None = None
    ) -> Float[Tensor, "B N vocabulary"]:
        """Return the logits after each token, for training, as `hidden` returns what the output projection reads."""
        self._check_length(input_ids.shape[1])
        return self.language_model(inputs_embeds=self._merge(input_ids, pixel_values), use_cache=False).logits

    @torch.no_grad()
    def has_bare_head(self) -> bool:
        """Return whether the logits are `hidden @ head_weight.T`: without bias, scale, cap or adapter.

        The model is run on two tokens, with known numbers in place of the projection's output. On the meta device,
        where there are no numbers, the projection alone is looked at.
        """
        head = self.language_model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            return False
        if head.weight.is_meta:
            return True
        seen: dict[str, Tensor] = {}
        known = torch.linspace(-100, 100, head.out_features).to(head.weight)

        def replace(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            seen["read"] = inputs[0]
            return known.expand_as(output)

        def keep(decoder: nn.Module, inputs: Any, output: Any) -> None:
            seen["hidden"] = output.last_hidden_state

        tokens = torch.zeros(1, 2, dtype=torch.int64, device=head.weight.device)
        modes = {module: module.training for module in self.modules()}
        hooks = head.register_forward_hook(replace), self.language_model.base_model.register_forward_hook(keep)
        try:
            logits = self.eval().logits(tokens)
        finally:
            for hook in hooks:
                hook.remove()
            for module, mode in modes.items():
                module.training = mode
        is_same = seen.keys() == {"read", "hidden"} and torch.equal(seen["read"], seen["hidden"])
        return is_same and torch.equal(logits.to(known), known.expand_as(logits))

    @property
    def head_weight(self) -> Float[Tensor, "vocabulary dim"]:
        """The weight of the output projection."""
        return self.language_model.get_output_embeddings().weight

    def _check_count(self, input_ids: Int[Tensor, "B N"], images: int) -> None:
        if (count := int((input_ids == self.config.image_token_id).sum())) != images * self.image_tokens:
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

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inputs of a step; images come with the prompt alone, as transformers has it from 5.15 on."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]  # its self is a protocol
        if not kwargs.get("is_first_iteration") and kwargs.get("use_cache", True):
            inputs.pop("pixel_values", None)
        return inputs

    @classmethod
    def from_pretrained(cls, *args: Any, **settings: Any) -> Any:
        """Load as transformers does, but raise a ValueError for missing and unexpected weights, or of other sizes."""
        wants_info = settings.pop("output_loading_info", False)
        source = args[0] if args else settings.get("pretrained_model_name_or_path")
        try:
            loaded: Any = super().from_pretrained(*args, output_loading_info=True, **settings)
        except RuntimeError as error:
            if "size" not in str(error):
                raise
            raise ValueError(
                f"the weights of {source!r} have other sizes than its configuration says, such as a projector of "
                f"another model: {str(error)[-300:]}"
            ) from error
        model, info = loaded
        parts.check_loaded(info, source, f"tower {model.config.tower!r} and its language model")
        parts.restore_buffers(model.tower, model.config.tower, model.config.tower_args)
        return (model, info) if wants_info else model

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        super()._set_gradient_checkpointing(enable, *args, **kwargs)
        self.tower.set_grad_checkpointing(enable)

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the weights as they were drawn: in a folder none are missing."""

    def _validate_generated_length(self, generation_config: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse more tokens than the context before the first is generated."""
        host: Any = super()
        host._validate_generated_length(generation_config, *args, **kwargs)
        self._check_length(generation_config.max_length)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any
    ) -> Any:
        """Repeat a row's images together, for beams; transformers would repeat each image."""
        images = kwargs.pop("pixel_values", None)
        if images is not None and expand_size > 1:
            self._check_count(input_ids, len(images))
            places = input_ids == self.config.image_token_id
            rows = images.split((places.sum(1) // self.image_tokens).tolist())
            images = torch.cat([row.repeat(expand_size, 1, 1, 1) for row in rows])
        host: Any = super()
        input_ids, kwargs = host._expand_inputs_for_generation(expand_size, False, input_ids, **kwargs)
        return input_ids, kwargs if images is None else {**kwargs, "pixel_values": images}

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: transformers would save this module's text."""


def create(
    name: str = "vlm-debug",
    *,
    tower: str | None = None,
    tower_args: dict[str, Any] | None = None,
    tower_pretrained: str | None = None,
    language: str | None = None,
    language_args: dict[str, Any] | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> VisionLanguageModel:
    """Return a vision-language model, with new weights where none are named.

    Args:
        name: key of `NAMES`, which gives the tower and the language model.
        tower: another tower, by timm's or OpenCLIP's name.
        tower_args: arguments of the tower.
        tower_pretrained: weights of the tower: a tag of its library, a file, or a folder of timm's or OpenCLIP's; of a
            CLIP model the image tower.
        language: another language model: a name of ours; or one with weights: `local-dir:` and a folder or training's
            .ckpt of ours, or `hf:PATH`, of transformers.
        language_args: fields of `LanguageConfig`, for a name.
        tokenizer: as `make_processor` takes it, to set image_token_id; by default that is beyond the vocabulary.
        **settings: further fields of `VisionLanguageConfig`.

    Raises:
        FileNotFoundError: there are no such weights.
        ValueError: a name is unknown, or weights or a setting do not fit.
    """
    if name not in NAMES:
        raise unknown_model(name, "diffvision.models.vision_language has no", NAMES)
    named = NAMES[name]
    if language is None:
        language, language_args = named.language, {**(named.language_args or {}), **(language_args or {})}
    if tower is None:
        tower, tower_args = named.tower, {**(named.tower_args or {}), **(tower_args or {})}
    words = parts.open_language(language, language_args)
    if tokenizer is not None:
        settings["image_token_id"] = with_image_token(tokenizer, words.config).convert_tokens_to_ids(IMAGE)
    config = VisionLanguageConfig(tower=tower, tower_args=tower_args, text_config=words.config, **settings)
    if tower_pretrained is None:
        return VisionLanguageModel(config, language_model=words)
    images, about = parts.load_tower(config.tower, tower_args, tower_pretrained)
    config.preprocess = about | (config.preprocess or {})
    return VisionLanguageModel(config, images, words)


AutoConfig.register(VisionLanguageConfig.model_type, VisionLanguageConfig, exist_ok=True)
AutoModelForImageTextToText.register(VisionLanguageConfig, VisionLanguageModel, exist_ok=True)
