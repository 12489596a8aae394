"""Images that other libraries read: Hugging Face `datasets` (saved datasets and .parquet files) and zipfile.

`image_sources` chooses among these, folders and tables.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np

from diffvision.data.images.image_set import ImageCollection, Parts, Reader
from diffvision.data.images.image_tables import check_path, number_labels, read_captions, read_label, resolve_columns
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sidecars import stamp
from diffvision.data.splits import named_splits, splits_in
from diffvision.files import lock_of, locked, scratch, sweep, user_cache

_REASON = 80  # characters of another library's message


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"Hugging Face datasets and .parquet files need the package `datasets` ({error}): "
            'pip install "diffvision[data]"'
        ) from None
    return datasets


def unpack_archive(path: Path) -> Path:
    """Unpack a .zip into the user's cache, once for all ranks and runs, and return the folder with its content."""
    name = hashlib.sha256(f"{path.absolute()} {stamp(path)}".encode()).hexdigest()[:16]
    folder = user_cache("datasets").resolve() / "unpacked" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock_of(folder)):
        if not folder.is_dir():
            sweep(folder.parent)
            with scratch(folder.parent) as part, _naming(path):
                with zipfile.ZipFile(path) as archive:
                    members = [PurePosixPath(name) for name in archive.namelist()]
                    if any(member.is_absolute() or ".." in member.parts for member in members):
                        raise ValueError("a path leads out of it")
                    archive.extractall(part)
                part.rename(folder)
    inside = [part for part in folder.iterdir() if part.name != "__MACOSX" and not part.name.startswith(".")]
    if len(inside) == 1 and inside[0].is_dir() and not splits_in(inside[0].name):  # the archive of one folder
        return inside[0]
    return folder


def read_saved(path: Path, columns: dict[str, str]) -> Parts:
    """Return {split: reads its images} of a folder that `datasets` saved; {"": reads them} of a dataset alone."""
    with _naming(path):
        loaded = _datasets().load_from_disk(str(path))
    splits: dict[str, Callable[[], Any]] = {"": lambda: loaded}
    if isinstance(loaded, dict):
        splits = {split: partial(loaded.get, name) for split, name in named_splits(loaded, path).items()}
    return {split: partial(_read_dataset, path, split, splits, columns) for split in splits}


def read_parquet(
    location: str | Path, splits: Mapping[str, Sequence[Path]], columns: dict[str, str], root: Path
) -> Parts:
    """Return {split: reads its images} of .parquet files, in which paths are relative to a root."""
    opened = {split: partial(_open_parquet, location, files) for split, files in splits.items()}
    return {split: partial(_read_dataset, location, split, opened, columns, root) for split in splits}


def _open_parquet(location: str | Path, files: Sequence[Path]) -> Any:
    """Return the `datasets.Dataset` of some files."""
    load = _datasets().Dataset.from_parquet
    from pyarrow.parquet import read_schema

    with _naming(location):  # `datasets` logs which file is damaged, and fills a column that one lacks
        loaded = load(list(map(str, files)), cache_dir=str(user_cache("datasets")))
    if other := next((file for file in files if set(read_schema(file).names) != {*loaded.column_names}), None):
        raise ValueError(f"tables of {location} must have the same columns, got others in {other}")
    return loaded


@contextmanager
def _naming(source: str | Path) -> Iterator[None]:
    """Raise what `datasets`, pyarrow and zipfile raise on damaged files as a ValueError that names the source."""
    try:
        yield
    except Exception as error:
        reason = re.split(r"\. |\n", str(error.__cause__ or error) or type(error).__name__)[0][:_REASON]
        raise ValueError(f"{source} cannot be read ({reason}): get the file again, or free space") from None


def _read_dataset(
    location: str | Path,
    split: str,
    splits: Mapping[str, Callable[[], Any]],
    columns: dict[str, str],
    root: Path | None = None,
) -> ImageCollection:
    """Return the images of a `datasets.Dataset`, whose names of classes are numbered with those of the other splits.

    Args:
        location: in messages.
        split: its split.
        splits: return the datasets of all splits.
        columns: as `image_sources.find_images` takes them.
        root: the folder that image paths must be in; None does not check paths.
    """
    datasets, rows = _datasets(), splits[split]().with_format(None)
    source = f"{location}, split {split}" if split else str(location)
    resolved = resolve_columns(rows.column_names, columns, source)
    image = resolved["image"]
    with _naming(f"{source}, column {image!r}"):
        read = _Rows(rows.select_columns([image]).cast_column(image, datasets.Image(decode=False)), image, root)
    for row, path in enumerate(read.paths if root is not None else []):
        if not read.embedded[row].is_valid:
            check_path(cast(Path, root).resolve(), path, f"{source}, row {row}")
    captions = [read_captions(cell) for cell in rows[resolved["caption"]]] if "caption" in resolved else None
    labels: np.ndarray | None = None
    classnames: tuple[str, ...] = ()
    if "label" in resolved:
        column = resolved["label"]
        feature, cells = rows.features[column], list(rows[column])
        if isinstance(feature, datasets.ClassLabel):
            if bad := [row for row, cell in enumerate(cells) if cell is None or cell < 0]:
                raise ValueError(f"{source}, row {bad[0]} must have a label, got {cells[bad[0]]}: remove such rows")
            labels, classnames = np.array(cells, dtype=np.int64), tuple(feature.names)
        else:
            names = [read_label(cell, f"{source}, row {row}") for row, cell in enumerate(cells)]
            others = [read() for other, read in splits.items() if other != split]
            labels, classnames = number_labels(names, _read_others(others, column))
    return ImageCollection(source, [f"row {row}" for row in range(len(rows))], read, captions, labels, classnames)


def _read_others(others: Sequence[Any], column: str) -> Iterator[str]:
    """Yield the labels of other splits; a missing one is refused when its split is read: a test split has none."""
    for other in others:
        for cell in other.with_format(None).unique(column) if column in other.column_names else ():
            with suppress(ValueError):
                yield read_label(cell, "")


class _Rows(Reader):
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
