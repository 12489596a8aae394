"""Rows of JSON objects from .jsonl, .json and .parquet files."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from diffvision.files import decoded


def read_rows(path: str | Path) -> Iterator[tuple[int | str, Any]]:
    """Yield each row with its number from 1, that of its line where rows are lines.

    Args:
        path: lines of JSON, empty ones passed over, or a list of rows; .json: also one object, or an object whose
            values are all objects, with keys in place of numbers; .parquet: columns are keys, cells that are null are
            left out, and pyarrow is needed.

    Raises:
        OSError: no such file, or a folder.
        ValueError: the file is not UTF-8, JSON or Parquet, or damaged; no pyarrow.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from enumerate(_read_parquet(path), start=1)
        return
    content = decoded(path.read_bytes(), path)
    whole = None
    if suffix == ".json" or content.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # its lines may be JSON
            whole = json.loads(content)
    if isinstance(whole, dict) and whole and all(isinstance(value, dict) for value in whole.values()):
        yield from whole.items()
    elif whole is not None:
        yield from enumerate(whole if isinstance(whole, list) else [whole], start=1)
    else:
        # Lines end at \n alone: JSON may have other line ends in its strings.
        for number, line in enumerate(content.split("\n"), start=1):
            if line.strip():
                yield number, _read_line(line, f"line {number} of {path}")


def _read_line(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON, got an error ({error}): write one object on each line") from None


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a parquet file without their empty cells."""
    try:
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ValueError(f'.parquet files are read by pyarrow ({error}): pip install "diffvision[data]"') from None
    try:
        rows = read_table(path).to_pylist()
    except FileNotFoundError:
        raise
    except (OSError, OverflowError, ValueError) as error:  # pyarrow's are among them
        raise ValueError(f"{path} cannot be read ({error}): get it again, or leave out unneeded columns") from None
    return [{name: cell for name, cell in row.items() if cell is not None} for row in rows]
