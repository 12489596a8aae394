"""The results that commands show: tables for people or, with `--json`, the same numbers for programs."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_collected: ContextVar[list[Any] | None] = ContextVar("_collected", default=None)


def show(*tables: Any, data: Any) -> None:
    """Print tables on standard output; under `--json` the data instead.

    Args:
        tables: what rich's Console prints, or functions that print on the Console that they are given.
        data: the same results as dictionaries, lists, dataclasses and plain values.
    """
    collected = _collected.get()
    if collected is not None:
        collected.append(data)
        return
    from rich.console import Console

    console = Console()
    for table in tables:
        if callable(table):
            table(console)
        else:
            console.print(table)


@contextmanager
def as_json() -> Iterator[None]:
    """Write what `show` is given in the context as JSON on standard output, and all other output on standard error."""
    collected: list[Any] = []
    token = _collected.set(collected)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _collected.reset(token)
    for data in collected:
        print(json.dumps(plain(data), indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: NaN and infinity are None, a path is text, a dataclass a dictionary."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, str | int | float) or value is None:
        return value
    if isinstance(value, Sequence):
        return [plain(part) for part in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a number of NumPy's or torch's
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: give plain values")
