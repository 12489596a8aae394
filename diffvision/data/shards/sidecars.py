"""Small files about local shards, in the user's cache: their index, and notes of their sha256.

They are true as long as the file's size, times and inode are: a copy, even one that keeps its mtime, is read again.
What the disk changes without the file system after that is not noticed here; `diffvision data check` reads everything.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from diffvision.files import locked, replacing, sha256, user_cache


def sidecar(path: str | os.PathLike, ending: str) -> Path:
    """Return where a sidecar of a file is kept."""
    location = str(Path(path).absolute()).encode("utf-8", "surrogateescape")
    return user_cache("index") / f"{hashlib.sha256(location).hexdigest()[:32]}{ending}"


def write_sidecar(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a sidecar, as a whole; nothing is kept where the cache cannot be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            write(file)


def stamp(path: str | os.PathLike) -> str:
    """Return size, times and inode of a file, which are others once it was changed."""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def sha256_of(path: Path, progress: Callable[[], object] = lambda: None) -> str:
    """Return the sha256 of a local file, from its note or computed now, by one process of this machine at a time.

    Args:
        path: the file.
        progress: called with each MiB that is read.

    Raises:
        OSError: the file cannot be read.
    """
    if digest := _noted_sha256(path):
        return digest
    lock = sidecar(path, ".lock")
    with ExitStack() as stack:
        with suppress(OSError):  # without a lock file all processes compute it
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock))
        if not (digest := _noted_sha256(path)):
            since = stamp(path)
            digest = sha256(path, progress)
            note_sha256(path, since, digest)
        return digest


def note_sha256(path: Path, since: str, digest: str) -> None:
    """Note the sha256 of a file, unless its stamp is no longer `since`: it was written to meanwhile."""
    if stamp(path) == since:
        write_sidecar(sidecar(path, ".sha256"), lambda file: file.write(f"{since} {digest}".encode("ascii")))


def _noted_sha256(path: Path) -> str:
    """Return the sha256 that is noted of a file as it is now; "" where none is."""
    now = f"{stamp(path)} "
    with suppress(OSError, ValueError):
        text = sidecar(path, ".sha256").read_text("ascii")
        if text.startswith(now) and len(text) == len(now) + 64:
            return text.removeprefix(now)
    return ""
