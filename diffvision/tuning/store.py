"""The file of measurements as `diffvision tune` writes it: whole or not at all, and what others wrote stays."""

import json
import os
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from diffvision.ops.attention.tuned import VARIABLE, Tuning, entries_of, tuning_file

SECONDS = 10.0  # to wait for another process that writes


def file_to_write() -> Path:
    """Return the file, which can be written to.

    Raises:
        ValueError: measurements are switched off, the file cannot be written, or one that was named is another's.
    """
    file = tuning_file()
    if file is None:
        raise ValueError(f'{VARIABLE} is "off", so nothing would be kept: unset it, or name a file with it')
    file = file.resolve()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise PermissionError(f"{file} cannot be written")
        with _locked(file):
            pass
    except OSError as error:
        raise ValueError(f"{error}: name another file with {VARIABLE}") from error
    if os.environ.get(VARIABLE) and file.exists() and file.stat().st_size:
        try:
            entries_of(file)
        except ValueError as error:
            raise ValueError(f"{error}, and would be lost: name another with {VARIABLE}, or remove it") from error
    return file


def known(file: Path, machine: dict[str, str]) -> Tuning:
    """Return what a file holds of a machine; nothing where it does not, or is damaged."""
    return _of(_entries(file), machine)


def _of(entries: list[dict[str, Any]], machine: dict[str, str]) -> Tuning:
    try:
        return next((Tuning.from_json(entry) for entry in entries if entry["machine"] == machine), Tuning(machine))
    except ValueError:
        return Tuning(machine)


def save(file: Path, tuning: Tuning) -> None:
    """Add measurements to a file.

    Of the same kind of call the new choice counts; a backend that was excluded stays so.
    """
    with _locked(file):
        entries = _entries(file)
        before = _of(entries, tuning.machine)
        excluded = {**tuning.excluded, **before.excluded}
        choices = {kind: choice for kind, choice in before.choices.items() if choice.backend not in excluded}
        tuning = Tuning(tuning.machine, {**choices, **tuning.choices}, excluded)
        others = [entry for entry in entries if entry["machine"] != tuning.machine]
        partial = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        try:
            partial.write_text(json.dumps({"machines": [*others, tuning.to_json()]}, indent=1) + "\n", encoding="utf-8")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def _entries(file: Path) -> list[dict[str, Any]]:
    try:
        return entries_of(file)
    except FileNotFoundError:
        return []
    except ValueError as error:
        if file.stat().st_size:
            warnings.warn(f"{error}: it is written anew", stacklevel=2)
        return []


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    lock = file.with_name(f"{file.name}.lock")
    try:
        with FileLock(lock, timeout=SECONDS):
            yield
    except Timeout:
        raise TimeoutError(f"{lock} cannot be locked for {SECONDS:.0f} s") from None
