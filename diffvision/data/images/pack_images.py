"""Packing images into shards, in parallel: copied as they are, decoded once to leave out what cannot be used.

`shards.writer` writes the tars and their manifest.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from diffvision.data.images.decode import clean_caption, decode_image, decode_text, open_image
from diffvision.data.images.image_set import ImageCollection
from diffvision.data.images.image_sources import find_images, is_shard_source
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sources import MANIFEST
from diffvision.data.shards.writer import (
    Sample,
    begin_manifest,
    check_per_shard,
    refuse_existing,
    write_lines,
    write_manifest,
    write_tar,
)
from diffvision.progress import bar

SUFFIXES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}


@dataclass
class Packed:
    """What became of the images of a source."""

    samples: int = 0
    several: int = 0  # samples with several captions
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> one image

    def add(self, other: "Packed") -> None:
        """Add the counts of other images."""
        self.samples += other.samples
        self.several += other.several
        self.skipped += other.skipped
        self.examples = other.examples | self.examples

    def summary(self) -> str:
        """Return a line of the counts, and one for each reason."""
        lines = [f"{self.samples:,} samples, left out {self.skipped.total():,}"]
        lines += [
            f"  {count:,} x {reason}, first {self.examples[reason]}" for reason, count in self.skipped.most_common()
        ]
        return "\n".join(lines)


def make_folder(
    directory: str | Path,
    source: str | Path,
    columns: dict[str, str] | None = None,
    split: str | None = None,
    per_shard: int = 10_000,
    num_workers: int = 2,
) -> str:
    """Write your images as training shards.

    Args:
        directory: the folder to write; it must have no shards yet.
        source: a folder of images (with x.txt next to x.jpg, or with a folder for each class), a table (.csv, .tsv,
            .txt, .jsonl, .parquet, COCO's or Karpathy's .json), a folder that Hugging Face datasets saved, or a .zip of
            any of these folders.
        columns: of a table, its columns image, caption and label, where they have other names: {image: file}.
        split: train, validation or test, of a source that has splits; train by default.
        per_shard: samples per shard.
        num_workers: processes.
    """
    if is_shard_source(source):
        raise ValueError(f"{source} must be images, got shards: train on them as they are")
    images = find_images(source, split, columns=columns)
    if images.captions is not None:
        images = images.by_image()
    packed = pack(images, directory, shuffle=images.labels is not None, per_shard=per_shard, num_workers=num_workers)
    summary = f"{packed.summary()}\n  of {images.described}"
    if packed.several:
        summary += "\nseveral captions an image: train with --data.init_args.caption_key json:caption"
    return summary


def _read_members(images: ImageCollection, row: int) -> dict[str, bytes]:
    """Return the image and the texts of a sample; raise BadSample where one cannot be used."""
    texts = images.texts(row)
    if images.captions is not None:
        _check_captions(texts)
    image = images.read(row)
    return {image_suffix(image): image, **texts}


def _check_captions(texts: Mapping[str, bytes]) -> None:
    """Raise BadSample where a caption is missing or cannot be trained on."""
    if "txt" not in texts:
        raise BadSample("missing caption")
    text = decode_text(texts["txt"])
    for caption in text.split("\n") if "json" in texts else [text]:
        clean_caption(caption)


def image_suffix(data: bytes) -> str:
    """Return the suffix of an image, all of which is decoded as in training; raise BadSample where it cannot be."""
    suffix = SUFFIXES[open_image(data).format or ""]
    decode_image(data)  # a truncated file can still be opened
    return suffix


def pack(
    images: Any,
    directory: str | Path,
    *,
    per_shard: int = 10_000,
    num_workers: int = 2,
    shuffle: bool = False,
    read_members: Callable[[Any, int], dict[str, bytes]] = _read_members,
) -> Packed:
    """Pack images into shards, in parallel, with a progress bar; image files are copied as they are.

    Images that cannot be decoded, and missing or empty captions, are left out and counted by reason. A sample has its
    image, and what its source says of it: `txt` (one caption a line), `json` (several captions, of which training draws
    one), `cls` (the class number). `classnames.txt` has the classes, one a line, where the source names them.

    Args:
        images: what to pack: an `ImageCollection`, or what has a length, `source`, `names` and `classnames`.
        directory: the folder to write; it must have no shards yet.
        per_shard: samples in each shard.
        num_workers: processes that read and check images.
        shuffle: write the images in random order. Training mixes only a few shards at a time, so images that come in
            order of their classes should be shuffled here.
        read_members: returns the sample of a row of `images`, or raises BadSample.

    Raises:
        ValueError: no images, or none that can be used; the directory has shards.
    """
    directory = Path(directory)
    refuse_existing(directory)
    check_per_shard(per_shard)
    if not len(images):
        raise ValueError(f"no images in {images.source}: give a folder, table or archive with images")
    begin_manifest(directory)
    rows = np.random.default_rng(0).permutation(len(images)) if shuffle else np.arange(len(images))
    shards = _Shards(images, rows, directory, per_shard, read_members)
    loader: Iterable[Packed] = DataLoader(
        shards,
        batch_size=None,
        num_workers=max(1, min(num_workers, len(shards))),
        generator=torch.Generator(),  # else it would draw from the process's generator
    )
    total, filled = Packed(), 0
    with bar(f"packing {directory.name}", len(rows)) as advance:
        for number, packed in enumerate(loader):
            if packed.samples:
                shards.target(number).rename(shards.target(filled))
                filled += 1
            else:  # all of its images were left out
                shards.target(number).unlink()
            total.add(packed)
            advance(packed.samples + packed.skipped.total())
    if not filled:
        (directory / MANIFEST).unlink()
        raise ValueError(f"none of the {len(rows)} images of {images.source} can be used: {dict(total.skipped)}")
    write_manifest(directory)
    if images.classnames:
        write_lines(directory / "classnames.txt", images.classnames)
    return total


class _Shards(Dataset):
    """The number of a shard -> what became of its images, once the shard is written."""

    def __init__(self, images: Any, rows: np.ndarray, directory: Path, per_shard: int, read_members: Callable) -> None:
        self.images, self.rows, self.directory = images, rows, directory
        self.per_shard, self.read_members = per_shard, read_members

    def __len__(self) -> int:
        return -(-len(self.rows) // self.per_shard)

    def __getitem__(self, number: int) -> Packed:
        packed = Packed()
        write_tar(self.target(number), self._samples(number, packed))
        return packed

    def target(self, number: int) -> Path:
        return self.directory / f"{number:06d}.tar"

    def _samples(self, number: int, packed: Packed) -> Iterator[Sample]:
        """Yield the samples of one shard, and count what is left out."""
        images, first = self.images, number * self.per_shard
        for key, row in enumerate(self.rows[first : first + self.per_shard].tolist(), start=first):
            try:
                members = self.read_members(images, row)
            except BadSample as reason:
                packed.skipped[str(reason)] += 1
                packed.examples.setdefault(str(reason), f"{images.source}: {images.names[row]}")
                continue
            packed.samples += 1
            packed.several += "json" in members
            # Keys are numbers: a path may hold dots, which would end the key, or may not be UTF-8.
            yield {"__key__": f"{key:09d}", **members}
