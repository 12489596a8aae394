"""Output of an evaluation: a progress bar, and files that are written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diffvision.evaluation.distributed import rank_and_world
from diffvision.files import replacing
from diffvision.progress import track


def split_names(names: str | Path | Sequence[str | Path]) -> list[str]:
    """Return names as a list, from a path, a list, or text separated by commas.

    Text that is an existing path is that one path, even if it has commas.
    """
    if isinstance(names, str) and not os.path.exists(names):
        return [name.strip() for name in names.split(",")]
    return [str(name) for name in ([names] if isinstance(names, str | Path) else names)]


def bar(batches: Any, description: str) -> Iterable:
    """Return the batches under a progress bar on rank 0."""
    return batches if rank_and_world()[0] else track(batches, description)


def check_folder(folder: str | Path, setting: str = "output") -> None:
    """Check, before any work, that files can be written in a folder that exists or will be made.

    Args:
        setting: name of the setting that gave the folder, for the error.

    Raises:
        ValueError: a file is in its way, or it may not be written.
    """
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"{setting} is {folder}, and {there} is a file: name a folder, there already or not")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{setting} is {folder}, and {there} may not be written: name another folder")


def check_file(file: str | Path) -> None:
    """Raise a ValueError, before any work, if the output file cannot be written."""
    if Path(file).is_dir():
        raise ValueError(f"output is {file}, which is a folder: name a file")
    check_folder(Path(file).parent)


def write_json(path: Path, content: Any) -> None:
    """Write plain values; raise a ValueError for NaN, which JSON cannot hold."""
    write_bytes(path, json.dumps(content, indent=2, allow_nan=False).encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically, and create its folder.

    Raises:
        OSError: it cannot be written; an existing file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path, sync=True) as file:
            file.write(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
