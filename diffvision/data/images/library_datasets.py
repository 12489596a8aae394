"""Images that other libraries read: Hugging Face `datasets` (saved datasets, .parquet and .zip files) and torchvision.

`image_sources` chooses among these, folders and tables.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from diffvision.data.images.image_set import ImageCollection, ImageFiles, Reader
from diffvision.data.images.image_tables import (
    check_path,
    number_labels,
    read_caption_cell,
    read_captions,
    read_label,
    resolve_columns,
)
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sidecars import stamp
from diffvision.data.splits import splits_in
from diffvision.files import lock_of, locked, scratch, sweep, user_cache

TORCHVISION = "torchvision:"
_REASON = 80  # characters of another library's message


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"Hugging Face datasets, .parquet and .zip files need the package `datasets` ({error}): "
            'pip install "diffvision[data]"'
        ) from None
    return datasets


def unpack_archive(path: Path) -> Path:
    """Unpack a .zip into the user's cache, once for all ranks and runs, and return the folder with its content.

    `datasets` reads the folder of a .zip as one class, so it only unpacks here.
    """
    datasets = _datasets()
    _check_archive(path)
    name = hashlib.sha256(f"{path.absolute()} {stamp(path)}".encode()).hexdigest()[:16]
    folder = user_cache("datasets") / "unpacked" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock_of(folder)):
        if not folder.is_dir():
            sweep(folder.parent)
            with scratch(folder.parent) as part:
                settings = datasets.DownloadConfig(cache_dir=str(part))
                try:
                    unpacked = Path(datasets.DownloadManager(download_config=settings).extract(str(path)))
                except Exception as error:  # those of zipfile, its decompressors and the disk
                    raise ValueError(
                        f"{path} cannot be unpacked into {folder.parent} ({_first_sentence(error)}): get the file "
                        "again, or free space there"
                    ) from None
                unpacked.rename(folder)
    inside = [part for part in folder.iterdir() if part.name != "__MACOSX" and not part.name.startswith(".")]
    if len(inside) == 1 and inside[0].is_dir() and not splits_in(inside[0].name):  # the archive of one folder
        return inside[0]
    return folder


def _check_archive(path: Path) -> None:
    """Raise a ValueError for a file that is no whole .zip, or has a member that would be written outside of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [PurePosixPath(name) for name in archive.namelist()]
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} must be a whole .zip, got one that cannot be read ({error}): get it again") from None
    if outside := [str(member) for member in members if member.is_absolute() or ".." in member.parts]:
        raise ValueError(f"{path} must hold files below its own folder, got {outside[0]!r}: pack it again")


def list_saved_splits(path: Path) -> list[str]:
    """Return the splits of a folder that `datasets` saved as a dictionary of datasets."""
    try:
        return list(json.loads((path / "dataset_dict.json").read_text("utf-8"))["splits"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{path}/dataset_dict.json does not list splits: save the dataset again") from None


def read_saved(path: Path, split: str | None, columns: dict[str, str]) -> ImageCollection:
    """Return the images of a folder that `datasets` saved."""
    try:
        loaded = _datasets().load_from_disk(str(path))
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{path} is not all of what `datasets` saved ({error}): save it again") from None
    source = str(path) if split is None else f"{path}, split {split}"
    return _read_dataset(source, loaded if split is None else loaded[split], columns)


def read_parquet(
    source: str, files: list[Path], columns: dict[str, str], root: Path, every: Sequence[Path] = ()
) -> ImageCollection:
    """Return the images of .parquet files.

    Args:
        source: what they are called.
        files: those to read.
        columns: as `image_sources.find_images` takes them.
        root: the folder that paths in them are relative to.
        every: the files of all splits, of which only the labels are read: names of classes are numbered with theirs.
    """
    load = _datasets().Dataset.from_parquet
    from pyarrow.parquet import read_schema

    first: set[str] = set()
    for file in files:  # before `datasets`, which logs an error of its own and does not name the file
        with _naming(file):
            names = set(read_schema(file).names)
        if names != (first := first or names):
            raise ValueError(f"{source} must have tables with the same columns, got others in {file}: give one of them")
    with _naming(source):
        rows = load(list(map(str, files)), cache_dir=str(user_cache("datasets")))
    return _read_dataset(source, rows, columns, root, every)


@contextmanager
def _naming(source: str | Path) -> Iterator[None]:
    """Raise what `datasets` and pyarrow raise on damaged files as a ValueError that names the source."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{source} cannot be read ({_first_sentence(error)}): get the file again") from None


def _first_sentence(error: BaseException) -> str:
    """Return the first sentence of the cause of an error."""
    return re.split(r"\. |\n", str(error.__cause__ or error) or type(error).__name__)[0][:_REASON]


def _read_dataset(
    source: str, rows: Any, columns: dict[str, str], root: Path | None = None, every: Sequence[Path] = ()
) -> ImageCollection:
    """Return the images of a `datasets.Dataset`, with captions and labels if it has such columns.

    Args:
        source: its name in messages.
        rows: the dataset.
        columns: as `image_sources.find_images` takes them.
        root: the folder that image paths must be in; None does not check paths.
        every: as `read_parquet` takes it.
    """
    datasets = _datasets()
    resolved = resolve_columns(rows.column_names, columns, source)
    image, kind = resolved["image"], rows.features[resolved["image"]]
    if isinstance(kind, dict) and {"bytes", "path"} <= kind.keys():
        kind = datasets.Image()
    if not isinstance(kind, datasets.Image) and getattr(kind, "dtype", "").removeprefix("large_") not in (
        "string",
        "binary",
    ):
        raise ValueError(
            f"{source}, column {image!r} must have one image per row, as bytes or as a path, got {str(kind)[:_REASON]}"
        )
    read = _Rows(rows.select_columns([image]).cast_column(image, datasets.Image(decode=False)), image, root)
    if root is not None:
        for row, path in enumerate(read.paths):
            if not read.embedded[row].is_valid:
                check_path(root.resolve(), path, f"{source}, row {row}")
    captions = [read_caption_cell(cell) for cell in rows[resolved["caption"]]] if "caption" in resolved else None
    labels: np.ndarray | None = None
    classnames: tuple[str, ...] = ()
    if "label" in resolved:
        feature, cells = rows.features[resolved["label"]], list(rows[resolved["label"]])
        if isinstance(feature, datasets.ClassLabel):
            if unlabelled := [row for row, cell in enumerate(cells) if cell is None or cell < 0]:
                bad = unlabelled[0]
                raise ValueError(f"{source}, row {bad} must have a label, got {cells[bad]}: remove such rows")
            labels, classnames = np.array(cells, dtype=np.int64), tuple(feature.names)
        else:
            texts = [read_label(cell, f"{source}, row {row}") for row, cell in enumerate(cells)]
            labels, classnames = number_labels(texts, _read_labels(every, resolved["label"]))
    names = [f"row {row}" for row in range(len(rows))]
    return ImageCollection(source, names, read, captions, labels, classnames)


def _read_labels(files: Sequence[Path], column: str) -> list[str]:
    """Return the labels in .parquet files, of which only that column is read; a test split may have none."""
    from pyarrow import parquet

    labels = []
    for file in files:
        with _naming(file):
            known = column in parquet.read_schema(file).names
            cells = parquet.read_table(file, columns=[column])[column].unique().to_pylist() if known else []
        for cell in cells:
            with suppress(ValueError):  # a missing label is refused when its split is read
                labels.append(read_label(cell, str(file)))
    return labels


class _Rows:
    """Images in a column of a `datasets.Dataset`: encoded bytes, or paths inside of a folder."""

    def __init__(self, rows: Any, column: str, root: Path | None) -> None:
        from pyarrow import compute

        self.rows, self.column, self.root = rows, column, root or Path()
        cells = rows.data.column(column)
        self.embedded = compute.struct_field(cells, "bytes")
        self.paths = compute.struct_field(cells, "path").to_pylist()

    def __call__(self, row: int) -> bytes:
        cell = self.rows[row][self.column] or {}
        if cell.get("bytes") is not None:
            return cell["bytes"]
        try:
            return (self.root / cell["path"]).read_bytes()
        except (OSError, LookupError, TypeError):
            raise BadSample("missing image") from None

    def path(self, row: int) -> str | None:
        if self.embedded[row].is_valid or not self.paths[row]:
            return None
        return os.path.abspath(self.root / self.paths[row])

    def identity(self) -> str:
        return f"{len(self.rows)} {self.rows.data.nbytes}"


def _torchvision_class(location: str) -> Callable[..., Any]:
    from torchvision import datasets

    name = location.removeprefix(TORCHVISION).partition(":")[0]
    made = getattr(datasets, name) if name in datasets.__all__ else None
    if made is None or "root" not in inspect.signature(made).parameters:
        raise ValueError(f"{location}: torchvision has no dataset {name!r} in a folder: see torchvision.datasets")
    return made


def list_torchvision_splits(location: str) -> list[str]:
    """Return the splits of `torchvision:NAME:ROOT`."""
    parameters = inspect.signature(_torchvision_class(location)).parameters
    return ["train", "test"] if {"train", "split"} & parameters.keys() else []


def read_torchvision(location: str, split: str | None) -> ImageCollection:
    """Return the images of `torchvision:NAME:ROOT`; nothing is downloaded."""
    dataset_class = _torchvision_class(location)
    name, _, root = location.removeprefix(TORCHVISION).partition(":")
    if not root:
        raise ValueError(f"{location} does not say where its files are: write torchvision:{name}:FOLDER")
    parameters = inspect.signature(dataset_class).parameters
    settings: dict[str, Any] = {
        "download": False,
        "loader": str,  # gives the path of an image in place of the image
        "train": split != "test",
        "split": split or "train",
    }
    try:
        rows = dataset_class(root, **{key: value for key, value in settings.items() if key in parameters})
    except (RuntimeError, OSError, TypeError, ValueError, ModuleNotFoundError) as error:
        raise ValueError(
            f'{location} cannot be read ({str(error).strip()}): download it with python -c "import torchvision; '
            f'torchvision.datasets.{name}({root!r}, download=True)"'
        ) from None
    reader: Reader
    targets: Any
    if "loader" in parameters:
        paths, targets = zip(*(rows[row] for row in range(len(rows))), strict=True)
        names = [os.path.relpath(path, root) for path in paths]
        reader = ImageFiles(Path(root), names)
    else:
        targets = getattr(rows, "targets", None)
        if targets is None:
            targets = [rows[row][1] for row in range(len(rows))]
        names = [f"number {row}" for row in range(len(rows))]
        reader = _Encoded(rows, f"{name} {split} {len(rows)}")
    location = f"{location}, split {split}" if split else location
    if isinstance(targets[0], str | list | tuple):
        return ImageCollection(location, names, reader, captions=[read_captions(target) for target in targets])
    labels = np.array([int(target) for target in targets], dtype=np.int64)
    return ImageCollection(
        location, names, reader, labels=labels, classnames=tuple(map(str, getattr(rows, "classes", ())))
    )


class _Encoded:
    """Images of a dataset of PIL images, as PNG, which loses nothing."""

    def __init__(self, rows: Any, name: str) -> None:
        self.rows, self.name = rows, name

    def __call__(self, row: int) -> bytes:
        data = BytesIO()
        self.rows[row][0].save(data, "PNG", compress_level=1)
        return data.getvalue()

    def identity(self) -> str:
        return self.name

    def path(self, row: int) -> str | None:
        return None
