"""Images with their captions or labels, read in place as a loader reads the samples of shards.

`image_sources` finds them; this is what it returns.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from diffvision.data.images.decode import MAX_IMAGE_BYTES, clean_caption, is_blank
from diffvision.data.shards.sample import BadSample, Members, SampleId, SampleSource
from diffvision.progress import track

_LISTED = 10  # classes, in a description
Captions = tuple[str, ...]


class Reader:
    """Reads the encoded bytes of images."""

    def __call__(self, row: int) -> bytes:
        """Return the bytes of one image; raise `BadSample` where there are none."""
        raise NotImplementedError

    def path(self, row: int) -> str | None:
        """Return the absolute path of an image that is a file."""
        return None

    def identity(self) -> str:
        """Return what is known of the images without reading them, apart from the folder that holds them."""
        raise NotImplementedError


@dataclass(frozen=True)
class ImageCollection:
    """The images of one split of a source, with their captions or labels.

    Attributes:
        source: as it was given, with the split where it has several.
        names: one for each image, for reports: its path in the source where it is a file.
        read: row -> encoded bytes.
        captions: one tuple for each image, empty where it has none; None where the source has no captions.
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
    def described(self) -> str:
        """The source, how many images it has, and which number each class has."""
        images = f"{self.source}: {len(self):,} images"
        if (distinct := len(set(self.names))) < len(self):
            images = f"{self.source}: {len(self):,} rows of {distinct:,} images"
        if not self.classnames:
            if not isinstance(self.labels, np.ndarray):  # those in shards are read one by one
                return images
            return f"{images}, classes {self.labels.min()} to {self.labels.max()}"
        numbers = [f"{number} {name}" for number, name in enumerate(self.classnames[:_LISTED])]
        more = ", ..." if len(self.classnames) > _LISTED else ""
        return f"{images}, {len(self.classnames):,} classes: {', '.join(numbers)}{more}"

    @property
    def caption_key(self) -> str:
        """The member that training reads: one caption is a text, several are a list in JSON of which one is drawn."""
        return "json:caption" if any(len(one) > 1 for one in self.captions or ()) else "txt"

    @cached_property
    def fingerprint(self) -> str:
        """A digest of names, captions and labels, wherever the source lies."""
        digest = hashlib.sha256()
        for part in (self.names, self.captions, None if self.labels is None else self.labels.tolist(), self.classnames):
            digest.update(json.dumps(None if part is None else list(part)).encode())
        return digest.hexdigest()[:16]

    @property
    def label_names(self) -> list[str]:
        """The name of each image's class, its number where it has none; empty without labels."""
        labels = [] if self.labels is None else self.labels.tolist()
        return [self.classnames[label] for label in labels] if self.classnames else list(map(str, labels))

    def by_image(self) -> ImageCollection:
        """Return the collection with one row per image, which has the captions of all rows of that image.

        Rows with the same path are one image. So are images that are no files and have the same bytes, unless there
        are labels. A row without a usable caption stays on its own, and is counted when it is read.

        Raises:
            ValueError: rows of one image have different labels.
        """
        rows: dict[Hashable, list[int]] = {}
        paths = [self.read.path(row) for row in range(len(self))]
        for row in range(len(self)) if all(paths) else track(range(len(self)), "comparing images"):
            key: Hashable = paths[row]
            if key is None and self.labels is None:
                key = self._digest(row)
            is_usable = self.captions is None or _is_usable(self.captions, row)
            rows.setdefault(row if key is None or not is_usable else key, []).append(row)
        if len(rows) == len(self):
            return self
        first = [of_image[0] for of_image in rows.values()]
        captions, labels = self.captions, self.labels
        if labels is not None:
            for of_image in rows.values():
                if len({*labels[of_image].tolist()}) > 1:
                    found = [self.classnames[labels[row]] if self.classnames else labels[row] for row in of_image]
                    several = " and ".join(dict.fromkeys(map(str, found)))
                    raise ValueError(f"{self.source}: {self.names[of_image[0]]} must have one label, got {several}")
            labels = labels[first]
        if captions is not None:
            captions = MergedCaptions(captions, [*rows.values()])
        names = [self.names[row] for row in first]
        return replace(self, names=names, read=SelectedRows(self.read, first), captions=captions, labels=labels)

    def _digest(self, row: int) -> bytes | None:
        """Return a digest of an image's bytes; None where it is bad, which is counted when it is read."""
        try:
            return hashlib.sha256(self.read(row)).digest()
        except BadSample:
            return None

    def texts(self, row: int) -> dict[str, bytes]:
        """Return a sample's members besides its image: `txt` (a caption a line), `json` (several captions), `cls`."""
        members = {}
        if self.captions is not None and (captions := self.captions[row]):
            lines = [" ".join(caption.split()) for caption in captions] if len(captions) > 1 else list(captions)
            # Half surrogates, of bytes that were not UTF-8, are counted when the sample is read.
            members["txt"] = "\n".join(lines).encode("utf-8", "surrogatepass")
            if len(captions) > 1:
                members["json"] = json.dumps({"caption": lines}).encode()
        if self.labels is not None:
            members["cls"] = b"%d" % self.labels[row]
        return members


Parts = dict[str, Callable[[], ImageCollection]]
"""The splits of a source, and what reads each; of one that is not split, one called ""."""


def _is_usable(captions: Sequence[Captions], row: int) -> bool:
    """Return whether evaluation can read the captions of a row, of which at least one must not be blank."""
    try:
        return bool([clean_caption(caption) for caption in captions[row] if not is_blank(caption)])
    except BadSample:
        return False


class MergedCaptions(Sequence):
    """The captions of several rows of each image together; to read some may raise `BadSample`."""

    def __init__(self, captions: Sequence[Captions], rows: Sequence[Sequence[int]]) -> None:
        self.captions, self.rows = captions, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, image: Any) -> Any:
        return tuple(caption for row in self.rows[image] for caption in self.captions[row])


class SelectedRows(Reader):
    """Some of the rows of a reader."""

    def __init__(self, read: Reader, rows: Sequence[int]) -> None:
        self.read, self.rows = read, rows

    def __call__(self, row: int) -> bytes:
        return self.read(self.rows[row])

    def path(self, row: int) -> str | None:
        return self.read.path(self.rows[row])

    def identity(self) -> str:
        return self.read.identity()


class ImageFiles(Reader):
    """Images that are files under one folder."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root, self.names = root, names

    def __call__(self, row: int) -> bytes:
        path = self.root / self.names[row]
        try:
            if path.stat().st_size > MAX_IMAGE_BYTES:
                raise BadSample("image too large")
            return path.read_bytes()
        except OSError:
            raise BadSample("missing image") from None

    def path(self, row: int) -> str | None:
        """Return the absolute path; a row without a path is its own image."""
        return os.path.abspath(self.root / self.names[row]) if self.names[row] else None

    def identity(self) -> str:
        """Return a digest of the files' sizes, which changes when an image is replaced."""
        digest = hashlib.sha256()
        for name in self.names:
            try:
                size = os.stat(self.root / name).st_size
            except OSError:
                size = -1
            digest.update(b"%d " % size)
        return digest.hexdigest()[:16]


class ImageSet(SampleSource):
    """Random access to the samples of an `ImageCollection`, as `storage.ShardSet` gives it to those of shards.

    All samples are one shard, so that an epoch's order shuffles all of them together.
    """

    def __init__(self, images: ImageCollection) -> None:
        self.images = images
        self.counts = np.array([len(images)], dtype=np.int64)
        self.content = f"sizes:{images.read.identity()}"

    @property
    def fingerprint(self) -> str:
        """A digest of names, captions and labels."""
        return self.images.fingerprint

    def members(self, sample: SampleId) -> Members:
        """Return the members of one sample; its image is a `jpg`, whatever its format, which decoding detects."""
        return {"jpg": self.images.read(sample[1]), **self.images.texts(sample[1])}

    def describe(self, sample: SampleId) -> str:
        """Return "source: name" of a sample, for reports."""
        return f"{self.images.source}: {self.images.names[sample[1]]}"
