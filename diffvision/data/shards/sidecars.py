"""Small files about local shards, in the user's cache: their index, and notes of their sha256.

They are true as long as the file's size, times and inode are: a copy, even one that keeps its mtime, is read again.
What the disk changes without the file system after that is not noticed here; `diffvision data check` reads everything.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, NamedTuple

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


class Version(NamedTuple):
    """What changes whenever a file is written to or replaced; `ctime_ns` also with its mode and links."""

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int


def version_of(file: int | str | os.PathLike) -> Version:
    """Return the version of an open file or of a path."""
    status = os.stat(file)
    return Version(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def stamp(path: str | os.PathLike) -> str:
    """Return the version of a file as text."""
    return " ".join(map(str, version_of(path)))


def sha256_of(path: Path, progress: Callable[[], object] = lambda: None) -> str:
    """Return the sha256 of a local file, from its note or computed now, by one process of this machine at a time.

    Args:
        path: the file.
        progress: called with each MiB that is read.

    Raises:
        OSError: the file cannot be read.
    """
    note = sidecar(path, ".sha256")
    with ExitStack() as stack:
        with suppress(OSError):  # without a lock file all processes compute it
            note.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(sidecar(path, ".lock")))
        since = stamp(path)
        with suppress(OSError, ValueError):
            noted, _, digest = note.read_text("ascii").rpartition(" ")
            if noted == since and len(digest) == 64:
                return digest
        digest = sha256(path, progress)
        if stamp(path) == since:  # else it was written to meanwhile
            note_sha256(path, digest)
        return digest


def note_sha256(path: Path, digest: str) -> None:
    """Note the sha256 of a file as it is now."""
    note = f"{stamp(path)} {digest}".encode("ascii")
    write_sidecar(sidecar(path, ".sha256"), lambda file: file.write(note))
