"""Images in other libraries' datasets: Hugging Face `datasets`, .parquet files, torchvision.

`sources` chooses among these, folders and tables.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from diffvision.data.images.image_set import ImageCollection, ImageFiles, Reader, digest_equal_files
from diffvision.data.images.tables import (
    check_path,
    number_labels,
    read_caption_cell,
    read_captions,
    read_label,
    resolve_columns,
)
from diffvision.data.shards.sample import BadSample
from diffvision.files import user_cache

TORCHVISION = "torchvision:"
_REASON = 80  # characters of another library's message


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"Hugging Face datasets and .parquet files are read by the package `datasets` ({error}): "
            'pip install "diffvision[data]"'
        ) from None
    return datasets


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
        columns: as `sources.find_images` takes them.
        root: the folder that paths in them are relative to.
        every: the files of all splits; names of classes are numbered with theirs.
    """
    load = _datasets().Dataset.from_parquet
    from pyarrow.parquet import read_schema

    # Before `datasets`, which logs an error of its own.
    columns_of: dict[Path, set[str]] = {}
    for file in files:
        with _name_damaged(file):
            columns_of[file] = set(read_schema(file).names)
        if columns_of[file] != columns_of[files[0]]:
            raise ValueError(f"{source} must have tables with the same columns, got others in {file}: give one of them")
    try:
        rows = load(list(map(str, files)), cache_dir=str(user_cache("datasets")))
    except Exception as error:  # those of `datasets` and pyarrow, which do not name the file
        for file in files:
            _read_whole(file)
        raise ValueError(
            f"{source}: its tables cannot be read together ({_first_sentence(error)}): give one of them"
        ) from None
    return _read_dataset(source, rows, columns, root, every)


@contextmanager
def _name_damaged(file: Path) -> Iterator[None]:
    """Raise what pyarrow raises as a ValueError that names the .parquet file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read ({_first_sentence(error)}): get the file again") from None


def _read_whole(file: Path) -> None:
    from pyarrow.parquet import ParquetFile

    with _name_damaged(file), ParquetFile(file) as opened:
        for _ in opened.iter_batches():
            pass


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
        columns: as `sources.find_images` takes them.
        root: the folder that image paths must be in; None does not check paths.
        every: the .parquet files of all splits, whose labels are numbered together.
    """
    datasets = _datasets()
    resolved = resolve_columns(rows.column_names, columns, source)
    image = resolved["image"]
    if isinstance(rows.features[image], datasets.Image):
        rows = rows.cast_column(image, datasets.Image(decode=False))  # the bytes as they are
    paths, embedded = _split_cells(rows.data.column(image), f"{source}, column {image!r}")
    if root is not None:
        for number, (path, data) in enumerate(zip(paths, embedded, strict=True)):
            if not data.is_valid:
                check_path(root.resolve(), path, f"{source}, row {number}")
    captions = [read_caption_cell(cell) for cell in rows[resolved["caption"]]] if "caption" in resolved else None
    labels: np.ndarray | None = None
    classnames: tuple[str, ...] = ()
    if "label" in resolved:
        feature = rows.features[resolved["label"]]
        cells = list(rows[resolved["label"]])
        if isinstance(feature, datasets.ClassLabel):
            if (row := next((row for row, cell in enumerate(cells) if cell is None or cell < 0), None)) is not None:
                raise ValueError(f"{source}, row {row} must have a label, got {cells[row]}: remove such rows")
            labels, classnames = np.array(cells, dtype=np.int64), tuple(feature.names)
        else:
            texts = [read_label(cell, f"{source}, row {row}") for row, cell in enumerate(cells)]
            labels, classnames = number_labels(texts, _read_labels(every, resolved["label"]))
    names = [f"row {row}" for row in range(len(rows))]
    return ImageCollection(source, names, _Rows(rows, image, root), captions, labels, classnames)


def _read_labels(files: Sequence[Path], column: str) -> list[str]:
    """Return the labels in .parquet files, of which only that column is read; a test split may have none."""
    from pyarrow import parquet

    labels = []
    for file in files:
        with _name_damaged(file):
            known = column in parquet.read_schema(file).names
            cells = parquet.read_table(file, columns=[column])[column].unique().to_pylist() if known else []
        for cell in cells:
            with suppress(ValueError):  # a missing label is refused when its split is read
                labels.append(read_label(cell, str(file)))
    return labels


def _split_cells(column: Any, where: str) -> tuple[Sequence[Any], Any]:
    """Return the paths of a column of images, and their encoded bytes, null for an image that is a file.

    Raises:
        ValueError: a cell is not one image.
    """
    import pyarrow
    from pyarrow import compute, types

    kind = column.type
    if types.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}:
        return compute.struct_field(column, "path").to_pylist(), compute.struct_field(column, "bytes")
    if types.is_string(kind) or types.is_large_string(kind):
        return column.to_pylist(), pyarrow.nulls(len(column), pyarrow.binary())
    if types.is_binary(kind) or types.is_large_binary(kind):
        return [None] * len(column), column
    raise ValueError(f"{where} must have one image per row, as bytes or as a path, got {str(kind)[:_REASON]}")


class _Rows:
    """Images in a column of a `datasets.Dataset`: encoded bytes, or paths inside of a folder."""

    def __init__(self, rows: Any, column: str, root: Path | None) -> None:
        self.rows, self.column, self.root = rows, column, root

    def __call__(self, row: int) -> bytes:
        cell = self.rows[row][self.column]
        data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if isinstance(data, str):
            data, path = None, data
        try:
            if data is None and path is not None:
                data = ((self.root or Path()) / path).read_bytes()
        except OSError:
            data = None
        if data is None:
            raise BadSample("missing image")
        return data

    def identity(self) -> str:
        return f"{len(self.rows)} {self.rows.data.nbytes}"

    def keys(self, *, by_content: bool) -> Sequence[Hashable]:
        """Return the paths of files, and by content digests of encoded images; else each of these is its own."""
        keys: list[Hashable] = []
        for row, (path, data) in enumerate(zip(*_split_cells(self.rows.data.column(self.column), ""), strict=True)):
            if data.is_valid:
                keys.append(hashlib.sha256(data.as_buffer()).digest() if by_content else row)
            else:
                keys.append(os.path.abspath((self.root or Path()) / path) if path else row)
        return digest_equal_files(keys) if by_content else keys


def _torchvision_class(location: str) -> Callable[..., Any]:
    from torchvision import datasets

    name = location.removeprefix(TORCHVISION).partition(":")[0]
    kinds = {known: getattr(datasets, known) for known in sorted(datasets.__all__)}
    rooted = {known: kind for known, kind in kinds.items() if "root" in inspect.signature(kind).parameters}
    if name not in rooted:
        raise ValueError(
            f"{location}: torchvision has no dataset {name!r} in a folder: choose one of {', '.join(rooted)}"
        )
    return rooted[name]


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
    settings: dict[str, Any] = {"download": False} if "download" in parameters else {}
    if "loader" in parameters:
        settings["loader"] = str  # gives the path of an image in place of the image
    if "train" in parameters:
        settings["train"] = split != "test"
    elif "split" in parameters:
        settings["split"] = {"validation": "val"}.get(split or "train", split or "train")
    try:
        rows = dataset_class(root, **settings)
    except (RuntimeError, OSError, TypeError, ValueError, ModuleNotFoundError) as error:
        raise ValueError(
            f'{location} cannot be read ({str(error).strip()}): download it with python -c "import torchvision; '
            f'torchvision.datasets.{name}({root!r}, download=True)"'
        ) from None
    if "loader" in parameters:
        pairs = [rows[row] for row in range(len(rows))]
        targets: Any = [target for _, target in pairs]
        names = [os.path.relpath(path, root) for path, _ in pairs]
        reader: Reader = ImageFiles(Path(root), names)
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

    def keys(self, *, by_content: bool) -> Sequence[Hashable]:
        return range(len(self.rows))
