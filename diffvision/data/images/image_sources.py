"""Images as people have them: in folders for each class, with captions in tables or text files, COCO's captions.

All become an `ImageCollection`, which `pack_images` writes as shards or `ImageSet` reads in place. What other libraries
read is in `library_datasets`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from diffvision.data.images.coco import read_caption_file
from diffvision.data.images.image_set import Captions, ImageCollection, ImageFiles, Parts
from diffvision.data.images.image_tables import (
    COLUMNS,
    are_numbers,
    check_path,
    has_labels,
    number_labels,
    read_captions,
    read_label,
    read_table,
)
from diffvision.data.images.library_datasets import read_parquet, read_saved, unpack_archive
from diffvision.data.shards.remote import TAR, is_remote
from diffvision.data.shards.sources import has_shards, is_shard
from diffvision.data.splits import SPLITS, by_split, file_split, named_splits, splits_in
from diffvision.words import composed

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""What counts as an image in a folder. Those that are not JPEG, PNG or WebP are counted as bad samples."""
_ROWS = (".csv", ".tsv", ".jsonl", ".parquet")
TABLES = (*_ROWS, ".json")
NAMED_TABLES = (*TABLES, ".txt")
"""The suffixes of a table that is named. In a folder a .txt is the caption of the image beside it."""
ARCHIVE = ".zip"
Reads = Literal["labels", "captions"]
_SAMPLE_SUFFIXES = (*IMAGE_SUFFIXES, ".parquet", ".arrow")
_SPLIT_NAMES = {name for names in SPLITS.values() for name in names}
_INDEX_TABLES = ("metadata", "captions", "labels")  # the name of a table inside a folder of images


@dataclass(frozen=True)
class ImageSource:
    """Images as they were named: their splits, each of which is read when it is asked for.

    Attributes:
        location: as it was given.
        parts: {split: reads its images}; of a source without splits, one called "".
    """

    location: str
    parts: Parts

    @property
    def splits(self) -> list[str]:
        """The splits that it has, "train", "validation" and "test" first; empty where it is not split."""
        return [split for split in self.parts if split]

    def images(self, split: str | None = None, classnames: Sequence[str] = ()) -> ImageCollection:
        """Return the images of a split, "train" by default.

        Args:
            split: one that it has.
            classnames: number the classes as these are, such as those that a model was trained on.

        Raises:
            ValueError: it has no such split, or a class that is not among `classnames`; as `find_images`.
        """
        split = split or ("train" if self.splits else "")
        if split not in self.parts:
            known = f"it has {', '.join(self.splits)}" if self.splits else "it has no splits; leave split out"
            raise ValueError(f"{self.location} has no split {split!r}: {known}")
        images = self.parts[split]()
        # Numbers without names are those of the classes, unless these have numbers for names.
        if images.labels is not None and classnames and (images.classnames or are_numbers(classnames)):
            return _renumber(images, classnames)
        return images


def is_image_source(source: Any) -> bool:
    """Return whether a source is one of images rather than of shards: a folder, a table, a dataset."""
    if not isinstance(source, str | Path) or is_remote(str(source)) or not str(source).strip():
        return False
    path = Path(source)
    if path.is_file():
        return path.suffix.lower() in (*NAMED_TABLES, ARCHIVE)
    return path.is_dir() and not has_shards(path)


def is_shard_source(source: Any) -> bool:
    """Return whether a source on the disk is one of shards: tars, a folder or a pattern of them."""
    return is_shard(str(source)) or (Path(source).is_dir() and not is_image_source(source))


def find_images(
    source: str | Path,
    split: str | None = None,
    *,
    columns: dict[str, str] | None = None,
    reads: Reads | None = None,
) -> ImageCollection:
    """Return the images of a source.

    Classes that have names are numbered in the order of their names, those of all splits together.

    Args:
        source: one of
            a folder of images: with `x.txt` next to `x.jpg` (img2dataset's files too) or in Urban-1k's folders image/
            and caption/, or with a folder for each class (as torchvision's ImageFolder numbers them), or with a
            metadata.csv, captions.csv, labels.csv, .tsv, .jsonl or .parquet in it; splits are folders called train,
            val, test, ... above that, or tables that are called so;
            a table (.csv, .tsv, .jsonl, .parquet, Flickr8k's captions.txt, COCO's captions_*.json, Karpathy's
            dataset_coco.json and dataset_flickr30k.json, ShareGPT4V's JSON), with paths relative to its folder;
            a folder that `datasets` saved (save_to_disk), or one of .parquet files; a .zip of any of these folders.
        split: "train" (by default), "validation" or "test", of a source that has splits; see `data.splits`.
        columns: names of the columns "image", "caption" and "label", where they are not the usual ones (`COLUMNS`).
        reads: what is wanted, where a folder has both: the labels of class folders, or the captions beside them.

    Raises:
        ValueError: no such source, split or column; a table that is damaged or names files outside of its folder;
            names of which it is not clear what split they are of.
    """
    return open_source(source, columns, reads).images(split)


def open_source(source: str | Path, columns: dict[str, str] | None = None, reads: Reads | None = None) -> ImageSource:
    """Return a source of images with its splits; the arguments are those of `find_images`."""
    location, columns = str(source), columns or {}
    if unknown := sorted(columns.keys() - COLUMNS.keys()):
        raise ValueError(f"columns must be among {', '.join(COLUMNS)}, got {', '.join(unknown)}")
    path = Path(location)
    if not location.strip() or not path.exists():
        raise ValueError(f"there is no {location!r}: give a folder of images, a table of them, or a dataset")
    if path.is_dir():
        return ImageSource(location, _find_parts(path, columns, reads))
    if path.suffix.lower() == ARCHIVE:
        return ImageSource(location, _find_in_archive(path, columns, reads))
    return ImageSource(location, _open_tables(location, path.parent, {"": [path.name]}, columns))


def _renumber(images: ImageCollection, classnames: Sequence[str]) -> ImageCollection:
    """Give a collection's labels the numbers that the training data gives their classes."""
    known = {name: number for number, name in enumerate(name_classes(classnames))}
    names = name_classes(images.label_names)
    if unknown := sorted({*names} - known.keys()):
        raise ValueError(
            f"classes of {images.source} must be among the {len(known)} of the training data, got "
            f"{', '.join(unknown[:5])}: rename or remove them"
        )
    return replace(images, labels=np.array([known[name] for name in names]), classnames=tuple(classnames))


def _find_parts(path: Path, columns: dict[str, str], reads: Reads | None) -> Parts:
    """Return {split: reads its images} of a folder; of one that is not split, {"": reads them}."""
    if (path / "dataset_dict.json").is_file():
        return read_saved(path, columns)
    is_classes = reads == "labels" and _has_classes(path, columns)
    tables = [p.name for p in path.iterdir() if p.suffix.lower() in _ROWS and not p.name.startswith(".")]
    if any(map(file_split, tables)) and not is_classes:
        return _open_tables(str(path), path, by_split(tables, path), columns)
    folders, index = [p.name for p in _class_folders(path)], None if is_classes else _find_index_table(path)
    if all(_class_folders(path / name) for name in filter(splits_in, folders)):
        # Next to splits with classes there may be folders without samples, such as annotations.
        folders = [name for name in folders if splits_in(name) or any(walk(path / name, _SAMPLE_SUFFIXES))]
    is_split = bool(folders) and all(map(splits_in, folders))
    if is_split and (index is None or (reads != "captions" and {name.lower() for name in folders} <= _SPLIT_NAMES)):
        named = named_splits(folders, path)
        inside = [folder.name for name in named.values() for folder in _class_folders(path / name)]
        classes = tuple(sorted({*map(composed, inside)}))
        parts: Parts = {
            split: partial(_read_folder, path / name, columns, reads, classes) for split, name in named.items()
        }
        return _number_together(parts, classes)
    if index is None and not any(walk(path, IMAGE_SUFFIXES)):
        nested = [p.relative_to(path).as_posix() for p in walk(path, _ROWS)]
        if splits := by_split(nested, path):
            return _open_tables(str(path), path, splits, columns)
    return {"": partial(_read_folder, path, columns, reads)}


def _find_in_archive(archive: Path, columns: dict[str, str], reads: Reads | None) -> Parts:
    """Return {split: reads its images} of an archive; messages name it, and not the folder of the cache."""
    folder = unpack_archive(archive)

    def rename(text: str) -> str:
        return text.replace(str(folder), str(archive))

    def read(find: Callable[[], Any]) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = find()
            except ValueError as error:
                raise ValueError(rename(str(error))) from None
        for warning in caught:
            warnings.warn(rename(str(warning.message)), warning.category, stacklevel=2)
        return replace(found, source=rename(found.source)) if isinstance(found, ImageCollection) else found

    parts = read(partial(_find_parts, folder, columns, reads))
    return {split: partial(read, part) for split, part in parts.items()}


def _has_classes(path: Path, columns: dict[str, str]) -> bool:
    """Return whether a folder has one for each class, and no table of labels beside them."""
    folders = [folder for folder in _class_folders(path) if any(walk(folder, IMAGE_SUFFIXES))]
    return len(folders) > 1 and not any(has_labels(p, columns) for p in path.iterdir() if p.suffix.lower() in _ROWS)


def _open_tables(location: str, root: Path, tables: Mapping[str, Sequence[str]], columns: dict[str, str]) -> Parts:
    """Return {split: reads its images} of tables of captions or labels in one format, whose paths are relative to root.

    Args:
        location: in messages.
        root: the folder of the tables.
        tables: {split: tables}, by their paths in the root.
        columns: as `find_images` takes them.
    """
    paths = {split: [root / table for table in of_split] for split, of_split in tables.items()}
    suffixes = {path.suffix.lower() for of_split in paths.values() for path in of_split}
    if len(suffixes) > 1:
        raise ValueError(f"tables of {location} must have one format, got {', '.join(sorted(suffixes))}")
    if suffixes == {".json"}:
        return read_caption_file(paths[""][0])
    if suffixes == {".parquet"}:
        return read_parquet(location, paths, columns, root)
    sources = {split: f"{location}, split {split}" if split else location for split in paths}
    return _number_together(
        {split: partial(_read_tables, sources[split], root, paths[split], columns) for split in paths}
    )


def _number_together(parts: Parts, classes: tuple[str, ...] = ()) -> Parts:
    """Return the parts with the classes of all of them numbered together; those of `classes` are already."""

    def read(split: str) -> ImageCollection:
        """Read one split with labels that are numbered over the classes of all splits."""
        images = parts[split]()
        if images.labels is None or len(parts) == 1 or (classes and images.classnames == classes):
            return images
        known = {*images.label_names, *images.classnames}
        for part in (part for other, part in parts.items() if other != split):
            with suppress(ValueError):  # it is refused when it is read itself: a test split may have no labels
                known |= {*(others := part()).label_names, *others.classnames}
        labels, classnames = number_labels(images.label_names, known)
        return replace(images, labels=labels, classnames=classnames)

    return {split: partial(read, split) for split in parts}


def _find_index_table(path: Path) -> Path | None:
    """Return the table in a folder of images that describes them."""
    tables = [path / f"{stem}{suffix}" for stem in _INDEX_TABLES for suffix in _ROWS]
    return next(filter(Path.is_file, tables), None)


def _read_folder(
    path: Path, columns: dict[str, str], reads: Reads | None, classes: Sequence[str] = ()
) -> ImageCollection:
    """Read a folder by what is in it: a saved dataset, a table, texts next to images, classes, or parquet files.

    `classes` are the folders in all splits, which are numbered together.
    """
    if (path / "state.json").is_file():
        return read_saved(path, columns)[""]()
    is_classes = reads == "labels" and _has_classes(path, columns)
    if not is_classes and (index := _find_index_table(path)) is not None:
        return _open_tables(str(index), path, {"": [index.name]}, columns)[""]()
    images = list(walk(path, IMAGE_SUFFIXES))
    has_texts = any(image.with_suffix(".txt").is_file() for image in images)
    if not is_classes and not has_texts and any(walk(path / "caption", (".txt",))) and (path / "image").is_dir():
        return _read_texts(path, path / "image", path / "caption")
    if not is_classes and (has_texts or (not images and any(walk(path, (".txt",))))):
        return _read_texts(path)
    if images:
        tables = sorted(p.name for p in path.iterdir() if p.suffix.lower() in TABLES or p.name == "captions.txt")
        if tables and not is_classes:
            raise ValueError(
                f"{path} must have no table next to its images: give {tables[0]} as the source, in the folder "
                "that its paths begin at"
            )
        return _read_classes(path, images, classes)
    if parquet := sorted(walk(path, (".parquet",))):
        return read_parquet(path, {"": parquet}, columns, path)[""]()
    if shards := sorted({str(shard.parent) for shard in walk(path, (TAR,))}):
        raise ValueError(f"{path} must be one folder of shards, or one for each split, got {', '.join(shards[:3])}")
    raise ValueError(f"no images in {path}: give a folder or table of images, or shards (.tar)")


def _check_undivided(path: Path, names: Sequence[str]) -> None:
    """Check that the folders of images, which are read together, do not tell of several splits."""
    folders = {PurePosixPath(name).parts[:-1] for name in names}
    splits = splits_in(*(part for folder in folders for part in folder))
    nested = {folder[0] for folder in folders if len(folder) > 1}
    direct = {folder[0] for folder in folders if len(folder) == 1}
    is_only = len(nested | direct) == 1
    outer = {name for name in nested - direct if name.lower() in _SPLIT_NAMES or (is_only and splits_in(name))}
    if outer or len(splits) > 1:
        raise ValueError(
            f"folders of {path} must be classes, or each a split, got images of {' and '.join(sorted(splits))} among "
            "others: put each split's folder directly into it"
        )


def walk(path: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield files of these kinds at any depth, in no order; hidden ones are left out."""
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                yield Path(folder, name)


def _read_classes(path: Path, images: list[Path], classes: Sequence[str] = ()) -> ImageCollection:
    """Read a folder for each class, numbered in the order of their names, as torchvision's ImageFolder does."""
    files = sorted(image.relative_to(path) for image in images)
    if loose := [file for file in files if len(file.parts) == 1]:
        raise ValueError(
            f"{path} has images without class or caption, first {loose[0]}: use a folder per class, .txt captions "
            "or a table of captions"
        )
    if lost := sorted(p for p in path.iterdir() if p.is_symlink() and not p.exists()):
        raise ValueError(f"{lost[0]} links to {lost[0].readlink()}, which is gone: put it back, or remove the link")
    names, folders = [file.as_posix() for file in files], [folder.name for folder in _class_folders(path)]
    _check_undivided(path, names)
    if empty := sorted({*folders} - {file.parts[0] for file in files}):
        found = ", ".join(empty[:5])
        warnings.warn(f"{path} has no images of {found}: if it is not a class, remove the folder", stacklevel=2)
    classnames = tuple(sorted({*map(composed, folders), *classes}))
    number = {name: label for label, name in enumerate(classnames)}
    labels = np.array([number[composed(file.parts[0])] for file in files], dtype=np.int64)
    return ImageCollection(str(path), names, ImageFiles(path, names), labels=labels, classnames=classnames)


def _class_folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _read_texts(path: Path, images: Path | None = None, texts: Path | None = None) -> ImageCollection:
    """Read `x.txt` next to `x.jpg`; every other file is taken for an image, so that what is none is counted.

    Urban-1k has images and texts in two folders, and a caption is the first line of its file.
    """
    root = path.resolve()
    names: list[str] = []
    captions: list[Captions] = []
    for file in sorted((images or path).rglob("*")):
        if not file.is_file() or file.suffix.lower() in (".txt", *TABLES):
            continue
        text = file.with_suffix(".txt")
        if images is not None and texts is not None:
            text = texts / text.relative_to(images)
        for link in filter(Path.is_symlink, (file, text)):
            check_path(root, str(link.relative_to(path)), f"{link}, a link")
        names.append(file.relative_to(path).as_posix())
        # Bytes that are not UTF-8 become half surrogates, which training counts as bad.
        caption = text.read_bytes().decode("utf-8-sig", "surrogateescape") if text.is_file() else None
        captions.append(() if caption is None else (caption if texts is None else caption.partition("\n")[0],))
    _check_undivided(path, names)
    return ImageCollection(str(path), names, ImageFiles(path, names), captions=captions)


def _read_tables(source: str, root: Path, tables: Sequence[Path], columns: dict[str, str]) -> ImageCollection:
    """Read .csv, .tsv or .jsonl tables as one, with paths relative to `root`."""
    resolved = root.resolve()
    images: list[str] = []
    captions: list[Captions] = []
    labels: list[str] = []
    for table in tables:
        for where, row in read_table(table, columns):
            images.append(check_path(resolved, row["image"], where))
            if "caption" in row:
                captions.append(read_captions(row["caption"]))
            if "label" in row:
                labels.append(read_label(row["label"], where))
    if not images:
        raise ValueError(f"{source} has no rows: give a table of images")
    if any(len(column) not in (0, len(images)) for column in (captions, labels)):
        raise ValueError(f"{source}: not all of these tables have captions, or labels: name their columns alike")
    numbers, classnames = number_labels(labels) if labels else (None, ())
    return ImageCollection(source, images, ImageFiles(root, images), captions or None, numbers, classnames)


def name_classes(classnames: Sequence[str]) -> list[str]:
    """Return class names as in a sentence: folders have `_` where a sentence has a blank."""
    return [name.replace("_", " ").strip() for name in classnames]
