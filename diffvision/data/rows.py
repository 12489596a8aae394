"""Rows of JSON objects from the files that people have: .jsonl, .json and .parquet, the first two also as .gz."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
"""The endings of files that `read_rows` reads by their form; any other file is read as lines."""


def read_rows(path: str | Path) -> Iterator[tuple[int | str, Any]]:
    """Yield each row with its number from 1, that of its line where rows are lines.

    Args:
        path: lines of JSON, empty ones passed over; .json: one object, a list of rows, or an object of objects, whose
            keys take the place of numbers; .parquet: columns are keys, and pyarrow is needed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a folder; a file that is not UTF-8, JSON or Parquet, or damaged; no pyarrow.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give files in it ({', '.join(SUFFIXES)})")
    if path.suffix == ".parquet":
        yield from enumerate(_parquet(path), start=1)
        return
    content = _text(path)
    if path.name.removesuffix(".gz").endswith(".json"):
        whole = _json(content, str(path))
        if isinstance(whole, dict) and any(isinstance(value, dict) for value in whole.values()):
            yield from whole.items()
        else:
            yield from enumerate(whole if isinstance(whole, list) else [whole], start=1)
        return
    # Lines end at \n alone: JSON may have other line ends in its strings.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield number, _json(line, f"line {number} of {path}")


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is a damaged .gz ({error}): get the file again") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): convert it") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): write one object on each line") from None


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f'.parquet files are read by pyarrow ({error}): pip install "diffvision[data]"') from None
    try:
        for batch in ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path} is damaged ({error}): get the file again") from None
