"""Pictures as people have them: a folder for each class, captions in a table or next to the images, COCO's captions,
a Hugging Face dataset, a torchvision dataset. All become `Pictures`, which are packed into shards (`packing`) or read
where they lie (`PictureSet`)."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from diffvision.data.images.decode import MAX_IMAGE_BYTES, BadSample
from diffvision.data.images.picture_set import Captions, Pictures
from diffvision.data.images.picture_tables import (
    COLUMNS,
    captions_of,
    csv_rows,
    inside,
    json_lines,
    numbered,
    resolved_columns,
)
from diffvision.data.shards.sidecars import user_cache
from diffvision.data.shards.sources import COMPRESSED, MANIFEST, PLAIN, SIZES, is_remote

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""What counts as an image in a tree. Those that are not JPEG, PNG or WebP are bad samples, and are counted as such."""
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
TORCHVISION = "torchvision:"
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
"""A split's name here, and the names of folders that hold it."""

_INDEX_TABLES = ("metadata", "captions", "labels")  # the name of a table inside a folder of images

# ---- finding them --------------------------------------------------------------------------------------------------


def is_pictures(source: Any) -> bool:
    """Whether a source is one of pictures rather than of shards: a tree, a table, a dataset."""
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
    """The splits of a source by their names here, and what each is called there; empty where it is not split."""
    location = str(source)
    if location.startswith(TORCHVISION):
        made = _torchvision_class(location)
        parameters = inspect.signature(made).parameters
        return {"train": "train", "test": "test"} if {"train", "split"} & parameters.keys() else {}
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


def find_pictures(
    source: str | Path,
    split: str | None = None,
    *,
    table: str | Path | None = None,
    columns: dict[str, str] | None = None,
    classnames: Sequence[str] = (),
) -> Pictures:
    """The pictures of a source.

    Classes that have names are numbered in the order of their names, those of all splits together.

    Args:
        source: one of
            a folder of images: with `x.txt` next to `x.jpg` (img2dataset's files too), or with a folder for each class
            (as torchvision's ImageFolder numbers them), or with a metadata.csv, captions.csv, labels.csv, .tsv, .jsonl
            or .parquet in it; splits are folders called train, val, test, ... above that;
            a table (.csv, .tsv, .jsonl, .parquet, COCO's captions_*.json), with paths relative to its own folder;
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
    pictures = _found(source, split, table, columns)
    return _renumbered(pictures, classnames) if classnames and pictures.classnames else pictures


def _renumbered(pictures: Pictures, classnames: Sequence[str]) -> Pictures:
    known = {name: number for number, name in enumerate(class_prompts(classnames))}
    names = class_prompts(pictures.classnames)
    assert pictures.labels is not None
    if unknown := [names[label] for label in np.unique(pictures.labels).tolist() if names[label] not in known]:
        raise ValueError(
            f"{pictures.source} has classes that are not among the {len(known)} of the training data or the model: "
            f"{', '.join(unknown[:5])}"
        )
    numbers = np.array([known.get(name, -1) for name in names], dtype=np.int64)
    return replace(pictures, labels=numbers[pictures.labels], classnames=tuple(classnames))


def _found(source: str | Path, split: str | None, table: str | Path | None, columns: dict[str, str] | None) -> Pictures:
    if unknown := sorted((columns or {}).keys() - COLUMNS.keys()):
        raise ValueError(f"columns has {', '.join(unknown)}: it takes {', '.join(COLUMNS)}")
    location, columns = str(source), columns or {}
    available = splits(source) if table is None else {}
    split = split or next(iter(available), None)
    if split is not None and split not in available:
        known = f"it has {', '.join(available)}" if available else "it has no splits; leave split out"
        raise ValueError(f"{location} has no split {split!r}: {known}")
    if location.startswith(TORCHVISION):
        return _from_torchvision(location, split)
    path = Path(source)
    if not path.exists():
        raise ValueError(f"there is no {location}: give a folder of images, a table of them, or a dataset")
    if path.is_file():
        return _from_table(path.parent, path, columns)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _from_datasets(path, available.get(split or ""), columns)
    if split is None:
        return _from_folder(path, None if table is None else Path(table), columns)
    pictures = _from_folder(path / available[split], None, columns)
    if not pictures.classnames or set(pictures.classnames) - set(_folder_names(path, available)):
        return pictures  # classes that a table names
    return _renumbered(pictures, _folder_names(path, available))


def _folder_names(path: Path, available: Mapping[str, str]) -> list[str]:
    """The classes of all splits."""
    return sorted({folder.name for name in available.values() for folder in _class_folders(path / name)})


def _from_folder(path: Path, table: Path | None, columns: dict[str, str]) -> Pictures:
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
        return _from_columns(str(path), _parquet(parquet), columns)
    raise ValueError(f"no images in {path}")


def _files(path: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files of these kinds at any depth, in no order; hidden ones are left out."""
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                yield Path(folder, name)


def _from_classes(path: Path, images: list[Path]) -> Pictures:
    """A folder for each class, numbered in the order of their names, as torchvision's ImageFolder does."""
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
    return Pictures(str(path), names, _Files(path, names), labels=labels, classnames=classnames)


def _class_folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _from_texts(path: Path) -> Pictures:
    """`x.txt` next to `x.jpg`. Every other file is taken for a picture, so that what is none is counted."""
    root = path.resolve()
    names: list[str] = []
    captions: list[Captions] = []
    for file in sorted(path.rglob("*")):
        if not file.is_file() or file.suffix.lower() in (".txt", *TABLES):
            continue
        text = file.with_suffix(".txt")
        for link in (file, text):
            if link.is_symlink():
                inside(root, str(link.relative_to(path)), f"{link}, a link")
        names.append(file.relative_to(path).as_posix())
        captions.append((_text(text),) if text.is_file() else ())
    return Pictures(str(path), names, _Files(path, names), captions=captions)


def _text(path: Path) -> str:
    """The caption in a file; bytes that are not UTF-8 become half surrogates, which training counts as such."""
    return path.read_bytes().decode("utf-8-sig", "surrogateescape")


def _from_table(root: Path, table: Path, columns: dict[str, str]) -> Pictures:
    if not table.is_file():
        raise ValueError(f"there is no {table}: give a table of captions or labels ({', '.join(TABLES)})")
    suffix = table.suffix.lower()
    if suffix == ".parquet":
        return _from_columns(str(table), _parquet([str(table)]), columns, root)
    if suffix == ".json":
        return _from_coco(root, table)
    rows = json_lines(table, columns) if suffix == ".jsonl" else csv_rows(table, columns)
    resolved = root.resolve()
    names: list[str] = []
    captions: list[Captions] = []
    labels: list[Any] = []
    for line, row in rows:
        names.append(inside(resolved, str(row["image"]), f"{table}, line {line}"))
        if "caption" in row:
            captions.append(captions_of(row["caption"]))
        if "label" in row:
            labels.append(row["label"])
    if not names:
        raise ValueError(f"{table} has no rows: give a table of images")
    numbers, classnames = numbered(labels, table) if labels else (None, ())
    return Pictures(str(table), names, _Files(root, names), captions or None, numbers, classnames)


def _from_coco(root: Path, table: Path) -> Pictures:
    """COCO's captions: `images` with file names, `annotations` with a caption of one of them each."""
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
        root = next((p for p in (root / match[0], root.parent / match[0]) if p.is_dir()), root)  # COCO's own layout
    resolved = root.resolve()
    names = [inside(resolved, str(name), f"{table}, image {key}") for key, name in files.items()]
    return Pictures(str(table), names, _Files(root, names), captions=[tuple(captions[key]) for key in files])


class _Files:
    """Pictures that are files under one folder."""

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


# ---- other libraries' datasets ---------------------------------------------------------------------------------------


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"Hugging Face datasets and .parquet files are read by the package `datasets` ({error}): "
            'pip install "diffvision[data]"'
        ) from None
    return datasets


def _from_datasets(path: Path, split: str | None, columns: dict[str, str]) -> Pictures:
    loaded = _datasets().load_from_disk(str(path))
    return _from_columns(str(path), loaded if split is None else loaded[split], columns)


def _parquet(files: list[str]) -> Any:
    return _datasets().Dataset.from_parquet(files, cache_dir=str(user_cache() / "datasets"))


def _from_columns(source: str, rows: Any, columns: dict[str, str], root: Path | None = None) -> Pictures:
    """The rows of a `datasets.Dataset`."""
    datasets = _datasets()
    resolved = resolved_columns(rows.column_names, columns, source)
    image = resolved["image"]
    if isinstance(rows.features[image], datasets.Image):
        rows = rows.cast_column(image, datasets.Image(decode=False))  # the bytes as they are
    captions = [captions_of(cell) for cell in rows[resolved["caption"]]] if "caption" in resolved else None
    labels: np.ndarray | None = None
    classnames: tuple[str, ...] = ()
    if "label" in resolved:
        feature = rows.features[resolved["label"]]
        cells = list(rows[resolved["label"]])
        if isinstance(feature, datasets.ClassLabel):
            labels, classnames = np.array(cells, dtype=np.int64), tuple(feature.names)
        else:
            labels, classnames = numbered(cells, source)
    names = [f"row {row}" for row in range(len(rows))]
    return Pictures(source, names, _Rows(rows, image, root), captions, labels, classnames)


class _Rows:
    """Pictures in a column of a `datasets.Dataset`: encoded bytes, or paths inside of a folder."""

    def __init__(self, rows: Any, column: str, root: Path | None) -> None:
        self.rows, self.column, self.root = rows, column, root

    def __call__(self, row: int) -> bytes:
        cell = self.rows[row][self.column]
        data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if isinstance(data, str):
            data, path = None, data
        if data is None and path is not None and self.root is not None:
            path = self.root / inside(self.root.resolve(), path, f"row {row}")
        try:
            if data is None and path is not None:
                data = Path(path).read_bytes()
        except OSError:
            data = None
        if data is None:
            raise BadSample("missing image")
        return data

    def identity(self) -> str:
        return f"{len(self.rows)} {self.rows.data.nbytes}"


def _torchvision_class(location: str) -> Callable[..., Any]:
    from torchvision import datasets

    name = location.removeprefix(TORCHVISION).partition(":")[0]
    kinds = {known: getattr(datasets, known) for known in sorted(datasets.__all__)}
    rooted = {known: kind for known, kind in kinds.items() if "root" in inspect.signature(kind).parameters}
    if name not in rooted:
        raise ValueError(f"{location}: torchvision has no dataset {name!r} in a folder; it has {', '.join(rooted)}")
    return rooted[name]


def _from_torchvision(location: str, split: str | None) -> Pictures:
    made = _torchvision_class(location)
    name, _, root = location.removeprefix(TORCHVISION).partition(":")
    if not root:
        raise ValueError(f"{location} does not say where its files are: write torchvision:{name}:FOLDER")
    parameters = inspect.signature(made).parameters
    settings: dict[str, Any] = {"download": False} if "download" in parameters else {}
    if "train" in parameters:
        settings["train"] = split != "test"
    elif "split" in parameters:
        settings["split"] = {"validation": "val"}.get(split or "train", split or "train")
    try:
        rows = made(root, **settings)
    except (RuntimeError, OSError, TypeError, ValueError, ModuleNotFoundError) as error:
        raise ValueError(
            f"{location} cannot be read ({str(error).strip()}). Nothing is downloaded here; once, by yourself: "
            f'python -c "import torchvision; torchvision.datasets.{name}({root!r}, download=True)"'
        ) from None
    targets = getattr(rows, "targets", None)
    if targets is None:
        targets = getattr(rows, "_labels", None) or [rows[row][1] for row in range(len(rows))]
    names = [f"number {row}" for row in range(len(rows))]
    reader = _Encoded(rows, f"{name} {split} {len(rows)}")
    if isinstance(targets[0], str | list | tuple):
        return Pictures(location, names, reader, captions=[captions_of(target) for target in targets])
    labels = np.array([int(target) for target in targets], dtype=np.int64)
    return Pictures(location, names, reader, labels=labels, classnames=tuple(map(str, getattr(rows, "classes", ()))))


class _Encoded:
    """Pictures of a dataset that gives PIL images, as PNG, which loses nothing."""

    def __init__(self, rows: Any, name: str) -> None:
        self.rows, self.name = rows, name

    def __call__(self, row: int) -> bytes:
        data = BytesIO()
        self.rows[row][0].save(data, "PNG", compress_level=1)
        return data.getvalue()

    def identity(self) -> str:
        return self.name


def class_prompts(classnames: Sequence[str]) -> list[str]:
    """Class names as they stand in a sentence: folders have `_` where a sentence has a blank."""
    return [name.replace("_", " ").strip() for name in classnames]
