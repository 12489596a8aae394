"""The processor of a vision-language model: transformers' `LlavaProcessor` with the tower's images."""

import copy
from pathlib import Path
from typing import Any

import jinja2
from transformers import (
    GenerationConfig,
    LlavaImageProcessor,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.image_utils import PILImageResampling
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from diffvision.models.language.hugging_face import fast_tokenizer, tokenizer_file
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
    tokenizer's own chat template is used if it has one, with an image's placeholder and a line break before its text
    where it does not write them itself. What ends an answer by the template ends the model's generation too.

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
    processor = LlavaProcessor(
        image_processor=transform,
        tokenizer=tokenizer,
        patch_size=model.patch_size * config.shuffle,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token, which "default" takes off again
        chat_template=own if own and _writes_images(tokenizer, own) else FLATTEN + (own or QUESTION),
        image_token=IMAGE,
    )
    _end_with_turns(model.generation_config, processor)
    return processor


def _messages(answer: str) -> list[dict[str, Any]]:
    question = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]


def _writes_images(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether a chat template writes the placeholder of an image part."""
    try:
        written: Any = tokenizer.apply_chat_template(_messages("A star."), chat_template=template, tokenize=False)
    except (jinja2.TemplateError, TypeError):  # a template for texts meets a list of parts
        return False
    return written.count(IMAGE) == 1


def _end_with_turns(generation: GenerationConfig, processor: LlavaProcessor) -> None:
    """Add the special token that the chat template writes after an answer to those that end a generation."""
    tokenizer, answer = processor.tokenizer, "A star."
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    try:
        written: Any = processor.apply_chat_template(_messages(answer), tokenize=False)
    except jinja2.TemplateError:  # which training tells of
        written = ""
    _, is_written, rest = written.rpartition(answer)
    after = tokenizer(rest.strip(), add_special_tokens=False)["input_ids"][:1] if is_written else []
    known = generation.eos_token_id
    ends = [tokenizer.eos_token_id] if known is None else known if isinstance(known, list) else [known]
    ends = [*ends, *(token for token in after if token in special)]
    unique = [token for token in dict.fromkeys(ends) if token is not None]
    generation.eos_token_id = unique[0] if len(unique) == 1 else unique or None
