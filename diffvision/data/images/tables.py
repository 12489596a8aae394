"""Tables of images: rows of .csv, .tsv and .jsonl files, the columns that are read, class names as numbers.

`sources` reads the folders of images.
"""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffvision.data.images.image_set import Captions
from diffvision.data.images.samples import CAPTION_NAMES, LABEL_NAMES

COLUMNS = {
    "image": ("image", "filepath", "file_name", "filename", "file", "path", "img", "jpg", "png", "webp"),
    "caption": CAPTION_NAMES,
    "label": LABEL_NAMES,
}
"""The usual names of the columns of tables and datasets."""
_MAX_CELL = 1 << 24  # characters; the csv module's limit of 128 Ki refuses what `clean_caption` would cut


def captions_of(cell: Any) -> Captions:
    """Return the captions in a cell: a text, or a list of them."""
    if cell is None:
        return ("",)
    return tuple(map(str, cell)) if isinstance(cell, list | tuple | np.ndarray) else (str(cell),)


def numbered(labels: Sequence[Any], table: Any) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return class numbers and names: numbers stay as they are, names are numbered in alphabetical order."""
    texts = [str(label).strip() for label in labels]
    if all(re.fullmatch(r"\d{1,16}", text) for text in texts):
        return np.array(list(map(int, texts)), dtype=np.int64), ()
    if "" in texts:
        raise ValueError(f"{table} has no label in its row {texts.index('') + 1}: write one, or take the row out")
    classnames = tuple(sorted(set(texts)))
    number = {name: label for label, name in enumerate(classnames)}
    return np.array([number[text] for text in texts], dtype=np.int64), classnames


def resolved_columns(header: Sequence[str], given: dict[str, str], table: Any) -> dict[str, str]:
    """Return which column is which: an image, and a caption or a label; those given, else those with usual names."""
    if len(header) == 1 and ";" in header[0]:
        raise ValueError(f"{table} has semicolons between its columns: save it with commas, or with tabs as .tsv")
    if not header:
        raise ValueError(f"{table} is empty: its first line names the columns, such as image,caption")
    resolved: dict[str, str] = {}
    for what, known in COLUMNS.items():
        if what in given:
            if given[what] not in header:
                raise ValueError(f"{table} has columns {list(header)}: none of them is called {given[what]!r} ({what})")
            resolved[what] = given[what]
        elif match := next((name for wanted in known for name in header if name.strip().lower() == wanted), None):
            resolved[what] = match
    if "image" not in resolved:
        usual = " or ".join(COLUMNS["image"][:2])
        raise ValueError(
            f"{table} has columns {list(header)}: none of them is called {usual}; name it with columns, or "
            "write a first line that names the columns"
        )
    if len(resolved) == 1:
        raise ValueError(
            f"{table} has columns {list(header)}: none of them is called caption or label; name one with columns"
        )
    return resolved


def csv_rows(table: Path, columns: dict[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, row) of a table; a missing cell is an empty one."""
    # In a .tsv one line is one row and a quote is a quote; in a .csv a quote that never ends must not eat the rest.
    tabs = table.suffix.lower() == ".tsv"
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL))
    line = 0
    try:
        with open(table, newline="", encoding="utf-8-sig") as file:
            if tabs:
                reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            else:
                reader = csv.DictReader(file, strict=True)
            resolved = resolved_columns(list(reader.fieldnames or []), columns, table)
            line = reader.line_num
            for row in reader:
                line = reader.line_num
                yield line, {what: row[name] or "" for what, name in resolved.items()}
    except csv.Error as error:
        remedy = "" if tabs else " (a quote inside a quoted cell is written twice)"
        raise ValueError(f"{table}, after line {line}: {error}: correct the row{remedy}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{table}, line {_undecodable(table)}, is not UTF-8: save the file as UTF-8") from None


def json_lines(table: Path, columns: dict[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, row) of a file with a JSON object in each line."""
    resolved: dict[str, str] | None = None
    try:
        with open(table, encoding="utf-8-sig") as file:
            for line, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{table}, line {line}, is not JSON ({error}): correct the line") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{table}, line {line}, is not a JSON object: correct the line")
                resolved = resolved or resolved_columns(list(row), columns, table)
                yield line, {what: row.get(name, "") for what, name in resolved.items()}
    except UnicodeDecodeError:
        raise ValueError(f"{table}, line {_undecodable(table)}, is not UTF-8: save the file as UTF-8") from None


def _undecodable(path: Path) -> int:
    """Return the first line that is not UTF-8; the csv reader, which reads ahead, does not know."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0


def path_inside(root: Path, image: str, where: str) -> str:
    """Return the path of an image, relative to the root; raise ValueError where it leads out of the root.

    A table, which may come from others, cannot put other files of this machine into a dataset.
    """
    try:
        inside = (root / image).resolve().is_relative_to(root)
    except (OSError, ValueError, RuntimeError):  # a null character, a circle of links
        inside = False
    if not inside:
        raise ValueError(
            f"{where}: {image!r} is not a path inside {root}: correct the row, copy what is linked, or choose another "
            "source"
        )
    return image
