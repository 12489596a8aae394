"""Notes about shards, next to them or in the user's cache."""

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def user_cache() -> Path:
    """Where this user's derived files go: `$XDG_CACHE_HOME/diffvision`, by default `~/.cache/diffvision`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffvision"


def sidecars(path: Path, ending: str) -> list[Path]:
    """Where a note about a shard may lie: next to it, or in the user's cache where that cannot be written.

    A link in the place of the first folder, which may have come with the shards, is not followed.
    """
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    beside, cache = path.parent / ".index", user_cache() / "index" / f"{digest}{ending}"
    return [cache] if beside.is_symlink() else [beside / f"{path.name}{ending}", cache]


def read_sidecar(place: Path, at_most: int) -> bytes:
    """The content of a note.

    Raises:
        OSError: there is none, or it is a link, a pipe, a device or longer than `at_most` bytes.
    """
    with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > at_most:
            raise OSError(errno.EINVAL, "not a note", str(place))
        return file.read(at_most)


def write_sidecar(place: Path, write: Callable[[IO[bytes]], object]) -> bool:
    """Put what `write` writes in a note's place, whole; False where nothing can be written there."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, suffix=".part", delete=False) as file:
            try:
                write(file)
                file.close()
                os.replace(file.name, place)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError:
        return False
    return True
