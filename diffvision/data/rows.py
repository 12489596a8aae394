"""Rows of JSON objects from .jsonl, .json and .parquet files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffvision.files import decoded

SUFFIXES = (".jsonl", ".json", ".parquet")
"""The endings of files that `read_rows` knows, in any case; a file with another is a list of rows, or lines."""


def read_rows(path: str | Path) -> Iterator[tuple[int | str, Any]]:
    """Yield each row with its number from 1, that of its line where rows are lines.

    Args:
        path: lines of JSON, empty ones passed over, or a list of rows; .json: also one object, or an object whose
            values are all objects, with keys in place of numbers; .parquet: columns are keys, cells that are null are
            left out, and pyarrow is needed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a folder; a file that is not UTF-8, JSON or Parquet, or damaged; no pyarrow.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give files in it ({', '.join(SUFFIXES)})")
    if suffix == ".parquet":
        yield from enumerate(_parquet(path), start=1)
        return
    try:
        content = decoded(path.read_bytes(), path)
    except ValueError as error:
        raise ValueError(f"{error}; {', '.join(SUFFIXES)} are read") from None
    whole = _whole(content) if suffix == ".json" or content.lstrip().startswith("[") else None
    if isinstance(whole, dict) and whole and all(isinstance(value, dict) for value in whole.values()):
        yield from whole.items()
    elif whole is not None:
        yield from enumerate(whole if isinstance(whole, list) else [whole], start=1)
    else:
        # Lines end at \n alone: JSON may have other line ends in its strings.
        for number, line in enumerate(content.split("\n"), start=1):
            if line.strip():
                yield number, _line(line, f"line {number} of {path}")


def _whole(text: str) -> Any:
    """Return what a file of JSON holds; None if it is not one value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _line(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON, got an error ({error}): write one object on each line") from None


def _parquet(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a parquet file without their empty cells."""
    try:
        import pyarrow
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ValueError(f'.parquet files are read by pyarrow ({error}): pip install "diffvision[data]"') from None
    try:
        table = read_table(path)
        for index, field in enumerate(table.schema):
            if field.type in (pyarrow.float16(), pyarrow.float32()):  # 0.1, and not 0.10000000149
                numbers = table.column(index).cast(pyarrow.float32()).cast(pyarrow.string())
                table = table.set_column(index, field.name, numbers.cast(pyarrow.float64()))
        rows = table.to_pylist()
    except FileNotFoundError:
        raise
    except (OSError, OverflowError, ValueError) as error:  # pyarrow's are among them
        raise ValueError(f"{path} cannot be read ({error}): get it again, or leave out unneeded columns") from None
    return [{name: cell for name, cell in row.items() if cell is not None} for row in rows]
