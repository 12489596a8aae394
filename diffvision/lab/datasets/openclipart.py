"""`openclipart`: drawings by many hands with the titles and tags that these gave them, all in the public domain.

Left out are drawings of another licence or of none, folders of generated shapes, of patterns and of what nobody sorted,
drawings with the title of a whole collection, and those that look like an earlier one. Some titles are Italian or
French, and some are wrong, as captions are in practice.
"""

import hashlib
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path

import numpy as np

from diffvision.data.shards.writer import Sample, write_about, write_shards
from diffvision.lab.datasets.cutouts import (
    BACKGROUND,
    SIZE,
    paste,
    refuse_written,
    unpacked,
    write_retrieval,
    write_zero_shot,
)
from diffvision.progress import track

PACKAGES = ("openclipart-svg", "openclipart-png")
HELD_OUT = {"test": 500, "validation": 200}
"""Titles of each split."""

_LEFT_OUT = ("shapes/stars/", "special/", "unsorted/")
_COLLECTION = 10  # a title of more drawings is that of a collection
_CLASS = 20  # drawings of a folder that is a class of zero-shot classification, at least
_NO_TAGS = {"", "architetto francesco rollandin", "hash", "signs and symbols", "unsorted"}
_TEMPLATE = "a drawing of {c}"
_TAGS = 3  # in a caption


@dataclass(frozen=True)
class Drawing:
    """A drawing: its path without suffix, such as "food/fruit/apple_01", its title and its tags."""

    name: str
    title: str
    tags: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its key in shards."""
        return self.name.replace("/", "-").replace(".", "_")

    @property
    def folder(self) -> str:
        """The second folder of its path in words; empty where there is none."""
        parts = self.name.split("/")
        return parts[1].replace("_", " ") if len(parts) > 2 else ""

    @property
    def group(self) -> str:
        """The title without what is in brackets: all drawings of a group are in one split."""
        return re.sub(r"\(.*?\)", "", self.title).strip().lower()

    @property
    def captions(self) -> list[str]:
        """The captions in training, of which one is drawn at a time."""
        few = [self.tags[start : start + _TAGS] for start in range(0, len(self.tags), _TAGS)]
        return [self.title, *(f"{self.title}: {', '.join(tags)}" for tags in few)]


def make_openclipart(directory: str | Path, source: str | Path, seed: int = 0) -> str:
    """Write the drawings of Openclipart with their titles and tags.

    `train` are shards; `retrieval` (by title) and `zero_shot` (by the folders' names) are evaluation folders
    with the splits `test` and `validation`, of titles that are not trained on; `zero_shot` also has `train`.

    Args:
        directory: the folder to write.
        source: the folder in which the Debian packages openclipart-svg and openclipart-png are unpacked; / if they
            are installed. Titles and tags are in the former, pictures in the latter.
        seed: determines the order of the training samples.

    Raises:
        ValueError: a package is not there, or the directory has shards already.
    """
    directory = Path(directory)
    texts, images = (
        unpacked(source, f"usr/share/openclipart/{kind}", package)
        for kind, package in zip(("svg", "png"), PACKAGES, strict=True)
    )
    refuse_written(directory)
    drawings, pictures = _distinct(read_drawings(texts), images)
    split_of = _splits(drawings)
    trained = [d for d in drawings if split_of[d.group] == "train"]
    order = np.random.default_rng([seed, 40]).permutation(len(trained))
    samples = {"train": write_shards(directory / "train", _training((trained[i] for i in order), pictures))}
    sizes = Counter(d.folder for d in drawings if d.folder)
    classes = sorted(folder for folder, count in sizes.items() if count >= _CLASS)
    for split in ("train", *HELD_OUT):
        chosen = [d for d in drawings if split_of[d.group] == split]
        shown = ((d.key, pictures[d.name], d.folder) for d in chosen if d.folder in classes)
        samples[f"zero_shot/{split}"] = write_zero_shot(directory / "zero_shot", split, shown, classes, _TEMPLATE)
        if split != "train":
            # Of several drawings with one title, the first.
            first = {d.group: d for d in reversed(chosen)}.values()
            captioned = ((d.key, pictures[d.name], d.title) for d in sorted(first, key=lambda d: d.name))
            samples[f"retrieval/{split}"] = write_retrieval(directory / "retrieval", split, captioned)
    source = f"Debian packages {' and '.join(PACKAGES)}, of openclipart.org 0.18"
    write_about(directory, source, "public domain", background=BACKGROUND, size=SIZE, seed=seed, samples=samples)
    return f"{samples['train']:,} training pictures, {samples['retrieval/test']:,} held-out titles"


def read_drawings(folder: Path) -> list[Drawing]:
    """Return the drawings of a tree of SVG files that are in the public domain and have a title."""
    titled = []
    for path in track(sorted(folder.rglob("*.svg")), "titles"):
        name = path.relative_to(folder).with_suffix("").as_posix()
        # A link is the same drawing in another folder.
        if not path.is_symlink() and not name.startswith(_LEFT_OUT) and (work := _work(path)) is not None:
            titled.append((name, *work))
    counts = Counter(title for _, title, _ in titled)
    return [
        Drawing(name, clean, tuple(tags))
        for name, title, tags in titled
        if counts[title] <= (1 if title.startswith("Clipart by") else _COLLECTION) and (clean := clean_title(title))
    ]


def clean_title(title: str) -> str:
    """Return a title as words, without the author's name before it and a number after it; empty if nothing is left."""
    title = re.sub(r"^Clipart by .*? - ", "", title)
    title = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", title)
    title = re.sub(r"[_\s]+", " ", title).strip()
    title = re.sub(r"[\s#.-]+\d+$|(?<=[a-z]{3})\d+$", "", title).strip(" -")
    return title if sum(map(str.isalpha, title)) > 2 else ""


def _work(path: Path) -> tuple[str, list[str]] | None:
    """Return title and tags of an SVG file's metadata; None unless that dedicates it to the public domain."""
    try:
        work = next((e for _, e in ET.iterparse(path) if _local(e.tag) == "Work"), None)
    except ET.ParseError:
        return None
    fields = {} if work is None else {_local(field.tag): field for field in work}
    licence = "".join(fields["license"].attrib.values()) if "license" in fields else ""
    if "title" not in fields or "publicdomain" not in licence.lower():
        return None
    title = " ".join("".join(fields["title"].itertext()).split())
    items = [e.text or "" for e in fields["subject"].iter() if _local(e.tag) == "li"] if "subject" in fields else []
    tags = dict.fromkeys(" ".join(item.replace("_", " ").split()) for item in items)
    return title, [tag for tag in tags if tag.lower() not in _NO_TAGS and not any(map(str.isdigit, tag))]


def _local(tag: str) -> str:
    """Return the name of an XML element without its namespace, of which there are several for one licence."""
    return tag.rpartition("}")[2]


def _distinct(drawings: Sequence[Drawing], images: Path) -> tuple[list[Drawing], dict[str, bytes]]:
    """Return the drawings that have a picture which no earlier one has, and the pictures by name."""
    pictures: dict[str, bytes] = {}
    seen: set[bytes] = set()
    for drawing in track(drawings, "pictures"):
        path = images / f"{drawing.name}.png"
        if not path.is_file():
            continue
        try:
            picture = paste(path, trim=True)
        # One drawing has 231 million pixels, and some are empty.
        except ValueError:
            continue
        if picture not in seen:
            pictures[drawing.name] = picture
            seen.add(picture)
    return [d for d in drawings if d.name in pictures], pictures


def _splits(drawings: Iterable[Drawing]) -> dict[str, str]:
    """Return the split of each group of titles, in the order of their hashes."""
    groups = sorted({d.group for d in drawings}, key=lambda group: hashlib.sha256(group.encode()).digest())
    splits = [split for split, count in HELD_OUT.items() for _ in range(count)]
    return dict.fromkeys(groups, "train") | dict(zip(groups, splits, strict=False))


def _training(drawings: Iterable[Drawing], pictures: dict[str, bytes]) -> Iterator[Sample]:
    for drawing in drawings:
        facts = {"captions": drawing.captions, "title": drawing.title, "tags": drawing.tags}
        yield {"__key__": drawing.key, "png": pictures[drawing.name], "json": dumps(facts, ensure_ascii=False)}
