"""Remote shards, fetched whole by fsspec into a folder of bounded size.

A copy gets its name only once it is whole and as its manifest says; the least recently used copies make room. A process
that has a copy open keeps reading it after it was removed. Without a manifest, the version that a run began with (the
server's ETag, else time and size) is the only one that it reads.
"""

import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from diffvision.data.shards.sidecars import note_sha256, sha256_of, sidecar, stamp
from diffvision.files import lock_of, locked, locked_if_free, sha256, user_cache

REMOTE_SCHEMES = ("http", "https", "s3", "gs", "hf")
TAR = ".tar"
DEFAULT_BYTES = 100 * 10**9

_REQUESTS = 16  # at a time, for the versions of shards
_SECRETS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)(?:[^/@\s]*@)?([^?\s'\"]*)(\?[^\s'\"]*)?")
_PAUSE, _LONGEST_PAUSE = 1.0, 8.0  # seconds before the second try and the fifth, the last one: each is doubled
_CONNECT, _READ = 20.0, 60.0  # seconds that a server may take to answer, and between two pieces
_RETRIED_STATUSES = (408, 425, 429)  # HTTP's ways to say: later; and all from 500 on
_VERSION_FIELDS = ("ETag", "Last-Modified", "LastModified", "generation", "blob_id", "size")  # of http, s3, gs, hf
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """A shard and what the manifest says of it; None where there is no manifest to say it.

    Attributes:
        version: of a remote shard, the one that is read in this run; see `ShardCache.pin`.
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
    version = (shard.sha256 or shard.version) if shard.remote else stamp(shard.location)
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

    def pin(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return the shards, remote ones without a sha256 with the version and size that they have now.

        Raises:
            OSError: a server does not answer, or has no such file.
            ValueError: a shard is larger than this cache.
        """
        with ThreadPoolExecutor(_REQUESTS) as pool:
            pinned = list(pool.map(_pin, shards))
        for shard in pinned:
            if shard.remote and (shard.bytes or 0) > self.max_bytes:
                raise ValueError(f"cache_bytes must hold {shard.shown}, {shard.bytes:,} bytes, got {self.max_bytes:,}")
        return pinned

    @contextmanager
    def hold(self, shard: Shard) -> Iterator[Path]:
        """Hold the local copy of a remote shard, made now if need be; later it may be removed.

        Raises:
            OSError: the shard cannot be read, is not what the manifest says, or has another version now.
        """
        path = self.directory / f"{identity(shard)}-{shard.name.removesuffix(TAR)[-80:]}{TAR}"
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(_lock(path)):
            # A crash of the machine may have cut it.
            is_whole = path.is_file() and shard.bytes in (None, path.stat().st_size)
            if not is_whole or shard.sha256 not in (None, sha256_of(path)):
                try:
                    self._fetch(shard, path)
                except OSError as error:
                    if is_full(error):
                        raise
                    raise OSError(f"cannot fetch shard {shard.shown}: {error}") from error
            os.utime(_lock(path), ns=(time.time_ns(), time.time_ns()))  # of the last use
            yield path

    def _fetch(self, shard: Shard, path: Path) -> None:
        """Fetch and verify a shard, and move it into place; the lock of its copy is held."""
        part = path.with_suffix(".part")

        def act(files: Any, location: str) -> None:
            files.get_file(location, str(part))
            if shard.bytes not in (None, size := part.stat().st_size):
                raise OSError(f"its size must be {shard.bytes:,} bytes, got {size:,}")
            if shard.sha256 is not None and sha256(part) != shard.sha256:
                raise OSError("its sha256 is not the manifest's")

        try:
            self._make_room(shard.bytes or 0)
            _with_retries(shard.location, act)
            if shard.version is not None and _version(shard.location)[0] != shard.version:
                raise OSError("it was replaced since this run began; start again, or give it a manifest")
            self._make_room(0)  # for what a server had not announced
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        if shard.sha256 is not None:
            note_sha256(path, shard.sha256)  # which was compared: it is not read again

    def _make_room(self, coming: int) -> None:
        """Remove the least recently used copies that no process holds, and what killed processes left."""
        with locked(self.directory / "room.lock"):
            sizes, last_use = {}, {}
            for path in [*self.directory.glob(f"*{TAR}"), *self.directory.glob("*.part")]:
                with suppress(FileNotFoundError):  # it has just been finished
                    sizes[path], last_use[path] = path.stat().st_size, _lock(path).stat().st_mtime_ns
            used = coming + sum(sizes.values())
            for path in sorted(sizes, key=last_use.__getitem__):
                if used <= self.max_bytes:
                    break
                with locked_if_free(_lock(path)) as is_free:
                    if is_free:
                        used -= sizes[path]
                        for file in (path, sidecar(path, ".npz"), sidecar(path, ".sha256")):
                            file.unlink(missing_ok=True)


def _lock(path: Path) -> Path:
    """Return the lock of a copy, which is also that of its `.part`."""
    return lock_of(path.with_suffix(TAR))


def _pin(shard: Shard) -> Shard:
    if not shard.remote or shard.version is not None or shard.sha256 is not None:
        return shard
    try:
        version, size = _version(shard.location)
    except OSError as error:
        raise OSError(f"shard {shard.shown} cannot be read: {error}") from error
    return replace(shard, version=version, bytes=size if shard.bytes is None else shard.bytes)


def _version(location: str) -> tuple[str, int | None]:
    """Return what a server says of a file's content, and its size."""
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

        settings = {"client_kwargs": {"timeout": ClientTimeout(sock_connect=_CONNECT, sock_read=_READ)}}
    try:
        files, path = fsspec.core.url_to_fs(location, **settings)
    except ImportError as error:
        raise ValueError(f"{without_secrets(location)} needs a package that is not installed: {error}") from error
    pause = _PAUSE
    while True:
        try:
            files.invalidate_cache(path)  # of what an earlier request said
            return act(files, path)
        except Exception as error:
            # fsspec raises FileNotFoundError for any failure to ask for a file over HTTP.
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            status = getattr(cause, "status", 500)
            if isinstance(cause, FileNotFoundError) or status == 404:
                raise FileNotFoundError("it does not exist") from error
            if is_full(cause):
                raise
            message = without_secrets(str(cause)) or type(cause).__name__
            is_refused = isinstance(cause, PermissionError) or (status < 500 and status not in _RETRIED_STATUSES)
            if is_refused or pause > _LONGEST_PAUSE:
                raise OSError(message) from error
            _log.warning("%s: %s; again in %.0f s", without_secrets(location), message, pause)
            time.sleep(pause)
            pause *= 2
