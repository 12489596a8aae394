"""Small files about shards, next to them or in the user's cache; `index` and `verify` decide what is in them."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO

from diffvision.files import replacing, user_cache


def sidecars(path: Path, ending: str) -> list[Path]:
    """Return where a sidecar of a shard may lie: next to it, or in the user's cache where that cannot be written.

    If the folder next to the shard is a link, which may have come with the shards, it is not followed.
    """
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    folder, cache = path.parent / ".index", user_cache("index") / f"{digest}{ending}"
    return [cache] if folder.is_symlink() else [folder / f"{path.name}{ending}", cache]


def read_sidecar(path: Path, at_most: int) -> bytes:
    """Return the content of a sidecar.

    Raises:
        OSError: there is none, or it is a link, a pipe, a device or longer than `at_most` bytes.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > at_most:
            raise OSError(errno.EINVAL, "not a sidecar", str(path))
        return file.read(at_most)


def write_sidecar(path: Path, write: Callable[[IO[bytes]], object]) -> bool:
    """Replace a sidecar, as a whole, with what `write` writes; return False where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            write(file)
    except OSError:
        return False
    return True
