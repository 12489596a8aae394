"""Images with their captions or labels, read from where they lie as a loader reads the samples of shards.

`sources` finds them; this is what it returns.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from diffvision.data.images.decode import MAX_IMAGE_BYTES, clean_caption, is_blank
from diffvision.data.shards.sample import BadSample, Members, SampleId, SampleSource

_END = 1 << 12  # bytes that tell most files of one size apart
_LISTED = 10  # classes, in a description
Captions = tuple[str, ...]


class Reader(Protocol):
    """Reads the encoded bytes of images."""

    def __call__(self, row: int) -> bytes:
        """Return the bytes of one image; raise `BadSample` where there are none."""
        ...

    def identity(self) -> str:
        """Return what is known of the images without reading them, apart from the folder that holds them."""
        ...

    def keys(self, *, by_content: bool) -> Sequence[Hashable]:
        """Return one key per row; rows of the same path share it, and with `by_content` rows of the same bytes."""
        ...


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

    def by_image(self) -> ImageCollection:
        """Return the collection with one row per image, which has the captions of all rows of that image.

        Equal files are one image, unless there are labels: of these a dataset may have the same picture twice. A row
        without a usable caption stays on its own, and is counted when it is read.

        Raises:
            ValueError: rows of one image have different labels.
        """
        rows: dict[Hashable, list[int]] = {}
        for row, key in enumerate(self.read.keys(by_content=self.labels is None)):
            is_usable = self.captions is None or _is_usable(self.captions, row)
            rows.setdefault((key,) if is_usable else row, []).append(row)
        if len(rows) == len(self):
            return self
        first = [of_image[0] for of_image in rows.values()]
        captions, labels = self.captions, self.labels
        if labels is not None:
            for of_image in rows.values():
                if other := next((row for row in of_image if labels[row] != labels[of_image[0]]), None):
                    found = [self.classnames[labels[row]] if self.classnames else labels[row] for row in of_image]
                    several = " and ".join(dict.fromkeys(map(str, found)))
                    raise ValueError(f"{self.source}: {self.names[other]} must have one label, got {several}")
            labels = labels[first]
        if captions is not None:
            captions = MergedCaptions(captions, [*rows.values()])
        names = [self.names[row] for row in first]
        return replace(self, names=names, read=SelectedRows(self.read, first), captions=captions, labels=labels)

    def texts(self, row: int) -> dict[str, bytes]:
        """Return a sample's members besides its image: `txt` (a caption a line), `json` (several captions), `cls`."""
        members = {}
        if self.captions is not None and (captions := self.captions[row]):
            lines = [" ".join(caption.split()) for caption in captions] if len(captions) > 1 else list(captions)
            members["txt"] = _encode("\n".join(lines))
            if len(captions) > 1:
                members["json"] = json.dumps({"caption": lines}).encode()
        if self.labels is not None:
            members["cls"] = b"%d" % self.labels[row]
        return members


def _encode(text: str) -> bytes:
    """Return UTF-8, where bytes that were not UTF-8 are as they were, to be counted when the sample is read."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


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


class SelectedRows:
    """Some of the rows of a reader."""

    def __init__(self, read: Reader, rows: Sequence[int]) -> None:
        self.read, self.rows = read, rows

    def __call__(self, row: int) -> bytes:
        return self.read(self.rows[row])

    def identity(self) -> str:
        return self.read.identity()

    def keys(self, *, by_content: bool) -> Sequence[Hashable]:
        keys = self.read.keys(by_content=by_content)
        return [keys[row] for row in self.rows]


class ImageFiles:
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

    def keys(self, *, by_content: bool) -> Sequence[Hashable]:
        """Return the whole paths, or what `digest_equal_files` makes of them; a row without a path is its own image."""
        paths = [os.path.abspath(self.root / name) if name else row for row, name in enumerate(self.names)]
        return digest_equal_files(paths) if by_content else paths


def digest_equal_files(keys: Sequence[Hashable]) -> list[Hashable]:
    """Return keys of which the paths of files with the same content are replaced by a key of that content.

    Whole files are read only where sizes and last bytes are equal: of millions of images most share a size.
    """
    paths = {key for key in keys if isinstance(key, str) and os.path.isfile(key)}
    parts: dict[Hashable, tuple[Hashable, ...]] = dict.fromkeys(paths, ())
    reads: tuple[Callable[[Any], Hashable], ...] = (os.path.getsize, _read_end, _digest)
    for read in reads:
        count = Counter(parts.values())
        parts = {path: (*known, read(path)) if count[known] > 1 else known for path, known in parts.items()}
    count = Counter(parts.values())
    return [parts[key] if key in parts and count[parts[key]] > 1 else key for key in keys]


def _read_end(path: str) -> Hashable:
    """Return the last bytes of a file; a file that cannot be read equals no other, and is counted when it is read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _END))
            return file.read()
    except OSError:
        return path


def _digest(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


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


class CaptionedImages(ImageSet):
    """An `ImageSet` whose samples have all their captions in one member: a line each of `txt`, or `json:FIELD`."""

    def __init__(self, images: ImageCollection, key: str) -> None:
        super().__init__(images)
        self.key = key

    def members(self, sample: SampleId) -> Members:
        """Return the members of one sample."""
        row = sample[1]
        captions = list(self.images.captions[row]) if self.images.captions is not None else []
        name, _, field = self.key.partition(":")
        text = json.dumps({field: captions}) if field else "\n".join(captions)
        return {"jpg": self.images.read(row), **({name: _encode(text)} if captions else {})}
