"""What processes of a machine share: lock files, and scratch folders that do not outlive their process for long.

Not `filelock`: it has no shared locks on files, and does not notice that a lock file was removed while it was waited
for.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Wait for a lock file, which is made if need be, and hold it: exclusively, or with others that hold it shared."""
    file = _lock(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield
    finally:
        _unlock(file)


@contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Hold a lock file exclusively and give True; give False at once where another process holds it."""
    try:
        file = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        _unlock(file)


def _lock(path: Path, how: int) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, how)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was removed during the wait, and another file may have its name


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # closing it would not do where a process was forked meanwhile
    os.close(file)


@contextmanager
def scratch(parent: Path, prefix: str = "") -> Iterator[Path]:
    """Make an empty folder `PREFIX*.part` in `parent`, and remove it at the end if it still has that name.

    It is locked as long as its process lives, so that `sweep` can distinguish it from what a killed process left.
    """
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"{prefix}{secrets.token_hex(6)}.part"
    with locked(_lock_of(folder)):  # before the folder exists
        folder.mkdir()
        try:
            yield folder
        finally:
            _remove(folder)


def sweep(parent: Path, prefix: str = "") -> int:
    """Remove the scratch folders of processes that ended; return the bytes in the others."""
    total = 0
    for folder in list(parent.iterdir()):
        if folder.name.startswith(prefix) and folder.name.endswith(".part"):
            with locked_if_free(_lock_of(folder)) as free:
                if free:
                    _remove(folder)
                else:
                    with suppress(FileNotFoundError):  # it has just been finished
                        total += sum(path.stat().st_size for path in folder.iterdir())
    return total


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
