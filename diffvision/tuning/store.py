"""The file of measurements as `diffvision tune` writes it: whole or not at all, and what others wrote stays."""

import json
import os
import secrets
import warnings
from pathlib import Path

from filelock import FileLock

from diffvision.ops.attention.tuned import VARIABLE, Tuning, read, tuning_file

KEPT = 20  # machines, the newest ones


def file_to_write() -> Path:
    """Return the file, in a folder that can be written to.

    Raises:
        ValueError: measurements are switched off, or the file cannot be written.
    """
    file = tuning_file()
    if file is None:
        raise ValueError(f'{VARIABLE} is "off", so nothing would be kept: unset it, or name a file with it')
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock(file)):
            if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)) or not os.access(file.parent, os.W_OK):
                raise PermissionError(f"{file} cannot be written")
    except OSError as error:
        raise ValueError(f"{error}: name another file with {VARIABLE}") from error
    return file


def known(file: Path, machine: dict[str, str]) -> Tuning:
    """Return what a file holds of a machine; nothing where it does not, or is not a file of ours."""
    return next((entry for entry in _entries(file) if entry.machine == machine), Tuning(machine, ""))


def save(file: Path, tuning: Tuning) -> Tuning:
    """Add measurements to a file and return what it now holds of their machine.

    Of the same kind of call the new choice counts; a backend that was excluded stays so.
    """
    with FileLock(_lock(file)):
        entries = _entries(file)
        before = next((entry for entry in entries if entry.machine == tuning.machine), None)
        if before is not None:
            excluded = {**tuning.excluded, **before.excluded}
            choices = {kind: choice for kind, choice in before.choices.items() if choice.backend not in excluded}
            tuning = Tuning(tuning.machine, tuning.date, {**choices, **tuning.choices}, excluded)
        others = [entry for entry in entries if entry.machine != tuning.machine]
        text = json.dumps({"machines": [entry.to_json() for entry in (*others, tuning)][-KEPT:]}, indent=1)
        partial = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    return tuning


def _entries(file: Path) -> list[Tuning]:
    try:
        return read(file)
    except FileNotFoundError:
        return []
    except ValueError as error:
        warnings.warn(f"{error}: it is written anew", stacklevel=2)
        return []


def _lock(file: Path) -> Path:
    return file.with_name(f"{file.name}.lock")
