"""Which captions are packed, by length and repetition; and shards as images that can be packed again."""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, cast

import numpy as np

from diffvision.data.images.image_set import Captions, ImageCollection
from diffvision.data.images.samples import (
    IMAGE_KEYS,
    CaptionMember,
    ImageLabel,
    digest,
    find_caption_key,
    find_label_key,
)
from diffvision.data.images.tables import read_captions
from diffvision.data.shards.sample import BadSample, Members
from diffvision.data.shards.storage import ShardSet
from diffvision.progress import track


class FilteredCaptions(Sequence):
    """Captions of images; to read those of an image none of which passes raises BadSample with the reason.

    The arguments are those of `packing.make_folder`.
    """

    def __init__(self, captions: Sequence[Captions], words: Sequence[int] | None, max_repeats: int | None) -> None:
        if words is not None and (len(words) != 2 or not 0 <= words[0] <= words[1]):
            raise ValueError(f"words is {words}: write the least and the most, such as [3, 50]")
        if max_repeats is not None and max_repeats < 1:
            raise ValueError(f"max_repeats is {max_repeats}: it must be at least 1, for one image with each caption")
        self.captions, self.words = captions, words
        self.repeated = np.zeros(len(captions), dtype=bool)
        seen = Counter[tuple[int, ...]]()
        for row in track(range(len(captions) if max_repeats else 0), "comparing captions"):
            with suppress(BadSample):  # it is counted when it is packed
                key = tuple(map(digest, captions[row]))
                self.repeated[row] = seen[key] >= (max_repeats or 0)
                seen[key] += 1

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, row: Any) -> Any:
        captions = self.captions[row]
        reasons = [self._reason(caption) for caption in captions]
        if reasons and all(reasons):
            raise BadSample(reasons[0])
        if self.repeated[row]:
            raise BadSample("caption repeated")
        return captions

    def _reason(self, caption: str) -> str:
        """Return why a caption does not pass; "" where it does."""
        count = len(caption.split())
        if self.words is not None and not self.words[0] <= count <= self.words[1]:
            return "caption too short" if count < self.words[0] else "caption too long"
        return ""


class ShardImages:
    """Reads the images in shards; `captions` and `labels` are sequences over all samples."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards
        self.ends = np.cumsum(shards.counts)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def captions(self) -> "ShardValues":
        """The captions of each sample; one that has none raises BadSample."""
        caption = CaptionMember(find_caption_key(self.shards))
        return ShardValues(self, lambda members: read_captions(caption.read(members)))

    @property
    def labels(self) -> "ShardValues":
        """The class number of each sample; one that has none raises BadSample."""
        return ShardValues(self, ImageLabel(cast(Any, None), find_label_key(self.shards)).label)

    def __call__(self, row: int) -> bytes:
        members = self.members(row)
        for name in filter(members.__contains__, IMAGE_KEYS):
            return members[name]
        raise BadSample("missing image")

    def collection(self, source: Any, has_captions: bool, has_labels: bool, names: Sequence[str]) -> ImageCollection:
        """Return the images with their captions or class numbers; a sample without these raises BadSample."""
        captions, labels = self.captions if has_captions else None, self.labels if has_labels else None
        rows = cast(Any, range(len(self)))
        return ImageCollection(str(source), rows, self, captions, cast(Any, labels), tuple(names))

    def identity(self) -> str:
        return self.shards.content

    def keys(self, *, by_content: bool) -> Sequence[Hashable]:
        """Return by content digests of the encoded images; a sample without one is an image of its own."""
        return self._digests if by_content else range(len(self))

    @cached_property
    def _digests(self) -> list[Hashable]:
        keys: list[Hashable] = []
        for row in track(range(len(self)), "comparing images"):
            try:
                keys.append(hashlib.sha256(self(row)).digest())
            except BadSample:  # it is counted when it is read
                keys.append(row)
        return keys

    def all_captions(self, key: str) -> list[Captions]:
        """Return all captions of each sample, from the member `key`; none where they cannot be used."""
        caption = CaptionMember(key)
        captions: list[Captions] = []
        for row in range(len(self)):
            try:
                captions.append(tuple(caption.all(self.members(row))))
            except BadSample:
                captions.append(())
        return captions

    def members(self, row: int) -> Members:
        """Return the members of a sample."""
        number = int(np.searchsorted(self.ends, row, side="right"))
        return self.shards.members((number, row - int(self.ends[number] - self.shards.counts[number])))


class ShardValues(Sequence):
    """What is read of the members of each sample in shards."""

    def __init__(self, images: ShardImages, read: Callable[[Members], Any]) -> None:
        self.images, self.read = images, read

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: Any) -> Any:
        return self.read(self.images.members(row))
