"""The processor of a vision-language model: transformers' `LlavaProcessor` with the tower's images."""

import copy
from pathlib import Path
from typing import Any

from transformers import LlavaImageProcessor, LlavaProcessor, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.image_utils import PILImageResampling
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from diffvision.models.language.transformers import fast_tokenizer, tokenizer_file
from diffvision.models.vision_language_parts import preprocess

IMAGE = "<image>"
"""The placeholder of an image in a text."""

FLATTEN = """\
{%- set flat = namespace(messages=[]) %}
{%- for message in messages %}
{%- set content = namespace(text=message.content if message.content is string else '') %}
{%- for part in message.content if message.content is not string %}
{%- set content.text = content.text + ('<image>\\n' if part.type == 'image' else part.text) %}{% endfor %}
{%- set flat.messages = flat.messages + [{'role': message.role, 'content': content.text}] %}{% endfor %}
{%- set messages = flat.messages %}"""
"""Before a chat template for text: an image part is its placeholder and a line break."""
QUESTION = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{ 'USER: ' + message.content + ' ASSISTANT:' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- else %}{{ message.content + ' ' }}{% endif %}{% endfor %}"""
"""LLaVA-1.5's template, for tokenizers without one."""


def with_image_token(tokenizer: Any, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Return a copy of a language model's tokenizer with the special token `IMAGE`, which pads at the left.

    Args:
        tokenizer: of transformers; or the path of a tokenizer.json, or of its folder.
        config: the language model's configuration.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the tokenizer has more tokens than the language model.
    """
    if isinstance(tokenizer, str | Path):
        longest = getattr(config, "max_position_embeddings", VERY_LARGE_INTEGER)
        tokenizer = fast_tokenizer(tokenizer_file(Path(tokenizer)), config.vocab_size, longest)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side, tokenizer.split_special_tokens = "left", False
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if (size := len(tokenizer)) > config.vocab_size and IMAGE not in tokenizer.get_vocab():
        raise ValueError(
            f"the tokenizer has {size} tokens and the language model {config.vocab_size}: give the model's own"
        )
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    return tokenizer


def make_processor(model: Any, tokenizer: Any) -> LlavaProcessor:
    """Return the processor of a `VisionLanguageModel`: transform, tokenizer with placeholders, chat template.

    An image is padded to a square with the mean colour, as LLaVA-1.5 has it, and resized to the tower's size. The
    tokenizer's own chat template is used if it has one, with an image's placeholder and a line break before its text.

    Args:
        model: the model.
        tokenizer: as in `with_image_token`.

    Raises:
        ValueError: the tokenizer has more tokens than the language model, or its token `IMAGE` is not the placeholder.
    """
    config = model.config
    tokenizer = with_image_token(tokenizer, config.text_config)
    if (found := tokenizer.convert_tokens_to_ids(IMAGE)) != config.image_token_id:
        raise ValueError(
            f"{IMAGE} is token {found} of the tokenizer and image_token_id is {config.image_token_id}: create the "
            "model with this tokenizer"
        )
    height, width = model.image_size
    images = {**preprocess(model.tower), **(config.preprocess or {})}
    transform = LlavaImageProcessor(
        do_pad=True,
        size={"height": height, "width": width},
        crop_size={"height": height, "width": width},
        resample=getattr(PILImageResampling, images["interpolation"].upper()),
        image_mean=list(images["mean"]),
        image_std=list(images["std"]),
    )
    own = tokenizer.chat_template
    return LlavaProcessor(
        image_processor=transform,
        tokenizer=tokenizer,
        patch_size=model.patch_size * config.shuffle,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token, which "default" takes off again
        chat_template=own if own and "image" in own else FLATTEN + (own or QUESTION),
        image_token=IMAGE,
    )
