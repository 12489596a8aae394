"""Images as people have them: in folders for each class, with captions in tables or text files, COCO's captions.

All become an `ImageCollection`, which `packing` writes as shards or `ImageSet` reads where the images lie. Datasets of
other libraries are in `datasets`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diffvision.data.images.datasets import TORCHVISION, from_parquet, from_saved, from_torchvision, torchvision_splits
from diffvision.data.images.decode import MAX_IMAGE_BYTES
from diffvision.data.images.image_set import Captions, ImageCollection
from diffvision.data.images.tables import (
    COLUMNS,
    captions_of,
    csv_rows,
    json_lines,
    numbered,
    path_inside,
)
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sources import COMPRESSED, MANIFEST, PLAIN, SIZES, is_remote

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""What counts as an image in a folder. Those that are not JPEG, PNG or WebP are counted as bad samples."""
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
"""Our name of a split, and the names of folders that hold it."""

_INDEX_TABLES = ("metadata", "captions", "labels")  # the name of a table inside a folder of images

# ---- finding them --------------------------------------------------------------------------------------------------


def is_image_source(source: Any) -> bool:
    """Return whether a source is one of images rather than of shards: a folder, a table, a dataset."""
    if not isinstance(source, str | Path):
        return False
    location = str(source)
    if location.startswith(TORCHVISION):
        return True
    path = Path(location)
    if is_remote(location) or not path.exists():
        return False
    if path.is_file():
        return path.suffix.lower() in TABLES
    return not any(p.name.endswith(PLAIN + COMPRESSED) or p.name in (MANIFEST, SIZES) for p in path.iterdir())


def splits(source: str | Path) -> dict[str, str]:
    """Return {our name of a split: its name in the source}; empty where the source is not split."""
    location = str(source)
    if location.startswith(TORCHVISION):
        return torchvision_splits(location)
    path = Path(source)
    if not path.is_dir():
        return {}
    if (path / "dataset_dict.json").is_file():
        present = json.loads((path / "dataset_dict.json").read_text("utf-8"))["splits"]
    else:
        folders = [p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")]
        known = {name for names in SPLITS.values() for name in names}
        present = folders if folders and {name.lower() for name in folders} <= known else []
    return {split: name for split, names in SPLITS.items() for name in present if name.lower() in names}


def find_images(
    source: str | Path,
    split: str | None = None,
    *,
    table: str | Path | None = None,
    columns: dict[str, str] | None = None,
    classnames: Sequence[str] = (),
) -> ImageCollection:
    """Return the images of a source.

    Classes that have names are numbered in the order of their names, those of all splits together.

    Args:
        source: one of
            a folder of images: with `x.txt` next to `x.jpg` (img2dataset's files too), or with a folder for each class
            (as torchvision's ImageFolder numbers them), or with a metadata.csv, captions.csv, labels.csv, .tsv, .jsonl
            or .parquet in it; splits are folders called train, val, test, ... above that;
            a table (.csv, .tsv, .jsonl, .parquet, COCO's captions_*.json), with paths relative to its folder;
            a folder that `datasets` saved (save_to_disk), or one of .parquet files;
            `torchvision:NAME:ROOT`, such as torchvision:FashionMNIST:data (nothing is downloaded).
        split: "train", "validation" or "test", of a source that has splits.
        table: the captions or labels of a folder of images, with paths relative to `source`.
        columns: names of the columns "image", "caption" and "label", where they are not the usual ones (`COLUMNS`).
        classnames: number the classes as these are, such as those that a model was trained on.

    Raises:
        ValueError: no such source, split or column; a table that is damaged or names files outside of its folder; a
            class that is not among `classnames`.
    """
    images = _from_source(source, split, table, columns)
    return _renumbered(images, classnames) if classnames and images.classnames else images


def _renumbered(images: ImageCollection, classnames: Sequence[str]) -> ImageCollection:
    known = {name: number for number, name in enumerate(class_prompts(classnames))}
    names = class_prompts(images.classnames)
    assert images.labels is not None
    if unknown := [names[label] for label in np.unique(images.labels).tolist() if names[label] not in known]:
        raise ValueError(
            f"{images.source} has classes that are not among the {len(known)} of the training data or the model: "
            f"{', '.join(unknown[:5])}"
        )
    numbers = np.array([known.get(name, -1) for name in names], dtype=np.int64)
    return replace(images, labels=numbers[images.labels], classnames=tuple(classnames))


def _from_source(
    source: str | Path, split: str | None, table: str | Path | None, columns: dict[str, str] | None
) -> ImageCollection:
    if unknown := sorted((columns or {}).keys() - COLUMNS.keys()):
        raise ValueError(f"columns has {', '.join(unknown)}: it takes {', '.join(COLUMNS)}")
    location, columns = str(source), columns or {}
    available = splits(source) if table is None else {}
    split = split or next(iter(available), None)
    if split is not None and split not in available:
        known = f"it has {', '.join(available)}" if available else "it has no splits; leave split out"
        raise ValueError(f"{location} has no split {split!r}: {known}")
    if location.startswith(TORCHVISION):
        return from_torchvision(location, split)
    path = Path(source)
    if not path.exists():
        raise ValueError(f"there is no {location}: give a folder of images, a table of them, or a dataset")
    if path.is_file():
        return _from_table(path.parent, path, columns)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return from_saved(path, available.get(split or ""), columns)
    if split is None:
        return _from_folder(path, None if table is None else Path(table), columns)
    images = _from_folder(path / available[split], None, columns)
    if not images.classnames or set(images.classnames) - set(_folder_names(path, available)):
        return images  # classes that a table names
    return _renumbered(images, _folder_names(path, available))


def _folder_names(path: Path, available: Mapping[str, str]) -> list[str]:
    """Return the classes of all splits."""
    return sorted({folder.name for name in available.values() for folder in _class_folders(path / name)})


def _from_folder(path: Path, table: Path | None, columns: dict[str, str]) -> ImageCollection:
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder of images")
    if table is None:
        tables = [path / f"{stem}{suffix}" for stem in _INDEX_TABLES for suffix in TABLES]
        table = next((known for known in tables if known.is_file()), None)
    if table is not None:
        return _from_table(path, table, columns)
    images = list(_files(path, IMAGE_SUFFIXES))
    if any(image.with_suffix(".txt").is_file() for image in images) or (not images and any(_files(path, (".txt",)))):
        return _from_texts(path)
    if images:
        if others := sorted(p.name for p in path.iterdir() if p.suffix.lower() in TABLES):
            raise ValueError(
                f"{path} has {', '.join(others[:5])} next to its images: give the table that describes them as the "
                "source, or move it elsewhere if none does"
            )
        return _from_classes(path, images)
    if parquet := sorted(map(str, path.rglob("*.parquet"))):
        return from_parquet(str(path), parquet, columns)
    raise ValueError(f"no images in {path}")


def _files(path: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield files of these kinds at any depth, in no order; hidden ones are left out."""
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                yield Path(folder, name)


def _from_classes(path: Path, images: list[Path]) -> ImageCollection:
    """Read a folder for each class, numbered in the order of their names, as torchvision's ImageFolder does."""
    files = sorted(image.relative_to(path) for image in images)
    if loose := [file for file in files if len(file.parts) == 1]:
        raise ValueError(
            f"{path} has images in no class and without captions, first {loose[0]}: put each into the folder of its "
            "class, put a .txt with its caption next to it, or name a table of captions"
        )
    folders = _class_folders(path)
    used = {file.parts[0] for file in files}
    if empty := [folder.name for folder in folders if folder.name not in used]:
        tables = [p.relative_to(path).as_posix() for name in empty for p in _files(path / name, TABLES)]
        hint = f"give {tables[0]} as the source" if tables else "remove it, or put images into it"
        raise ValueError(f"{path} has no image in its folder {empty[0]}, and so is no folder for each class: {hint}")
    resolved = [folder.resolve() for folder in folders]
    if twice := [folder.name for folder in folders if resolved.count(folder.resolve()) > 1]:
        raise ValueError(f"{path} has the same folder as the classes {' and '.join(twice)}: remove the link")
    classnames = tuple(folder.name for folder in folders)
    number = {name: label for label, name in enumerate(classnames)}
    labels = np.array([number[file.parts[0]] for file in files], dtype=np.int64)
    names = [file.as_posix() for file in files]
    return ImageCollection(str(path), names, _Files(path, names), labels=labels, classnames=classnames)


def _class_folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _from_texts(path: Path) -> ImageCollection:
    """Read `x.txt` next to `x.jpg`; every other file is taken for an image, so that what is none is counted."""
    root = path.resolve()
    names: list[str] = []
    captions: list[Captions] = []
    for file in sorted(path.rglob("*")):
        if not file.is_file() or file.suffix.lower() in (".txt", *TABLES):
            continue
        text = file.with_suffix(".txt")
        for link in (file, text):
            if link.is_symlink():
                path_inside(root, str(link.relative_to(path)), f"{link}, a link")
        names.append(file.relative_to(path).as_posix())
        captions.append((_text(text),) if text.is_file() else ())
    return ImageCollection(str(path), names, _Files(path, names), captions=captions)


def _text(path: Path) -> str:
    """Return the caption in a file; bytes that are not UTF-8 become half surrogates, which training counts as bad."""
    return path.read_bytes().decode("utf-8-sig", "surrogateescape")


def _from_table(root: Path, table: Path, columns: dict[str, str]) -> ImageCollection:
    if not table.is_file():
        raise ValueError(f"there is no {table}: give a table of captions or labels ({', '.join(TABLES)})")
    suffix = table.suffix.lower()
    if suffix == ".parquet":
        return from_parquet(str(table), [str(table)], columns, root)
    if suffix == ".json":
        return _from_coco(root, table)
    rows = json_lines(table, columns) if suffix == ".jsonl" else csv_rows(table, columns)
    resolved = root.resolve()
    names: list[str] = []
    captions: list[Captions] = []
    labels: list[Any] = []
    for line, row in rows:
        names.append(path_inside(resolved, str(row["image"]), f"{table}, line {line}"))
        if "caption" in row:
            captions.append(captions_of(row["caption"]))
        if "label" in row:
            labels.append(row["label"])
    if not names:
        raise ValueError(f"{table} has no rows: give a table of images")
    numbers, classnames = numbered(labels, table) if labels else (None, ())
    return ImageCollection(str(table), names, _Files(root, names), captions or None, numbers, classnames)


def _from_coco(root: Path, table: Path) -> ImageCollection:
    """Read COCO's captions: `images` with file names, `annotations` with a caption of one of them each."""
    try:
        content = json.loads(table.read_text("utf-8"))
        files = {image["id"]: image["file_name"] for image in content["images"]}
        captions: dict[Any, list[str]] = {key: [] for key in files}
        for annotation in content["annotations"]:
            captions[annotation["image_id"]].append(annotation["caption"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{table} is not a file of COCO's captions, with images (id, file_name) and annotations (image_id, "
            f"caption): {type(error).__name__} {error}. Other tables are .csv, .tsv, .jsonl or .parquet"
        ) from None
    if root == table.parent and (match := re.search(r"(train|val|test)\d{4}", table.stem)):
        root = next((p for p in (root / match[0], root.parent / match[0]) if p.is_dir()), root)  # COCO's layout
    resolved = root.resolve()
    names = [path_inside(resolved, str(name), f"{table}, image {key}") for key, name in files.items()]
    return ImageCollection(str(table), names, _Files(root, names), captions=[tuple(captions[key]) for key in files])


class _Files:
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
        digest = hashlib.sha256()
        for name in self.names:
            try:
                size = os.stat(self.root / name).st_size
            except OSError:
                size = -1
            digest.update(b"%d " % size)
        return digest.hexdigest()[:16]


def class_prompts(classnames: Sequence[str]) -> list[str]:
    """Return class names as in a sentence: folders have `_` where a sentence has a blank."""
    return [name.replace("_", " ").strip() for name in classnames]
