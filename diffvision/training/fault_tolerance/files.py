"""Writing files that survive a kill and a full disk, and that no link redirects to another file.

What the files hold is not known here: see `records` and `checkpoints`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from torch import Tensor, nn


class HashingFile:
    """A file that is written to from its beginning to its end, and hashed on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error  # torch reports it as "unexpected pos"
            raise
        self.digest.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def write_file(path: Path, content: Callable[[Any], Any]) -> tuple[int, str]:
    """Write a new file and sync it to the disk; return its bytes and their sha256."""
    path.unlink(missing_ok=True)  # left by a killed run, or a link that came with the directory
    with path.open("xb") as file:
        hashing = HashingFile(file)
        try:
            content(hashing)
        except RuntimeError as error:
            raise hashing.error or error from error
        file.flush()
        os.fsync(file.fileno())
    return hashing.size, hashing.digest.hexdigest()


def open_for_writing(path: Path, flags: int) -> int:
    """Open a file for writing, and create it if it is missing; return its descriptor.

    Raises:
        OSError: it cannot be written, is no regular file, or is a link: then another file would be written to.
    """
    refuse_link(path)
    if path.exists() and not path.is_file():  # opening a FIFO may wait for ever
        raise OSError(errno.EINVAL, f"{path} is no regular file (a directory, FIFO or device): remove it")
    opened = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    if os.fstat(opened).st_nlink > 1:
        os.close(opened)
        raise OSError(errno.EMLINK, f"{path} has another name too (a hard link), and would be written to: remove it")
    return opened


def refuse_link(path: Path) -> None:
    """Raise OSError if a file that will be written to is a symbolic link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path} is a link to {os.readlink(path)}, which would be written to: remove it")


def sync_directory(directory: Path) -> None:
    """Sync a directory to the disk, because a power failure may otherwise undo a rename."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def explain_unwritable(error: OSError, path: Path, *, needed: int) -> OSError:
    """Return the error to raise where a checkpoint cannot be written: which, why, the bytes it takes and a remedy."""
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} are free"
    except OSError:
        free = "its directory cannot be read"
    return OSError(
        error.errno,
        f"no checkpoint can be written to {path}: {error.strerror or error}. It takes {needed:,} bytes and {free}: "
        "make room, or set another directory (ModelCheckpoint's dirpath). Checkpoints saved before are untouched",
    )


def tensor_bytes(content: Any) -> int:
    """Count the bytes of all tensors in nested containers, about what a checkpoint of them takes."""
    if isinstance(content, Tensor):
        return content.nbytes
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list | tuple) else ()
    return sum(map(tensor_bytes, values))


def module_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's weights, the least that a checkpoint of it takes."""
    return tensor_bytes([*module.parameters(), *module.buffers()])


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL, of a remote filesystem such as s3."""
    return "://" in str(path)
