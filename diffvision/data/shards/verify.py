"""The sha256 of a local shard: each version of a file is read whole once, and the result is noted.

`expected` compares it with the manifest.

The note lies next to the shard, or in the user's cache. It is true as long as the file's size, times and inode are: a
copy, even one that keeps its mtime, is read again. What the disk changes without the file system after that is not
noticed here; `diffvision data check` reads everything.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diffvision.data.shards.sidecars import read_sidecar, sidecars, write_sidecar
from diffvision.files import locked, sha256

_MAX_NOTE = 1 << 10  # bytes


def sha256_of(path: Path, progress: Callable[[], None] = lambda: None) -> str:
    """Return the sha256 of a local file, from its note or computed now, by one process of this machine at a time.

    Args:
        progress: called with each MiB that is read.

    Raises:
        OSError: the file cannot be read.
    """
    notes = sidecars(path.absolute(), ".sha256")
    if (known := _noted(notes, path)) is not None:
        return known
    with _one_process(notes[-1]):
        if (known := _noted(notes, path)) is not None:
            return known
        stamp = _stamp(path)
        digest = sha256(path, progress)
        if _stamp(path) == stamp:  # else it was written to meanwhile, and no note would be true
            _note(notes, f"{stamp} {digest}")
        return digest


def _stamp(path: Path) -> str:
    stat = os.stat(path)
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _noted(notes: list[Path], path: Path) -> str | None:
    stamp = _stamp(path)
    for note in notes:
        try:
            noted_stamp, _, digest = read_sidecar(note, _MAX_NOTE).decode("ascii").rpartition(" ")
        except (OSError, ValueError):
            continue
        if noted_stamp == stamp and len(digest) == 64:
            return digest
    return None


def _note(notes: list[Path], line: str) -> None:
    for note in notes:
        if write_sidecar(note, lambda file: file.write(line.encode("ascii"))):
            return


@contextmanager
def _one_process(note: Path) -> Iterator[None]:
    """Admit one process of this machine at a time; all of them at once where no lock file can be made."""
    lock = note.with_suffix(".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError:
        yield
        return
    with locked(lock):
        yield
