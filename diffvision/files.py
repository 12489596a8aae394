"""Files that processes share: the user's cache, locks, scratch folders, and files written whole or not at all."""

import glob
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import platformdirs
from filelock import FileLock, Timeout

_BLOCK = 1 << 20


def user_cache(name: str) -> Path:
    """Return a file or folder of this package in the user's cache; without a home, in the temporary folder."""
    try:
        return Path(platformdirs.user_cache_dir("diffvision"), name)
    except RuntimeError:
        return Path(tempfile.gettempdir(), f"diffvision-{os.getuid()}", name)


def decoded(data: bytes, name: str | Path) -> str:
    """Return the text of a file, with or without the mark that some editors put before UTF-8.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name} is not UTF-8 ({error.reason} at byte {error.start}, line {line}): save it as UTF-8"
        ) from None
    if "\0" in text:  # UTF-16, whose letters are ASCII with zeros between them
        raise ValueError(f"{name} is not UTF-8 (a zero at byte {data.index(0)}): save it as UTF-8")
    return text


def sha256(path: Path, progress: Callable[[], object] = lambda: None) -> str:
    """Return the sha256 of a file; `progress` is called with each MiB."""
    digest, block = hashlib.sha256(), bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
            progress()
    return digest.hexdigest()


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[IO[bytes]]:
    """Write a file that gets its name, in place of an older one, only once it is whole.

    Args:
        path: the file, in a folder that exists.
        sync: whether it must be on the disk by then, so that the machine may fail at any time.

    Raises:
        OSError: it cannot be written; an older file is unchanged.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with open(part, "xb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def locked(path: Path) -> FileLock:
    """Return a lock file to hold in a `with`, which waits for other processes."""
    return FileLock(path)


@contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Hold a lock file and give True; give False at once where it is held already."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def lock_of(path: Path) -> Path:
    """Return the lock file of a file or folder, next to it."""
    return path.with_name(f"{path.name}.lock")


@contextmanager
def scratch(parent: Path, prefix: str = "") -> Iterator[Path]:
    """Create an empty folder `PREFIX*.part` in `parent`, and remove it at the end if it still has that name.

    It is locked as long as its process lives, so that `sweep` can distinguish it from what a killed process left.
    """
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"{prefix}{secrets.token_hex(6)}.part"
    with locked(lock_of(folder)):  # before the folder exists
        folder.mkdir()
        try:
            yield folder
        finally:
            _remove(folder)


def sweep(parent: Path, prefix: str = "") -> None:
    """Remove the scratch folders of processes that ended."""
    for folder in parent.glob(f"{glob.escape(prefix)}*.part"):
        with locked_if_free(lock_of(folder)) as free:
            if free:
                _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock_of(folder).unlink(missing_ok=True)
