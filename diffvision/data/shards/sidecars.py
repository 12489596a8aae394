"""Small files about local shards, next to them or in the user's cache: their index, and notes such as of a sha256.

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


def sidecars(path: Path, ending: str) -> list[Path]:
    """Return where a sidecar of a shard may lie: next to it, or in the user's cache where that cannot be written.

    If the folder next to the shard is a link, which may have come with the shards, it is not followed.
    """
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    folder, cache = path.parent / ".index", user_cache("index") / f"{digest}{ending}"
    return [cache] if folder.is_symlink() else [folder / f"{path.name}{ending}", cache]


def write_sidecar(places: list[Path], write: Callable[[IO[bytes]], object]) -> bool:
    """Replace a sidecar, as a whole, at the first place that can be written; return whether there is one."""
    for path in places:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                write(file)
            return True
    return False


def sha256_of(path: Path, progress: Callable[[], object] = lambda: None) -> str:
    """Return the sha256 of a local file, from its note or computed now, by one process of this machine at a time.

    Args:
        path: the file.
        progress: called with each MiB that is read.

    Raises:
        OSError: the file cannot be read.
    """
    if len(known := read_note(path, ".sha256")) == 64:
        return known
    lock = sidecars(path.absolute(), ".lock")[-1]
    with ExitStack() as stack:
        with suppress(OSError):  # without a lock file all processes compute it
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock))
        if len(known := read_note(path, ".sha256")) == 64:
            return known
        since = stamp(path)
        digest = sha256(path, progress)
        write_note(path, ".sha256", since, digest)
        return digest


def stamp(path: str | Path) -> str:
    """Return size, times and inode of a file, which are others once it was changed."""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def read_note(path: Path, ending: str) -> str:
    """Return what is noted of a file as it is now; "" where nothing is."""
    now = f"{stamp(path)} "
    for note in sidecars(path.absolute(), ending):
        with suppress(OSError, ValueError):
            if (text := note.read_text("ascii")).startswith(now):
                return text.removeprefix(now)
    return ""


def write_note(path: Path, ending: str, since: str, text: str) -> None:
    """Note an ASCII text about a file, unless its stamp is no longer `since`: it was written to meanwhile."""
    if stamp(path) == since:
        write_sidecar(sidecars(path.absolute(), ending), lambda file: file.write(f"{since} {text}".encode("ascii")))
