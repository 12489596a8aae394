"""Pictures with what is said of each, and random access to them as to the samples of shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from diffvision.data.images.samples import Members
from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.order import Sample
from diffvision.data.shards.sources import Shard

Captions = tuple[str, ...]


class Reader(Protocol):
    """Reads the encoded bytes of pictures."""

    def __call__(self, row: int) -> bytes:
        """The bytes of one picture. BadSample where there are none."""
        ...

    def identity(self) -> str:
        """What is known of the pictures without reading them, and not of the folder that holds them."""
        ...


@dataclass(frozen=True)
class Pictures:
    """The pictures of one split of a source, and what is said of each.

    Attributes:
        source: what was given.
        names: one for each picture, for reports: its path in the source where it is a file.
        read: row -> encoded bytes.
        captions: one tuple for each picture, empty where it has none; None where the source has no captions.
        labels: class numbers, int64 [N]; None where the source has no labels.
        classnames: by class number; empty where the source does not name them.
    """

    source: str
    names: Sequence[str]
    read: Reader
    captions: Sequence[Captions] | None = None
    labels: np.ndarray | None = None
    classnames: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def caption_key(self) -> str:
        """The member that training reads: one caption is a text, several are a list in JSON of which one is drawn."""
        return "json:caption" if any(len(one) > 1 for one in self.captions or ()) else "txt"

    @property
    def fingerprint(self) -> str:
        """Changes with names, captions and labels; not with the folder that holds the source."""
        digest = hashlib.sha256()
        for part in (self.names, self.captions, None if self.labels is None else self.labels.tolist(), self.classnames):
            digest.update(json.dumps(part).encode())
        return digest.hexdigest()[:16]

    def texts(self, row: int) -> dict[str, bytes]:
        """The members of a sample besides its image: `txt` (a caption a line), `json` (several captions), `cls`."""
        members = {}
        if self.captions is not None and (captions := self.captions[row]):
            lines = [" ".join(caption.split()) for caption in captions] if len(captions) > 1 else list(captions)
            members["txt"] = _encoded("\n".join(lines))
            if len(captions) > 1:
                members["json"] = json.dumps({"caption": lines}).encode()
        if self.labels is not None:
            members["cls"] = b"%d" % self.labels[row]
        return members


def _encoded(text: str) -> bytes:
    """UTF-8; what was not UTF-8 is given back as it was, for whoever reads the sample to count."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


# ---- reading them where they lie -----------------------------------------------------------------------------------


class PictureSet:
    """Random access to the samples of `Pictures`, with the interface of `storage.ShardSet`: one shard of all samples,
    so that an epoch's order shuffles all of them together."""

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures
        self.counts = np.array([len(pictures)], dtype=np.int64)
        self.shards = [Shard(pictures.source, samples=len(pictures))]
        self.cache = ShardCache()  # which keeps none of them
        self.caption_key, self.label_key = pictures.caption_key, "cls"
        self.fingerprint, self.content = pictures.fingerprint, f"sizes:{pictures.read.identity()}"
        self.beside: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.pictures)

    def in_cache(self, number: int) -> bool:
        return False

    def prepare(self, number: int) -> None:
        """Nothing has to be fetched."""

    def members(self, sample: Sample) -> Members:
        return _PictureMembers(self.pictures, sample[1])

    def describe(self, sample: Sample) -> str:
        """A sample as "source: name", for reports."""
        return f"{self.pictures.source}: {self.pictures.names[sample[1]]}"


class _PictureMembers:
    """One picture as the members of a sample. Its image is called `jpg` whatever its format: decoding looks inside."""

    def __init__(self, pictures: Pictures, row: int) -> None:
        self._pictures, self._row = pictures, row
        self._texts = pictures.texts(row)
        self._image: bytes | None = None

    def size(self, member_type: str) -> int | None:
        if member_type == "jpg":
            return len(self._read())
        return len(self._texts[member_type]) if member_type in self._texts else None

    def read(self, member_type: str, at_most: int) -> bytes:
        return (self._read() if member_type == "jpg" else self._texts[member_type])[:at_most]

    def names(self) -> list[str]:
        return sorted(["jpg", *self._texts])

    def _read(self) -> bytes:
        if self._image is None:
            self._image = self._pictures.read(self._row)
        return self._image
