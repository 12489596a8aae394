"""Conversations about images: a row of JSON with its images -> token ids, which of them are learned, and pixels.

The conversation is written by `text.chat` with the template of the model's processor, so that a training row has the
tokens of the processor's `apply_chat_template`.
"""

from functools import cached_property
from typing import Any

import tokenizers
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffvision.data.batches import VisionLanguageBatch
from diffvision.data.images.decode import check_processed, decode_image, json_record
from diffvision.data.images.samples import IMAGE_KEYS, json_key, missing_member
from diffvision.data.shards.loader import EvaluationLoader, ShardLoader
from diffvision.data.shards.remote import ShardCache
from diffvision.data.shards.sample import BadSample, Members
from diffvision.data.shards.sources import split_shards
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.chat import ASSISTANT, Chat, Messages, read_turns
from diffvision.data.text.tokenizers import BadText, Tokenizer
from diffvision.data.trainer import LoaderData

PLACEHOLDER = "<image>"
"""Where an image stands in LLaVA's conversations."""


def check_image(image: Image.Image, processor: Any) -> None:
    """Raise BadSample where an image processor of transformers would take too much memory for an image."""
    size = getattr(processor, "size", None) or {}
    check_processed(image.size, pads=bool(getattr(processor, "do_pad", False)), shortest_edge=size.get("shortest_edge"))


def conversation_key(members: Members) -> str | None:
    """Return the field of a sample's JSON with a conversation, as a key; else None."""
    return json_key(members, ("texts", "messages", "conversations"), lambda value: isinstance(value, list))


def read_row(members: Members) -> tuple[Messages, list[bytes]]:
    """Return the conversation of a sample, with parts as contents, and its images in their order.

    The JSON has nanoVLM's `texts`, before which the images stand; `messages` of role and content; or LLaVA's
    `conversations`. Where a content is text, images stand at `PLACEHOLDER`; line breaks next to it belong to it. A
    single image of a message of `conversations` goes before its text, as LLaVA's trainer and our questions have it.
    Images are one `jpg`, `png` or `webp`, or `0.jpg`, `1.jpg` and so on.

    Raises:
        BadSample: another layout; a conversation that does not alternate between user and assistant, or ends before the
            answer; more or fewer placeholders than images.
    """
    if (data := members.get("json")) is None:
        raise missing_member("json", members, "json", ("json",))
    numbers = {name: name.rpartition(".")[0] for name in members if name.rpartition(".")[2] in IMAGE_KEYS}
    names = sorted((int(number or 0), name) for name, number in numbers.items() if f"0{number}".isdecimal())
    return read_conversation(json_record(data), len(names)), [members[name] for _, name in names]


def read_conversation(record: dict[str, Any], images: int) -> Messages:
    """Return the messages of a row with that many images; see `read_row`."""
    try:
        if record.get("texts") is not None:
            record = {**record, "messages": [turn for pair in record["texts"] for turn in _read_pair(pair)]}
            for first in record["messages"][:1]:
                first["content"] = PLACEHOLDER * images + first["content"]
        messages = [{**turn, "content": _parts(turn["content"])} for turn in read_turns(record)]
        if not isinstance(record.get("messages"), list):
            messages = [{**message, "content": _image_first(message["content"])} for message in messages]
    except (LookupError, TypeError, AttributeError):
        raise BadSample("a message that is not text, or parts of images and text") from None
    speakers = [message["role"] for message in messages]
    asked = speakers[speakers[:1] == ["system"] :]
    if not asked or asked != ["user", ASSISTANT] * (len(asked) // 2):
        raise BadSample("conversation does not alternate between user and assistant")
    placed = [message["role"] for message in messages for part in message["content"] if part["type"] == "image"]
    if set(placed) - {"user"}:
        raise BadSample("image in a message that is not the user's")
    if len(placed) != images:
        raise BadSample("image without placeholder" if len(placed) < images else "placeholder without image")
    return messages


def _read_pair(pair: dict[str, Any]) -> Messages:
    """Return a question and its answer, which has all else that the pair has but where it comes from."""
    user, answer = (pair[role].replace(PLACEHOLDER, "") for role in ("user", ASSISTANT))
    more = {key: value for key, value in pair.items() if key not in ("user", ASSISTANT, "source")}
    return [{"role": "user", "content": user}, {"role": ASSISTANT, "content": answer, **more}]


def _parts(content: Any) -> list[dict[str, str]]:
    """Return a message's content as parts; raise an error of any kind where it is neither text nor parts."""
    if isinstance(content, str):
        texts = content.split(PLACEHOLDER)
        texts = [text.strip("\n") for text in texts] if len(texts) > 1 else texts
        parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
        return [part for part in parts if part.get("text") != ""] or parts
    return [{"type": "image"} if p["type"] == "image" else {"type": "text", "text": "" + p["text"]} for p in content]


def _image_first(parts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return a message's image before its text, which is one part, as LLaVA's trainer writes it; several stay."""
    if sum(part["type"] == "image" for part in parts) != 1:
        return parts
    text = "".join(part["text"] for part in parts if part["type"] == "text").strip()
    return [{"type": "image"}] + [{"type": "text", "text": text}] * bool(text)


class Conversation:
    """`VisionLanguageBatch`: images and their conversation, whose answers are learned.

    Args:
        processor: a `LlavaProcessor` of transformers: image processor, tokenizer and chat template.
        image_tokens: tokens of the model for each image.
        length: tokens of the longest conversation that is used; longer ones are bad samples.

    Raises:
        ValueError: the processor has no chat template, one that cannot be trained with, or is of another model; or an
            image has as many tokens as `length` or more.
    """

    def __init__(self, processor: Any, image_tokens: int, length: int) -> None:
        if image_tokens >= length:
            raise ValueError(
                f"data.length is {length}, and an image alone has {image_tokens} tokens: set it to hold images and text"
            )
        self.image_tokens, self.length, self.image_processor = image_tokens, length, processor.image_processor
        self.placeholder: int = processor.image_token_id
        theirs, template = processor.tokenizer, processor.chat_template
        if not isinstance(template, str):
            raise ValueError("the processor has no chat template: set processor.chat_template, then save it")
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str()), theirs.eos_token)
        self.chat = Chat(tokenizer, template, "of the processor", theirs.bos_token or "")
        self._check(processor)

    def _check(self, processor: Any) -> None:
        """Check that an example has the processor's tokens; record those that its tokenizer puts before every text."""
        picture, text = Image.new("RGB", (64, 32)), {"type": "text", "text": "What is it?"}
        ids = self._expand(self.chat.check_training([{"type": "image"}, text], [text]))
        if self.placeholder not in ids:  # not all versions of transformers refuse it
            raise ValueError("the processor's chat template must write an image's placeholder, and writes none")
        question = [{"type": "image", "image": picture}, text]
        messages = [{"role": "user", "content": question}, {"role": ASSISTANT, "content": [text]}]
        theirs = processor.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"][0]
        start = processor.tokenizer("")["input_ids"]
        self._start: list[int] = start if theirs[: len(start)] == start != ids[: len(start)] else []
        if theirs[: len(self._start) + len(ids)] != self._start + ids:
            raise ValueError(
                f"the processor writes {theirs.count(self.placeholder)} placeholders for an image, and the model has "
                f"{self.image_tokens} tokens for one: use the LlavaProcessor of this model"
            )
        self.image_shape = self.transform(picture).shape

    def transform(self, image: Image.Image) -> Tensor:
        """Return the pixels of an image as the model takes them, float [3, height, width].

        Raises:
            BadSample: it is so long that padding or resizing it would take too much memory.
        """
        check_image(image, self.image_processor)
        return self.image_processor(image, return_tensors="pt")["pixel_values"][0]

    def encode(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation with parts as contents, and whether each is learned.

        The ids are those of the processor's `apply_chat_template`, up to white space after the last answer.

        Args:
            messages: what `read_row` returns.

        Raises:
            BadSample: it is longer than `length`, or the template fails.
        """
        try:
            ids, learned = self.chat.encode_messages(messages)
        except BadText as error:
            raise BadSample(error.reason) from None
        tokens = self._start + self._expand(ids)
        if len(tokens) > self.length:
            raise BadSample(f"conversation longer than {self.length} tokens")
        bits = [bit for one, bit in zip(ids, learned, strict=True) for _ in self._expand([one])]
        return tokens, [False] * len(self._start) + bits

    def _expand(self, ids: list[int]) -> list[int]:
        """Return the ids with as many placeholders for each image as it has tokens."""
        return [token for one in ids for token in [one] * (self.image_tokens if one == self.placeholder else 1)]

    def decode(self, members: Members) -> dict[str, Any]:
        """Decode one sample."""
        messages, images = read_row(members)
        ids, learned = self.encode(messages)  # first: it costs little, and a bad one saves the images
        return {"image": [self.transform(decode_image(data)) for data in images], "tokens": ids, "learned": learned}

    def collate(self, items: list[dict[str, Any]]) -> VisionLanguageBatch:
        """Join decoded samples into a batch."""
        images = [image for item in items for image in item["image"]]
        return {
            "image": torch.stack(images) if images else torch.empty(0, *self.image_shape),
            "tokens": pad_sequence([torch.tensor(item["tokens"]) for item in items], batch_first=True),
            "lengths": torch.tensor([len(item["tokens"]) for item in items]),
            "learned": pad_sequence([torch.tensor(item["learned"]) for item in items], batch_first=True),
        }


class VisionLanguageData(LoaderData):
    """Conversations about images for a vision-language model; validation sees each of them exactly once.

    Args:
        train: shards with rows as `read_row` takes them: a directory, tar files, a brace pattern, URLs, or a list.
        batch_size: conversations of a global batch, over all ranks.
        length: tokens of the longest conversation, placeholders among them; longer ones are left out and counted.
        evaluation: shards to validate on.
        cache_bytes: room on local disk for remote shards.
        processor: the model's; None: that of the LightningModule that is trained, as for the next one.
        image_tokens: tokens per image of the model.
        settings: as of `LoaderData`.
    """

    def __init__(
        self,
        train: str | list[str],
        batch_size: int,
        length: int,
        evaluation: str | list[str] | None = None,
        *,
        cache_bytes: int = 100 * 10**9,
        processor: Any = None,
        image_tokens: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(batch_size, **settings)
        self.train, self.length, self.evaluation, self.cache_bytes = train, length, evaluation, cache_bytes
        self.processor, self.image_tokens = processor, image_tokens

    @cached_property
    def conversation(self) -> Conversation:
        """How samples are read; a ValueError where there is no processor, or as of `Conversation`."""
        processor, image_tokens = self.setting_or_model("processor"), self.setting_or_model("image_tokens")
        if processor is None or image_tokens is None:
            raise ValueError(
                "VisionLanguageData has no processor or no image_tokens: pass the model's, or train a module with both"
            )
        return Conversation(processor, image_tokens, self.length)

    def setup(self, stage: str | None = None) -> None:
        """Check the processor, so that a fault in it is known before training."""
        self.conversation  # noqa: B018  # it is kept

    def train_dataloader(self) -> ShardLoader:
        """Return the training batches, `VisionLanguageBatch`es."""
        return self.read_training(self._shards(self.train, "train"), self.conversation)

    def val_dataloader(self) -> EvaluationLoader | list:
        """Return the evaluation batches, or no loader where there is no evaluation."""
        if self.evaluation is None:
            return []
        return self.read_evaluation(self._shards(self.evaluation, "test"), self.conversation)

    def _shards(self, source: str | list[str], split: str) -> ShardSet:
        return ShardSet(split_shards(source, split), ShardCache(max_bytes=self.cache_bytes))
