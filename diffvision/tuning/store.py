"""The file of measurements as `diffvision tune` writes it: whole or not at all, and what others wrote stays."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

from diffvision.files import lock_of, locked, replacing
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
        with locked(lock_of(file), timeout=SECONDS):
            pass
    except OSError as error:
        raise ValueError(f"{error}: name another file with {VARIABLE}") from error
    if os.environ.get(VARIABLE) and file.exists() and file.stat().st_size:
        try:
            entries_of(file)
        except ValueError as error:
            raise ValueError(f"{error}, and would be lost: name another with {VARIABLE}, or remove it") from error
    return file


def read_tuning(file: Path, machine: dict[str, str]) -> Tuning:
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
    with locked(lock_of(file), timeout=SECONDS):
        entries = _entries(file)
        before = _of(entries, tuning.machine)
        excluded = {**tuning.excluded, **before.excluded}
        choices = {kind: choice for kind, choice in before.choices.items() if choice.backend not in excluded}
        tuning = Tuning(tuning.machine, {**choices, **tuning.choices}, excluded)
        others = [entry for entry in entries if entry["machine"] != tuning.machine]
        content = json.dumps({"machines": [*others, tuning.to_json()]}, indent=1) + "\n"
        with replacing(file) as new:
            new.write(content.encode())


def _entries(file: Path) -> list[dict[str, Any]]:
    """Return the measurements in a file; a damaged one is replaced."""
    try:
        return entries_of(file)
    except FileNotFoundError:
        return []
    except ValueError as error:
        if file.stat().st_size:
            warnings.warn(f"{error}: it is replaced", stacklevel=2)
        return []
