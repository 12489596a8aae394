"""Remote shards fetched, compressed ones unpacked: plain tars on local disk, in a directory of bounded size.

Files are written in a scratch folder and renamed, under a lock, so that any number of processes may share a cache; the
least recently used ones make room. A process that has a shard open keeps reading it after it has been removed.

What a shard holds must not change while its index is in use. So each shard has one version from the start of a run to
its end: the manifest's sha256, else what the server says of the file (ETag, Last-Modified, size), else a local file's
size and mtime. Another version is never read instead.
"""

import bz2
import gzip
import hashlib
import logging
import lzma
import os
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffvision.data.shards.remote import GivenUp, Patience, Progress, Refused, TooLarge, download, patiently, stamp
from diffvision.data.shards.sources import COMPRESSED, PLAIN, Shard
from diffvision.files import lock_of, locked, locked_if_free, scratch, sha256, sweep, user_cache

_log = logging.getLogger(__name__)
DEFAULT_BYTES = 100 * 10**9
_BLOCK = 1 << 20
_REQUESTS = 16  # at a time, for the versions of shards
_ALWAYS_UNPACKED = 1 << 28
_MAX_RATIO = 200  # of unpacked to compressed bytes, beyond that size
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class ShardCache:
    """A bounded directory of shards.

    Args:
        directory: the folder of the copies; by default in the user's cache (`~/.cache/diffvision/shards`).
        max_bytes: room for shards, including those being fetched; it should hold two shuffle windows, or shards are
            fetched more than once an epoch.
        patience: how long servers are waited for.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        max_bytes: int = DEFAULT_BYTES,
        patience: Patience = Patience(),  # noqa: B008  frozen
    ) -> None:
        self.directory = Path(directory) if directory else user_cache("shards")
        self.max_bytes, self.patience = max_bytes, patience

    progress: Callable[[], None] = staticmethod(lambda: None)
    """Called with each piece of a shard that arrives; a loader that waits for shards sets it."""

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "progress"}

    def keeps(self, shard: Shard) -> bool:
        """Return whether a shard is read from this cache rather than from its location."""
        return shard.remote or shard.name.endswith(COMPRESSED)

    def pin(self, shard: Shard) -> Shard:
        """Return the shard with its current version and size; a remote one's server gets one request.

        Raises:
            OSError: its server does not answer, or has no such file.
        """
        if not shard.remote:
            version, size = _version_on_disk(shard), os.path.getsize(shard.location)
        else:
            answer, size = stamp(shard.location, self.patience)  # type: ignore[assignment]
            version = _digest(answer)
        return replace(shard, version=version, bytes=size if shard.bytes is None else shard.bytes)

    def pin_all(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return the shards, those that this cache keeps pinned to a version, as far as their servers answer.

        Where a server does not answer, a copy in the cache is used, with one warning for all of them; without a copy
        the shard is returned as it is. A server that is silent is not asked for the next shard.

        Raises:
            ValueError: a shard that is larger than this cache.
        """
        silent: dict[str, OSError] = {}  # by server
        unknown: dict[str, str] = {}  # location of what was not compared -> why

        def ask(shard: Shard) -> Shard:
            """Ask a shard's server for its version; if it does not answer, take the newest copy."""
            server = "/".join(shard.location.split("/")[:3])
            try:
                if server in silent:
                    raise silent[server]
                shard = self.pin(shard)
                if shard.version == _digest("") and self._path(shard).exists():
                    unknown[shard.location] = "the server gives no ETag, Last-Modified or size"
            except OSError as error:
                if isinstance(error, GivenUp):
                    silent[server] = error
                if copies := self._copies(shard):
                    unknown[shard.location] = str(error)
                    return replace(shard, version=copies[-1].name[_DIGITS : 2 * _DIGITS])
            return shard

        open_ones = [shard for shard in shards if self.keeps(shard) and not shard.pinned]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            asked = dict(zip(open_ones, pool.map(ask, open_ones), strict=True))
        pinned = [asked.get(shard, shard) for shard in shards]
        if unknown:
            first, why = min(unknown.items())
            warnings.warn(
                f"{len(unknown)} of {len(shards)} shards could not be compared with what their server has now: the "
                f"copies in {self.directory} are used; first {first}: {why}",
                stacklevel=3,
            )
        if too_large := [shard for shard in pinned if self.keeps(shard) and (shard.bytes or 0) > self.max_bytes]:
            largest = max(too_large, key=lambda shard: shard.bytes or 0)
            raise ValueError(
                f"shard {largest.location} has {largest.bytes:,} bytes, and the cache of shards room for "
                f"{self.max_bytes:,}: give it more (cache_bytes)"
            )
        return pinned

    def check_room(self, shards: Sequence[Shard], at_once: int) -> None:
        """Warn if `at_once` shards that are in use together may not fit: each is then fetched again."""
        sizes = sorted((shard.bytes or 0 for shard in shards if self.keeps(shard)), reverse=True)
        if (needed := sum(sizes[:at_once])) > self.max_bytes:
            warnings.warn(
                f"the cache of shards has room for {self.max_bytes:,} bytes, and the {min(at_once, len(sizes))} shards "
                f"that are shuffled and fetched ahead together have up to {needed:,}: shards will be fetched or "
                f"unpacked several times an epoch; set cache_bytes to {needed:,} or more, or take a smaller window",
                stacklevel=3,
            )

    @contextmanager
    def hold(self, shard: Shard) -> Iterator[Path]:
        """Hold the local, uncompressed copy of a remote or compressed shard, made now if need be.

        After that it may be removed to make room for others.

        Raises:
            OSError: the shard cannot be read, is not what the manifest says, does not fit, or has another version now.
        """
        path = self._path(shard)
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(lock_of(path), shared=True):
            if present := _mark_used(shard, path):
                yield path
        if not present:
            with locked(lock_of(path)):
                if not _mark_used(shard, path):
                    self._make(shard, path)
                yield path

    def _path(self, shard: Shard) -> Path:
        return self.directory / f"{identity(shard)}-{_plain_name(shard.name)}"

    def _copies(self, shard: Shard) -> list[Path]:
        """Return the copies of any version of a shard, the latest last."""
        copies = self.directory.glob(f"{_digest(shard.location)}*.tar")
        return sorted(copies, key=lambda path: path.stat().st_mtime_ns)

    def _make(self, shard: Shard, path: Path) -> None:
        """Put a shard into the cache, with retries if it is remote."""
        try:
            if shard.remote:
                patiently(lambda deadline: self._try(shard, path, deadline), shard.location, self.patience)
            else:
                self._try(shard, path, deadline=float("inf"))
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise OSError(f"cannot fetch shard {shard.location}: {error}") from error

    def _try(self, shard: Shard, path: Path, deadline: float) -> None:
        """Fetch, verify and unpack a shard in a scratch folder, and move it into place."""
        with scratch(self.directory) as folder:
            if shard.bytes is not None:
                self._make_room(shard.bytes)
            whole = self._unpack(shard, self._fetch_verified(shard, folder, deadline), folder)
            if not shard.remote:
                self._check_version(shard)  # only now: it was being read until here
            self._make_room(0)
            if path.is_dir():
                shutil.rmtree(path)
            os.replace(whole, path)

    def _check_version(self, shard: Shard) -> None:
        """Raise `Refused` if the shard no longer has the pinned version, so that another one may have been read."""
        if shard.version is None or shard.sha256 is not None:
            return
        if shard.remote:
            now = _digest(stamp(shard.location, self.patience)[0])
        else:
            now = _version_on_disk(shard)
        if now != shard.version:
            _log.warning(
                "%s was replaced since this run began: what it holds now is not what was counted, so its samples are "
                "left out; start again to read it, and give it a manifest",
                shard.location,
            )
            raise Refused("it was replaced since this run began")

    def _fetch_verified(self, shard: Shard, folder: Path, deadline: float) -> Path:
        """Return a local file of the shard's bytes, compared with the manifest as far as it goes."""
        path = Path(shard.location)
        if shard.remote:
            path = folder / "download"
            progress = Progress(shard.location, self.max_bytes, deadline, self.progress)
            download(shard.location, str(path), progress, self.patience)
            self._check_version(shard)
        size = path.stat().st_size
        if shard.bytes is not None and size != shard.bytes:
            expected = "it had when the run began" if shard.version and not shard.sha256 else "the manifest says"
            raise OSError(f"{size:,} bytes {'came' if shard.remote else 'there'}, {expected} {shard.bytes:,}")
        if shard.sha256 is not None and sha256(path) != shard.sha256:
            raise OSError("its sha256 is not the manifest's")
        return path

    def _unpack(self, shard: Shard, path: Path, folder: Path) -> Path:
        """Decompress a shard; one that grows beyond a limit is refused."""
        opener = _OPENERS.get(Path(shard.name).suffix)
        if opener is None:
            return path
        ratio = max(_ALWAYS_UNPACKED, _MAX_RATIO * path.stat().st_size)
        limit, reason = min((ratio, f"over {_MAX_RATIO} times its size"), (self.max_bytes, "the cache's room"))
        unpacked, written = folder / "unpacked", 0
        with opener(path, "rb") as source, open(unpacked, "wb") as target:
            while block := source.read(_BLOCK):
                written += target.write(block)
                if written > limit:
                    raise TooLarge(
                        f"it unpacks to more than {limit:,} bytes, {reason}: if it should, unpack it yourself and give "
                        "the .tar"
                    )
        return unpacked

    def _make_room(self, coming: int) -> None:
        """Remove what killed processes left, then the least recently used shards that no process holds.

        It stops as soon as the others, what is being fetched and the `coming` bytes are within `max_bytes`.
        """
        with locked(self.directory / "room.lock"):
            files = [(path, path.stat()) for path in self.directory.glob("*.tar")]
            used = sweep(self.directory) + coming + sum(stat.st_size for _, stat in files)
            for path, stat in sorted(files, key=lambda entry: entry[1].st_atime_ns):
                if used <= self.max_bytes:
                    break
                with locked_if_free(lock_of(path)) as free:
                    if free:
                        path.unlink(missing_ok=True)
                        (path.parent / ".index" / f"{path.name}.npz").unlink(missing_ok=True)
                        lock_of(path).unlink(missing_ok=True)
                        used -= stat.st_size


def identity(shard: Shard) -> str:
    """Return a name of a shard and its version: that of its manifest or server, else of its file as it is now."""
    version = shard.version or (_digest(shard.sha256) if shard.remote else _version_on_disk(shard))
    return _digest(shard.location) + version


_DIGITS = 16


def _digest(text: object) -> str:
    return hashlib.sha256(str(text).encode("utf-8", "surrogateescape")).hexdigest()[:_DIGITS]


def _version_on_disk(shard: Shard) -> str:
    stat = os.stat(shard.location)
    return _digest(f"{stat.st_size} {stat.st_mtime_ns}")


def _plain_name(name: str) -> str:
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name.removesuffix(".tar")[-80:] + ".tar"


def _mark_used(shard: Shard, path: Path) -> bool:
    """Return whether the file is there, of the size that is known; if so, make it the most recently used one."""
    if not path.is_file():
        return False
    status = path.stat()
    if shard.name.endswith(PLAIN) and shard.bytes not in (None, status.st_size):
        return False  # cut by a crash of the machine
    os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
    return True
