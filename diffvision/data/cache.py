"""Whole shards on local disk: remote ones fetched, compressed ones unpacked, in a directory of bounded size.

Files are written beside their place and renamed, under a lock, so that any number of processes may share a cache; the
least recently used ones make room. A process that has a shard open keeps reading it after it has been removed.
"""

import bz2
import fcntl
import gzip
import hashlib
import lzma
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from diffvision.data.index import user_cache
from diffvision.data.sources import COMPRESSED, Shard

DEFAULT_BYTES = 100 * 10**9
_BLOCK = 1 << 20
_TRIES = 3
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class ShardCache:
    """A bounded directory of shards.

    Args:
        directory: where; by default the user's cache (`~/.cache/diffvision/shards`).
        max_bytes: room for shards; it should hold two shuffle windows, or shards are fetched more than once an epoch.
    """

    def __init__(self, directory: str | Path | None = None, max_bytes: int = DEFAULT_BYTES) -> None:
        self.directory = Path(directory) if directory else user_cache() / "shards"
        self.max_bytes = max_bytes

    def fetch(self, shard: Shard) -> Path:
        """The local, uncompressed copy of a shard, made now if need be.

        Raises:
            OSError: the shard cannot be read, is not what the manifest says, or does not fit.
        """
        path = self.directory / f"{_identity(shard)}-{_plain_name(shard.name)}"
        if not _touched(path):
            self.directory.mkdir(parents=True, exist_ok=True)
            with _locked(self.directory / f"{path.name}.lock"):
                if not _touched(path):
                    self._make(shard, path)
        return path

    def _make(self, shard: Shard, path: Path) -> None:
        for attempt in range(_TRIES):
            with tempfile.NamedTemporaryFile(dir=self.directory, suffix=".part", delete=False) as file:
                try:
                    self._copy(shard, file)
                    file.close()
                    self._make_room(os.path.getsize(file.name), keep=path)
                    os.replace(file.name, path)
                    return
                except (OSError, EOFError, lzma.LZMAError, _network_errors()) as error:
                    if attempt == _TRIES - 1 or isinstance(error, (_TooLarge, FileNotFoundError)):
                        raise OSError(f"cannot fetch shard {shard.location}: {error}") from error
                    time.sleep(0.5 * 4**attempt)
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(file.name)

    def _copy(self, shard: Shard, target: IO[bytes]) -> None:
        opener = _OPENERS.get(Path(shard.name).suffix)
        with _opened(shard) as file:
            raw = _Counted(file)
            source = opener(raw, "rb") if opener else raw
            written = 0
            while block := source.read(_BLOCK):
                written += target.write(block)
                if written > self.max_bytes:
                    raise _TooLarge(f"it is larger than the cache of {self.max_bytes:,} bytes")
                if opener and written > max(1 << 30, 200 * raw.count):
                    raise _TooLarge(f"it unpacks to more than {written:,} bytes")
            while raw.read(_BLOCK):  # what lies behind the compressed stream belongs to the checksum
                pass
        if shard.bytes is not None and raw.count != shard.bytes:
            raise OSError(f"{raw.count:,} bytes came, the manifest says {shard.bytes:,}")
        if shard.sha256 is not None and raw.sha256.hexdigest() != shard.sha256:
            raise OSError("its sha256 is not the manifest's")

    def _make_room(self, needed: int, keep: Path) -> None:
        with _locked(self.directory / "room.lock"):
            files = [(p, p.stat()) for p in self.directory.glob("*.tar") if p != keep]
            used = sum(stat.st_size for _, stat in files)
            for path, stat in sorted(files, key=lambda entry: entry[1].st_atime_ns):
                if used + needed <= self.max_bytes:
                    break
                path.unlink(missing_ok=True)
                (path.parent / ".index" / f"{path.name}.npz").unlink(missing_ok=True)
                (path.parent / f"{path.name}.lock").unlink(missing_ok=True)
                used -= stat.st_size


class _TooLarge(OSError):
    pass


class _Counted:
    """A stream that counts and hashes what is read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.count, self.sha256 = file, 0, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self.count += len(block)
        self.sha256.update(block)
        return block


def _opened(shard: Shard) -> Any:
    if not shard.remote:
        return open(shard.location, "rb")
    import fsspec

    try:
        return fsspec.open(shard.location, "rb")
    except ImportError as error:
        raise ValueError(f"{shard.location} needs a package that is not installed: {error}") from error


def _network_errors() -> type[Exception]:
    try:
        from aiohttp import ClientError
    except ImportError:
        return OSError
    return ClientError


def _identity(shard: Shard) -> str:
    """Names a shard and, where it can be told, its version."""
    version: object = shard.sha256
    if not shard.remote:
        stat = os.stat(shard.location)
        version = (stat.st_size, stat.st_mtime_ns)
    return hashlib.sha256(f"{shard.location} {version}".encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _plain_name(name: str) -> str:
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name.removesuffix(".tar")[-80:] + ".tar"


def _touched(path: Path) -> bool:
    """Whether the file is there; if so it is now the most recently used."""
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
