"""Which captions are packed, by length, repetition and language; and shards as images that can be packed again."""

from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from diffvision.data.images.image_set import Captions
from diffvision.data.images.samples import IMAGE_KEYS, CaptionMember, digest, find_caption_key
from diffvision.data.images.tables import read_captions
from diffvision.data.shards.sample import BadSample, Members
from diffvision.data.shards.storage import ShardSet
from diffvision.progress import track


class FilteredCaptions(Sequence):
    """Captions of images; to read those of an image none of which passes raises BadSample with the reason.

    The arguments are those of `packing.make_folder`.
    """

    def __init__(
        self, captions: Sequence[Captions], words: Sequence[int] | None, max_repeats: int | None, language: str | None
    ) -> None:
        if words is not None and (len(words) != 2 or not 0 <= words[0] <= words[1]):
            raise ValueError(f"words is {words}: write the least and the most, such as [3, 50]")
        if max_repeats is not None and max_repeats < 1:
            raise ValueError(f"max_repeats is {max_repeats}: it must be at least 1, for one image with each caption")
        if language is not None and language not in (known := sorted(dict(_detector().rank("a")))):
            raise ValueError(f"language is {language!r}: choose one of {', '.join(known)}")
        self.captions, self.words, self.language = captions, words, language
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
        is_other = self.language is not None and _detector().classify(caption)[0] != self.language
        return f"caption not in {self.language}" if is_other else ""


def _detector() -> Any:
    try:
        import py3langid
    except ImportError as error:
        raise ValueError(f'language needs py3langid ({error}): pip install "diffvision[language-id]"') from None
    return py3langid


class ShardImages(Sequence):
    """The captions in shards as a sequence over all samples; called with a row, it returns the image's bytes."""

    def __init__(self, source: Any) -> None:
        self.shards = ShardSet(source)
        self.ends = np.cumsum(self.shards.counts)
        self.caption = CaptionMember(find_caption_key(self.shards))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, row: Any) -> Any:
        return read_captions(self.caption.read(self._members(row)))

    def __call__(self, row: int) -> bytes:
        members = self._members(row)
        for name in filter(members.__contains__, IMAGE_KEYS):
            return members[name]
        raise BadSample("missing image")

    def identity(self) -> str:
        return self.shards.content

    def keys(self) -> Sequence[Hashable]:
        return range(len(self))

    def _members(self, row: int) -> Members:
        number = int(np.searchsorted(self.ends, row, side="right"))
        return self.shards.members((number, row - int(self.ends[number] - self.shards.counts[number])))
