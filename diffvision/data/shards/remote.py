"""Shards that are no plain tars on local disk: fetched by fsspec or unpacked, into a folder of bounded size.

A copy gets its name only once it is whole and as its manifest says; the least recently used copies make room. A process
that has a copy open keeps reading it after it was removed. Without a manifest, the version that a run began with (the
server's ETag, else time and size) is the only one that it reads.
"""

import bz2
import errno
import gzip
import hashlib
import logging
import lzma
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from diffvision.data.shards.sidecars import note_sha256, sha256_of, sidecar, stamp
from diffvision.files import lock_of, locked, locked_if_free, scratch, sha256, sweep, user_cache

REMOTE_SCHEMES = ("http", "https", "s3", "gs", "hf")
PLAIN = (".tar",)
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
DEFAULT_BYTES = 100 * 10**9

_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}  # by the first bytes
_REQUESTS = 16  # at a time, for the versions of shards
_SECRETS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)(?:[^/@\s]*@)?([^?\s'\"]*)(\?[^\s'\"]*)?")
_TRIES = 5
_PAUSE = 1.0  # seconds before the second try; doubled before each later one
_CONNECT, _READ = 20.0, 60.0  # seconds that a server may take to answer, and between two pieces
_AGAIN = (408, 425, 429)  # HTTP's ways to say: later; and all from 500 on
_VERSION_FIELDS = ("ETag", "Last-Modified", "LastModified", "generation", "blob_id", "size")  # of http, s3, gs, hf
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """A shard and what the manifest says of it; None where there is no manifest to say it.

    Attributes:
        version: of a remote or compressed shard, the one that is read in this run; see `ShardCache.pin`.
    """

    location: str
    samples: int | None = None
    bytes: int | None = None
    sha256: str | None = None
    version: str | None = None

    @property
    def name(self) -> str:
        """The file name."""
        return PurePosixPath(self.location).name

    @property
    def shown(self) -> str:
        """The location, for messages: without a URL's user, password and query."""
        return without_secrets(self.location)

    @property
    def remote(self) -> bool:
        """Whether the location is a URL."""
        return is_remote(self.location)


def is_remote(location: str) -> bool:
    """Return whether a location is a URL of an allowed scheme."""
    return location.partition("://")[0] in REMOTE_SCHEMES and "://" in location


def without_secrets(text: str) -> str:
    """Return a text whose URLs have no user, password and query."""
    return _SECRETS.sub(r"\1\2", text)


def is_full(error: BaseException) -> bool:
    """Return whether an error says that a disk is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def identity(shard: Shard) -> str:
    """Return a name of a shard and its version: that of its manifest or server, else of its file as it is now."""
    version = (shard.sha256 if shard.remote else None) or shard.version
    if version is None and not shard.remote:
        version = _stamp(shard.location)[0]
    return "".join(hashlib.sha256(str(part).encode()).hexdigest()[:16] for part in (shard.location, version))


def read(location: str) -> bytes | None:
    """Return the content of a small file at a URL, or None where there is none; raise OSError if it cannot be read."""
    try:
        return _with_retries(location, lambda files, path: files.cat_file(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError(f"{without_secrets(location)} cannot be read: {error}") from error


class ShardCache:
    """A bounded directory of shards, which any number of processes may share.

    Args:
        directory: the folder of the copies; by default in the user's cache (`~/.cache/diffvision/shards`).
        max_bytes: room for shards, including those being fetched; it should hold two shuffle windows, or shards are
            fetched more than once an epoch.
    """

    def __init__(self, directory: str | Path | None = None, max_bytes: int = DEFAULT_BYTES) -> None:
        self.directory = Path(directory) if directory else user_cache("shards")
        self.max_bytes = max_bytes

    def keeps(self, shard: Shard) -> bool:
        """Return whether a shard is read from this cache rather than from its location."""
        return shard.remote or shard.name.endswith(COMPRESSED)

    def pin(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return the shards, those that this cache keeps with the version and size that they have now.

        Raises:
            OSError: a server does not answer, or has no such file.
            ValueError: a shard is larger than this cache.
        """
        with ThreadPoolExecutor(_REQUESTS) as pool:
            pinned = list(pool.map(self._pin, shards))
        for shard in filter(self.keeps, pinned):
            if (shard.bytes or 0) > self.max_bytes:
                raise ValueError(
                    f"shard {shard.shown} has {shard.bytes:,} bytes: cache_bytes must be at least that, got "
                    f"{self.max_bytes:,}"
                )
        return pinned

    def check_room(self, shards: Sequence[Shard], at_once: int) -> None:
        """Warn if `at_once` shards that are in use together may not fit: each is then fetched again."""
        sizes = sorted((shard.bytes or 0 for shard in shards if self.keeps(shard)), reverse=True)
        if (needed := sum(sizes[:at_once])) > self.max_bytes:
            warnings.warn(
                f"cache_bytes should be at least {needed:,}, got {self.max_bytes:,}: shards will be fetched several "
                "times an epoch (or lower window)",
                stacklevel=3,
            )

    @contextmanager
    def hold(self, shard: Shard) -> Iterator[Path]:
        """Hold the plain local copy of a remote or compressed shard, made now if need be; later it may be removed.

        Raises:
            OSError: the shard cannot be read, is not what the manifest says, does not fit, or has another version now.
        """
        name = shard.name.removesuffix(next((e for e in COMPRESSED if shard.name.endswith(e)), ".tar"))
        path = self.directory / f"{identity(shard)}-{name[-80:]}.tar"
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(lock_of(path)):
            known = shard.bytes if shard.name.endswith(PLAIN) else None
            is_whole = path.is_file() and known in (None, path.stat().st_size)  # not cut by a crash of the machine
            if is_whole and known is not None and shard.sha256 is not None:
                is_whole = sha256_of(path) == shard.sha256
            if not is_whole:
                try:
                    self._make(shard, path)
                except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                    if is_full(error):
                        reason = f"the disk is full: make room, or lower cache_bytes, for shard {shard.shown}"
                        raise OSError(errno.ENOSPC, reason, str(self.directory)) from error
                    raise OSError(f"cannot fetch shard {shard.shown}: {without_secrets(str(error))}") from error
            os.utime(lock_of(path), ns=(time.time_ns(), time.time_ns()))  # of the last use
            yield path

    def _pin(self, shard: Shard) -> Shard:
        if not self.keeps(shard) or shard.version is not None or (shard.remote and shard.sha256 is not None):
            return shard
        try:
            version, size = _stamp(shard.location)
        except OSError as error:
            raise OSError(f"shard {shard.shown} cannot be read: {error}") from error
        return replace(shard, version=version, bytes=size if shard.bytes is None else shard.bytes)

    def _make(self, shard: Shard, path: Path) -> None:
        """Fetch, verify and unpack a shard in a scratch folder, and move it into place."""
        with scratch(self.directory) as folder:
            self._make_room(shard.bytes or 0)
            source = folder / "fetched" if shard.remote else Path(shard.location)

            def fetch(files: Any, location: str) -> None:
                files.get_file(location, str(source))
                _compare(shard, source)

            if shard.remote:
                _with_retries(shard.location, fetch)
            else:
                _compare(shard, source)
            whole = self._unpack(source, folder / "unpacked") if shard.name.endswith(COMPRESSED) else source
            if shard.version is not None and shard.sha256 is None and _stamp(shard.location)[0] != shard.version:
                raise OSError("it was replaced since this run began; start again, or give it a manifest")
            if whole.stat().st_size > self.max_bytes:
                raise OSError(f"it is larger than cache_bytes, {self.max_bytes:,}")
            self._make_room(0)
            os.replace(whole, path)
        if shard.sha256 is not None and shard.name.endswith(PLAIN):
            note_sha256(path, stamp(path), shard.sha256)  # which was compared: it is not read again

    def _unpack(self, source: Path, target: Path) -> Path:
        """Return the decompressed file; a server that calls the compression an encoding has sent it so."""
        with open(source, "rb") as file:
            start = file.read(8)
        opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), open)
        with opener(source, "rb") as packed, open(target, "wb") as file:
            while block := packed.read(1 << 20):
                if file.tell() + len(block) > self.max_bytes:
                    raise OSError(f"it unpacks to more than cache_bytes, {self.max_bytes:,}")
                file.write(block)
        return target

    def _make_room(self, coming: int) -> None:
        """Remove what killed processes left, then the least recently used copies that no process holds."""
        with locked(self.directory / "room.lock"):
            copies = list(self.directory.glob("*.tar"))
            used = sweep(self.directory) + coming + sum(path.stat().st_size for path in copies)
            last_use = {path: lock_of(path).stat().st_mtime_ns if lock_of(path).exists() else 0 for path in copies}
            for path in sorted(copies, key=last_use.__getitem__):
                if used <= self.max_bytes:
                    break
                with locked_if_free(lock_of(path)) as free:
                    if free:
                        used -= path.stat().st_size
                        notes = [sidecar(path, ending) for ending in (".npz", ".sha256", ".lock")]
                        for file in (path, *notes, lock_of(path)):
                            file.unlink(missing_ok=True)


def _compare(shard: Shard, path: Path) -> None:
    """Raise OSError if a file is not as the manifest says, or the server when the run began."""
    size = path.stat().st_size
    if shard.bytes not in (None, size):
        raise OSError(f"its size must be {shard.bytes:,} bytes, got {size:,}")
    if shard.sha256 is not None and sha256(path) != shard.sha256:
        raise OSError("its sha256 is not the manifest's")


def _stamp(location: str) -> tuple[str, int | None]:
    """Return a file's version and size: what its server says of its content, or the local file's `stamp`."""
    if not is_remote(location):
        return stamp(Path(location)), os.stat(location).st_size
    info = _with_retries(location, lambda files, path: files.info(path))
    fields = {name: str(info[name]).removeprefix("W/") for name in _VERSION_FIELDS if info.get(name) is not None}
    return " ".join(f"{name}={value}" for name, value in fields.items()), info.get("size")


def _with_retries(location: str, act: Callable[[Any, str], Any]) -> Any:
    """Return act(file system, path in it), tried again where that may help.

    Raises:
        FileNotFoundError, OSError: at once where the file is missing or refused, or a disk is full; else after the last
            try.
        ValueError: the URL's kind needs a package that is not installed.
    """
    import fsspec

    settings = {}
    if location.startswith("http"):
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_READ)
        settings = {"client_kwargs": {"timeout": timeout}}
    try:
        files, path = fsspec.core.url_to_fs(location, **settings)
    except ImportError as error:
        raise ValueError(f"{without_secrets(location)} needs a package that is not installed: {error}") from error
    for number in range(_TRIES):
        try:
            files.invalidate_cache(path)  # of what an earlier request said
            return act(files, path)
        except Exception as error:
            # fsspec raises FileNotFoundError for any failure to ask for a file over HTTP.
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            status = getattr(cause, "status", None)
            if isinstance(cause, FileNotFoundError) or status == 404:
                raise FileNotFoundError("it does not exist") from error
            if is_full(cause):
                raise
            is_refused = isinstance(status, int) and status < 500 and status not in _AGAIN
            message = without_secrets(str(cause)) or type(cause).__name__
            if is_refused or isinstance(cause, PermissionError) or number == _TRIES - 1:
                raise OSError(message) from error
            pause = _PAUSE * 2**number
            _log.warning("%s: %s; again in %.0f s", without_secrets(location), message, pause)
            time.sleep(pause)
    raise AssertionError
