"""Files that processes share: the user's cache, locks, scratch folders, and files written whole or not at all."""

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import platformdirs

_BLOCK = 1 << 20
_PAUSE = 0.05  # seconds between two tries to lock


def user_cache(name: str) -> Path:
    """Return a file or folder of this package in the user's cache.

    Earlier versions had some of them in `$XDG_CACHE_HOME/diffvision` or `~/.cache/diffvision` on every system. What is
    only there stays in use. A user without a home folder, as in some containers, gets that of "/".
    """
    try:
        path = Path(platformdirs.user_cache_dir("diffvision"), name)
        former = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "diffvision", name)
    except RuntimeError:
        return Path("/.cache/diffvision", name)
    return former if former.exists() and not path.exists() else path


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


# ---- locks -----------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, *, shared: bool = False, timeout: float | None = None) -> Iterator[None]:
    """Wait for a lock file, which is created if need be, and hold it: exclusively, or with others that share it.

    It is not `filelock`'s, which cannot be shared, and does not notice that a file was removed while it was waited for.

    Raises:
        TimeoutError: another process held it for `timeout` seconds.
    """
    file = _lock(path, shared, timeout)
    try:
        yield
    finally:
        _unlock(file)


@contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Hold a lock file exclusively and give True; give False at once where another process holds it."""
    try:
        file = _lock(path, shared=False, timeout=0)
    except TimeoutError:
        yield False
        return
    try:
        yield True
    finally:
        _unlock(file)


def _lock(path: Path, shared: bool, timeout: float | None) -> int:
    """Return the descriptor of a lock file, locked; wait for at most `timeout` seconds, or for ever if None."""
    import fcntl  # not on Windows, where models can be used all the same

    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if timeout is None else fcntl.LOCK_NB)
    deadline = time.monotonic() + (timeout or 0)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, how)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(file)
                raise TimeoutError(f"{path} cannot be locked: another process has held it for {timeout} s") from None
            time.sleep(_PAUSE)
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was removed during the wait, and another file may have its name


def _unlock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)  # closing it would not do where a process was forked meanwhile
    os.close(file)


# ---- scratch folders -------------------------------------------------------------------------------------------------


@contextmanager
def scratch(parent: Path, prefix: str = "", mode: int = 0o777) -> Iterator[Path]:
    """Create an empty folder `PREFIX*.part` in `parent`, and remove it at the end if it still has that name.

    It is locked as long as its process lives, so that `sweep` can distinguish it from what a killed process left.
    """
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"{prefix}{secrets.token_hex(6)}.part"
    with locked(lock_of(folder)):  # before the folder exists
        folder.mkdir(mode)
        try:
            yield folder
        finally:
            _remove(folder)


def sweep(parent: Path, prefix: str = "") -> int:
    """Remove the scratch folders of processes that ended; return the bytes in the others."""
    total = 0
    for folder in list(parent.iterdir()):
        if folder.name.startswith(prefix) and folder.name.endswith(".part"):
            with locked_if_free(lock_of(folder)) as free:
                if free:
                    _remove(folder)
                else:
                    with suppress(FileNotFoundError):  # it has just been finished
                        total += sum(path.stat().st_size for path in folder.iterdir())
    return total


def lock_of(path: Path) -> Path:
    """Return the lock file of a file or folder, next to it."""
    return path.with_name(f"{path.name}.lock")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock_of(folder).unlink(missing_ok=True)
