"""Tables of images: rows of .csv, .tsv and .jsonl files, the columns that are read, class names as numbers.

`image_sources` reads the folders of images.
"""

import ast
import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from diffvision.data.images.decode import is_blank, is_caption
from diffvision.data.images.image_set import Captions
from diffvision.data.images.samples import CAPTION_NAMES, LABEL_NAMES
from diffvision.data.rows import read_rows
from diffvision.files import decoded
from diffvision.words import composed

COLUMNS = {
    "image": ("image", "filepath", "file_name", "filename", "file", "path", "img", "jpg", "png", "webp", "image_name"),
    "caption": (*CAPTION_NAMES, "comment"),
    "label": LABEL_NAMES,
}
"""The usual names of the columns of tables and datasets."""
_MISSING_VALUES = ("nan", "-nan", "nat", "null", "none", "na", "<na>", "n/a", "#na", "#n/a", "#n/a n/a", "\\n", "[]")
"""As JSON, Python, pandas, R, Excel and databases write it."""
_ITEM = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|None|nan|null|[-+]?\d[\d.e+-]*)"""
_LIST = re.compile(rf"\[\s*{_ITEM}(?:(?:\s*,\s*|\s+){_ITEM})*\s*,?\s*\]", re.DOTALL)
"""A list of texts or numbers as JSON, Python or NumPy, which has no commas, print it."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,2})?", re.ASCII | re.IGNORECASE)
_MAX_LABEL = 10**16
_LISTED, _NAME = 8, 40  # columns in a message, and characters of their names
_MAX_CELL = 1 << 24  # characters; the csv module's limit of 128 Ki refuses what `clean_caption` would cut


def read_captions(cell: Any) -> Captions:
    """Return the captions in a cell, each on one line: a text, or a list of texts, also one that is written as a text.

    There are none in a missing cell or anything else, as in shards: such a sample is counted when it is read.
    """
    if isinstance(cell, str):
        if is_missing(cell):
            return ()
        listed = _parse_list(cell.strip())
        if listed and not all(isinstance(one, int | float) for one in listed):  # [1] may be all that a caption says
            cell = listed
    if not is_caption(cell):
        return ()
    captions = [cell] if isinstance(cell, str) else cell
    # What reads the lines of a text takes each for a caption.
    return tuple(" ".join(one.split()) if len(one.splitlines()) > 1 else one for one in captions)


def _parse_list(text: str) -> list[Any] | None:
    """Return a list that was written as a text, such as `["a dog", "a cat"]`; None if it is no list."""
    if _LIST.fullmatch(text) is None:
        return None
    with suppress(ValueError):
        return json.loads(text, strict=False)
    items = re.findall(_ITEM, text, re.DOTALL)
    try:
        return [None if item in ("None", "nan", "null") else ast.literal_eval(item) for item in items]
    except (ValueError, SyntaxError):  # an escape that Python does not know
        return None


def is_missing(text: str) -> bool:
    """Return whether a text is a missing value, as other programs write it."""
    return text.strip().lower() in _MISSING_VALUES


def read_label(cell: Any, where: str) -> str:
    """Return a label as text.

    Raises:
        ValueError: it is missing, or neither a text nor a number.
    """
    text = composed(str(cell).strip())
    if not isinstance(cell, str | int | float) or is_blank(text) or is_missing(text) or _parse_list(text):
        raise ValueError(f"{where} must have a label, got {cell!r:.40}: write one, or remove the row")
    return text


def number_labels(labels: Sequence[str], others: Iterable[str] = ()) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return class numbers, and the names of classes that are not numbered as they are.

    Whole numbers from 0 on, also as 10.0 or 1e1, stay as they are; names are numbered in alphabetical order.

    Args:
        labels: one for each image.
        others: further labels, such as those of other splits, that are numbered together with them.
    """
    every = {*labels, *others}
    values = {text: Decimal(text) for text in every if _NUMBER.fullmatch(text)}
    if len(values) == len(every) and all(0 <= value < _MAX_LABEL and value % 1 == 0 for value in values.values()):
        return np.array([int(values[text]) for text in labels], dtype=np.int64), ()
    number = {name: label for label, name in enumerate(sorted(every))}
    return np.array([number[text] for text in labels], dtype=np.int64), tuple(number)


def are_numbers(labels: Iterable[str]) -> bool:
    """Return whether all labels are numbers."""
    return all(map(_NUMBER.fullmatch, labels))


def resolve_columns(header: Sequence[str], given: dict[str, str], table: Any) -> dict[str, str]:
    """Return which column is which: an image, and a caption or a label; those given, else those with usual names."""
    names = [name[:_NAME] for name in header[:_LISTED]]
    resolved: dict[str, str] = {}
    for what, known in COLUMNS.items():
        if what in given:
            matches = [name for name in header if name == given[what]]
        else:
            called = ([name for name in header if name.strip().lower() == usual] for usual in known)
            matches = next(filter(None, called), [])
        if len(matches) > 1 or (what in given and not matches):
            name = matches[0] if matches else given[what]
            raise ValueError(f"{table} must have one column {name!r} ({what}), got {names}: rename it, or set columns")
        if matches:
            resolved[what] = matches[0]
    if "image" not in resolved or len(resolved) == 1:
        remedy = "name them in the first line, separated by commas, or set columns"
        if any(name.lower().startswith(("url", "http://", "https://")) for name in header):
            remedy = "download URLs by img2dataset first (guide: Data)"
        raise ValueError(f"{table} must have a column image, and one caption or label, got {names}: {remedy}")
    return resolved


def has_labels(table: Path, columns: dict[str, str]) -> bool:
    """Return whether a table has a column of labels; a damaged one has none, and is refused when it is read."""
    with suppress(ValueError, StopIteration, ImportError):
        if table.suffix.lower() == ".parquet":
            from pyarrow.parquet import read_schema

            return "label" in resolve_columns(read_schema(table).names, columns, table)
        return "label" in next(read_table(table, columns))[1]
    return False


def read_table(table: Path, columns: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (table and line, {"image": cell, "caption": cell, ...}) of each row; a missing cell is an empty one."""
    if table.suffix.lower() != ".jsonl":
        yield from _read_csv(table, columns)
        return
    resolved: dict[str, str] = {}
    for line, row in read_rows(table):
        if not isinstance(row, dict):
            raise ValueError(f"{table}, line {line}, must be a JSON object, got {type(row).__name__}: correct the line")
        resolved = resolved or resolve_columns(list(row), columns, table)
        yield f"{table}, line {line}", {what: row.get(name, "") for what, name in resolved.items()}


def _read_csv(table: Path, columns: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a .tsv, in which one line is one row and a quote is a quote, or of a .csv.

    The columns of a .csv may also be separated by tabs or `|`, whichever is the most frequent in its first line.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL))
    line = 0
    with _open_text(table) as file:
        first = file.readline()
        file.seek(0)
        if table.suffix.lower() == ".tsv":
            rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:  # strict: a quote that never ends must not eat the rest
            rows = csv.reader(file, delimiter=max(",\t|", key=first.count), strict=True)
        try:
            header: list[str] = next(rows, [])
            position = {what: header.index(name) for what, name in resolve_columns(header, columns, table).items()}
            line = rows.line_num
            for row in filter(None, rows):
                line = rows.line_num
                if any(row[len(header) :]):
                    raise ValueError(
                        f"{table}, line {line}, must have {len(header)} cells, got {len(row)}: write a cell with a "
                        "separator in it in quotes, or in a .tsv without the tab"
                    )
                yield f"{table}, line {line}", {what: row[at] if at < len(row) else "" for what, at in position.items()}
        except csv.Error as error:
            raise ValueError(
                f"{table}, after line {line}: {error}: correct the row (a quote in a quoted cell is written twice)"
            ) from None


@contextmanager
def _open_text(table: Path) -> Iterator[TextIO]:
    """Open a table of any size to read it line by line; ValueError with the line where it is not UTF-8."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            decoded(file.readline().encode(), table)  # UTF-16 has zeros
            file.seek(0)
            yield file
    except UnicodeDecodeError:
        decoded(table.read_bytes(), table)


def check_path(root: Path, image: Any, where: str) -> str:
    """Return the path of an image, relative to the root; raise ValueError where it leads out of the root.

    A table, which may come from others, cannot put other files of this machine into a dataset. A row without an image
    has an empty path, and is counted when it is read.
    """
    image = "" if image is None else image
    try:
        inside = (root / image).resolve().is_relative_to(root)
    except (OSError, ValueError, RuntimeError, TypeError):  # a null character, a circle of links, no text
        inside = False
    if not inside:
        raise ValueError(f"{where}: the image must be one path inside {root}, got {image!r:.80}: correct the row")
    return image
