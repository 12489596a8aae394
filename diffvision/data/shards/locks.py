"""Files and folders that processes of a machine share: locks, and scratch folders that outlive no process for long."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Waits for a lock file, which is made if need be, and holds it: alone, or with others that hold it shared."""
    file = _lock(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield
    finally:
        _unlock(file)


@contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Holds a lock file alone, and gives True; gives False at once where another holds it."""
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
        os.close(file)  # it was removed while it was waited for, and another may have its name


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # closing it would not do where a process was forked meanwhile
    os.close(file)


@contextmanager
def scratch(parent: Path, prefix: str = "") -> Iterator[Path]:
    """An empty folder `PREFIX*.part` in `parent`, removed at the end if it still has that name.

    It is locked as long as its process lives, so that `sweep` can tell it from what a killed one left.
    """
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"{prefix}{secrets.token_hex(6)}.part"
    with locked(_lock_of(folder)):  # before it is there
        folder.mkdir()
        try:
            yield folder
        finally:
            _remove(folder)


def sweep(parent: Path, prefix: str = "") -> int:
    """Remove the scratch folders whose process is gone; returns the bytes in the others."""
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
