"""Members of a sample -> items of a batch: a class for each kind of batch of images, with the keys it reads.

The bytes of a member are decoded in `decode`; the samples come from `shards` or `image_set`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate  # a worker's goes straight into shared memory

from diffvision.data.batches import ImageTextBatch, RetrievalBatch
from diffvision.data.images.caption_tokenizer import are_cut, text_only
from diffvision.data.images.decode import (
    MAX_CAPTION,
    MAX_JSON_BYTES,
    clean_caption,
    decode_image,
    decode_label,
    decode_text,
    is_blank,
    is_caption,
    json_field,
    json_label,
    json_record,
)
from diffvision.data.images.image_set import ImageSet
from diffvision.data.images.pixels import Pixels
from diffvision.data.shards.sample import BadSample, Members, check_key
from diffvision.data.shards.storage import ShardSet

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")
CAPTION_NAMES = ("caption", "captions", "text", "title", "sentence", "sentences")
"""The usual names of a caption in JSON and in tables."""
LABEL_NAMES = ("label", "labels", "class", "class_name", "category", "fine_label")
MAX_KIND = 60
"""Characters of a sample's kind, which is part of the names of metrics."""
_LISTED = 6  # members, in a reason

Transform = Callable[[Image.Image], Tensor]
Tokenizer = Callable[[list[str]], Tensor]


def missing_member(what: str, members: Members, setting: str, types: Sequence[str]) -> BadSample:
    """Return the reason where a sample lacks a member: what it has instead, and the setting that would read it.

    Args:
        what: the member in words, such as "caption".
        members: what the sample has.
        setting: the name of the setting.
        types: the types that the setting takes.
    """
    names = sorted(members)
    listed = ", ".join([*names[:_LISTED], *["..."] * (len(names) > _LISTED)]) or "no members"
    if others := [name for name in names if name.rpartition(".")[2] in types]:
        rename = ", or rename the members: a key ends at the first dot" if all("." in name for name in others) else ""
        return BadSample(f"missing {what}: the sample has {listed}; set {setting}{rename}")
    return BadSample(f"missing {what}: the sample has {listed}, none of them {', '.join(types)}")


def caption_key(members: Members) -> str | None:
    """Return the key of a sample's caption: its text, else the field of its JSON with a caption's name; else None."""
    return "txt" if "txt" in members else json_key(members, CAPTION_NAMES, is_caption)


def label_key(members: Members) -> str | None:
    """Return the key of a sample's class: `cls`, else the field of its JSON with a label's name; else None."""
    return "cls" if "cls" in members else json_key(members, LABEL_NAMES, lambda v: v is not None)


def find_caption_key(source: ShardSet | ImageSet) -> str:
    """Return the key of the caption that most of the first samples have, "txt" where none has one."""
    return source.images.caption_key if isinstance(source, ImageSet) else _most_common(source, caption_key) or "txt"


def find_label_key(source: ShardSet | ImageSet) -> str:
    """Return the key of the class number that most of the first samples have, "cls" where none has one."""
    return "cls" if isinstance(source, ImageSet) else _most_common(source, label_key) or "cls"


def _most_common(source: ShardSet, key_of: Callable[[Members], str | None]) -> str | None:
    keys = Counter(key for members in source.first() if (key := key_of(members)) is not None)
    return keys.most_common(1)[0][0] if keys else None


def json_key(members: Members, names: Sequence[str], fits: Callable[[Any], bool]) -> str | None:
    """Return the first `json:NAME` whose value fits; None without a readable JSON member."""
    data = members.get("json")
    if data is None or len(data) > MAX_JSON_BYTES:
        return None
    try:
        record = json_record(data)
    except BadSample:
        return None
    return next((f"json:{name}" for name in names if fits(record.get(name))), None)


class ImageMember:
    """Reads the image of a sample: the first of `keys` that the sample has.

    `Pixels` as the transform reads encoded images by its own decoder.
    """

    def __init__(self, transform: Transform | Pixels, keys: str | Sequence[str] = IMAGE_KEYS):
        self.transform = transform
        self.keys = tuple(keys.split(";")) if isinstance(keys, str) else tuple(keys)
        for key in self.keys:
            check_key(key, IMAGE_KEYS)

    def __call__(self, members: Members) -> Tensor:
        for key in self.keys:
            if (data := members.get(key)) is not None:
                transform = self.transform
                return transform.read(data) if isinstance(transform, Pixels) else transform(decode_image(data))
        raise missing_member("image", members, "image_key", IMAGE_KEYS)


class CaptionMember:
    """Reads the captions of a sample from a text member (`txt`) or a field of a JSON one (`json:caption`)."""

    def __init__(self, key: str = "txt"):
        self.key, _, self.field = key.partition(":")
        check_key(self.key, ("json",) if self.field else ("txt",))

    def one(self, members: Members) -> str:
        """Return the caption; of a list in JSON, one drawn at random of those that are not blank."""
        captions = self.read(members)
        if isinstance(captions, list):
            captions = [caption for caption in captions if not is_blank(caption)] or captions
            captions = captions[int(torch.randint(len(captions), ()))]
        return clean_caption(captions)

    def all(self, members: Members) -> list[str]:
        """Return every caption, the lines of the text or the list in JSON; blank ones among others are kept as ""."""
        captions = self.read(members)
        lines = captions if isinstance(captions, list) else captions.splitlines()
        cut = [line.strip()[:MAX_CAPTION] for line in lines]
        if all(map(is_blank, cut)):
            raise BadSample("empty caption")
        return ["" if is_blank(line) else clean_caption(line) for line in cut]

    def read(self, members: Members) -> str | list[str]:
        """Return the sample's caption, or all its captions as one text or a list."""
        if (data := members.get(self.key)) is None:
            raise missing_member("caption", members, "caption_key", ("txt", "json"))
        if self.field:
            return json_field(data, self.field)
        limit = MAX_JSON_BYTES  # of many captions; one is cut much shorter
        return decode_text(data[:limit], cut=len(data) > limit)


class _ImageKind:
    """Joins samples, dictionaries: texts and lists become a list, other values what torch's `default_collate` makes."""

    def collate(self, items: list[dict[str, Any]]) -> Any:
        """Join decoded samples into a batch."""
        return {key: _join([item[key] for item in items]) for key in items[0]}


def _join(values: list[Any]) -> Any:
    return values if isinstance(values[0], str | list) else default_collate(values)


class ImageText(_ImageKind):
    """`ImageTextBatch`: an image and one caption as token ids, all of it text to the tokenizer (see `captions`).

    Attributes:
        cut: captions of the last batch that have more tokens than the tokenizer keeps.
    """

    def __init__(self, image: ImageMember, caption: CaptionMember, tokenizer: Tokenizer) -> None:
        self.cut = 0
        self.image, self.caption, self.tokenizer = image, caption, text_only(tokenizer)

    def decode(self, members: Members) -> dict[str, Any]:
        """Decode one sample; the tokenizer reads the captions of a whole batch."""
        caption = self.caption.one(members)  # first: it costs little, and a bad one saves the image
        return {"image": self.image(members), "text": caption}

    def collate(self, items: list[dict[str, Any]]) -> ImageTextBatch:
        """Join decoded samples into a batch."""
        images = default_collate([item["image"] for item in items])
        texts = [item["text"] for item in items]
        tokens = self.tokenizer(texts)
        self.cut = sum(are_cut(self.tokenizer, texts, tokens))
        return {"image": images, "text": tokens}


class ImageLabel(_ImageKind):
    """`ImageLabelBatch`: an image and its class number, below `num_classes` where that is known.

    The number is that of a member (`cls`) or of a field of a JSON one (`json:label`).
    """

    def __init__(self, image: ImageMember, key: str = "cls", num_classes: int | None = None) -> None:
        self.image, self.num_classes = image, num_classes
        self.key, _, self.field = key.partition(":")
        check_key(self.key, ("json",) if self.field else ("cls", "txt"))

    def decode(self, members: Members) -> dict[str, Any]:
        """Decode one sample."""
        label = self.label(members)
        return {"image": self.image(members), "label": label}

    def label(self, members: Members) -> int:
        """Return the class number of a sample."""
        if (data := members.get(self.key)) is None:
            raise missing_member("label", members, "label_key", ("cls", "txt", "json"))
        label = json_label(data, self.field) if self.field else decode_label(data)
        if self.num_classes is not None and label >= self.num_classes:
            raise BadSample("label beyond the classes")
        return label


class Retrieval(_ImageKind):
    """`RetrievalBatch`: an image and all its captions as text."""

    def __init__(self, image: ImageMember, caption: CaptionMember) -> None:
        self.image, self.caption = image, caption

    def decode(self, members: Members) -> dict[str, Any]:
        """Decode one sample."""
        captions = self.caption.all(members)
        return {"image": self.image(members), "captions": captions}


class Composition(Retrieval):
    """`RetrievalBatch`: an image, its captions, the right one first, and what kind of sample it is."""

    def decode(self, members: Members) -> dict[str, Any]:
        """Decode one sample."""
        kind = kind_of(members)
        return {**super().decode(members), "kind": kind}


class ImagePair(_ImageKind):
    """`RetrievalBatch`: two images with a caption each, from `0.png` and `1.png` (or jpg) and `0.txt` and `1.txt`."""

    def __init__(self, transform: Transform) -> None:
        self._images = [ImageMember(transform, [f"{side}.{key}" for key in IMAGE_KEYS]) for side in (0, 1)]
        self._captions = [CaptionMember(f"{side}.txt") for side in (0, 1)]

    def decode(self, members: Members) -> list[dict[str, Any]]:
        """Decode the two images of one sample."""
        names = sorted(members)
        for side, (image, caption) in enumerate(zip(self._images, self._captions, strict=True)):
            for one, what in ((image.keys, f"{side}.png or {side}.jpg"), ((caption.key,), caption.key)):
                if not set(one) & set(names):
                    raise BadSample(f"missing {what}: the sample has {', '.join(names[:_LISTED]) or 'no members'}")
        captions = [caption.one(members) for caption in self._captions]
        kind = kind_of(members)
        return [
            {"image": image(members), "captions": [caption], "kind": kind}
            for image, caption in zip(self._images, captions, strict=True)
        ]

    def collate(self, items: list[Any]) -> RetrievalBatch:
        """Join decoded samples into a batch, the two images of each next to each other."""
        return super().collate([one for pair in items for one in pair])


class ImageObjects(_ImageKind):
    """`RetrievalBatch`: an image with names of objects in it, then as many of objects that are not.

    They are the lists `present` and `absent` of the sample's JSON; absent[i] is asked against present[i].
    """

    def __init__(self, image: ImageMember) -> None:
        self.image = image

    def decode(self, members: Members) -> dict[str, Any]:
        """Decode one sample."""
        record = _record(members)
        if record is None:
            raise BadSample("missing json, which has the lists present and absent")
        lists = [record.get(name) for name in ("present", "absent")]
        present, absent = [names if isinstance(names, list) and names and is_caption(names) else [] for names in lists]
        if not present or len(present) != len(absent):
            raise BadSample("present and absent in the JSON are not two lists of names of one length")
        return {"image": self.image(members), "captions": [clean_caption(name) for name in (*present, *absent)]}


def kind_of(members: Members) -> str:
    """Return what kind of sample it is, the field `kind` of its JSON; "" where it has none.

    Raises:
        BadSample: the JSON is damaged, or its kind cannot be part of a metric's name.
    """
    kind = (_record(members) or {}).get("kind", "")
    if not isinstance(kind, str) or not kind.isprintable() or "/" in kind or len(kind) > MAX_KIND:
        raise BadSample(f"kind in the JSON is not a text of {MAX_KIND} characters or fewer without a slash")
    return kind.strip()


def _record(members: Members) -> dict[str, Any] | None:
    return None if (data := members.get("json")) is None else json_record(data)
