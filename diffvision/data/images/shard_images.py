"""Shards as images that are evaluated."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from diffvision.data.images.image_set import ImageCollection, Reader
from diffvision.data.images.samples import (
    IMAGE_KEYS,
    CaptionMember,
    ImageLabel,
    caption_key,
    find_caption_key,
    find_label_key,
    label_key,
)
from diffvision.data.shards.sample import BadSample, Members
from diffvision.data.shards.storage import ShardSet


class ShardImages(Reader):
    """Reads the images in shards."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards
        self.ends = np.cumsum(shards.counts)

    def __call__(self, row: int) -> bytes:
        members = self.shards.members(self.sample(row))
        for name in filter(members.__contains__, IMAGE_KEYS):
            return members[name]
        raise BadSample("missing image")

    def identity(self) -> str:
        return self.shards.content

    def sample(self, row: int) -> tuple[int, int]:
        """Return the shard of a row, and the row in that shard."""
        number = int(np.searchsorted(self.ends, row, side="right"))
        return number, row - int(self.ends[number] - self.shards.counts[number])


def read_shards(source: str, shards: ShardSet, classnames: Sequence[str]) -> ImageCollection:
    """Return the images in shards with what the first samples have: captions, and class numbers in `cls` or JSON.

    A sample without any of these raises BadSample when it is read.

    Raises:
        ValueError: the first samples have neither.
    """
    images, first = ShardImages(shards), shards.first()
    captions: Any = None
    labels: Any = None
    if any(map(caption_key, first)):
        captions = _Values(images, CaptionMember(find_caption_key(shards)).all)
    if any(map(label_key, first)):
        labels = _Values(images, ImageLabel(cast(Any, None), find_label_key(shards)).label)
    if captions is None and labels is None:
        having = ", ".join(sorted({name for members in first for name in members})) or "none"
        raise ValueError(f"samples of {source} must have captions or class numbers, got the members {having}")
    rows: Any = range(int(images.ends[-1]))
    return ImageCollection(source, rows, images, captions, labels, tuple(classnames))


class _Values(Sequence):
    """What is read of the members of each sample in shards."""

    def __init__(self, images: ShardImages, read: Callable[[Members], Any]) -> None:
        self.images, self.read = images, read

    def __len__(self) -> int:
        return int(self.images.ends[-1])

    def __getitem__(self, row: Any) -> Any:
        return self.read(self.images.shards.members(self.images.sample(row)))
