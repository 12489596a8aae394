"""One shard, opened once: its file, compared with what it must hold, its index, and its samples by row.

The set of shards is in `storage`. The order in which samples are read is in `order`.
"""

import hashlib
import os
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from diffvision.data.shards.index import (
    MEMBER_TYPES,
    RENAME,
    ShardIndex,
    Version,
    scan,
    shard_index,
)
from diffvision.data.shards.remote import Shard, ShardCache, is_full
from diffvision.data.shards.sample import BadSample, Members
from diffvision.data.shards.sidecars import sha256_of

_RETRY_AFTER = 30.0  # seconds before an unreadable shard is tried again; doubled each time, up to an hour
_MAX_RETRY_AFTER = 3600.0
_MAX_GAP = 1 << 16  # bytes that are read for nothing rather than to read a sample's members one by one
_MAX_SAMPLE = 5 << 28  # bytes: a member of lines is at most 1 << 30
_END_BYTES = 1 << 16  # read at either end of a shard of which only a count is known, to distinguish it from others
_MISMATCH = "shard not as its manifest says"


@dataclass(frozen=True)
class _Opened:
    """An open file with the index of this version of it."""

    file: int
    version: Version
    index: ShardIndex
    close: weakref.finalize  # also when the reader is collected


class ShardReader:
    """Reads the samples of one shard, which is opened, indexed and verified when it is first read.

    A file that changes afterwards is opened and verified again. One that cannot be read is tried again later: after 30
    seconds, then twice as long each time, because giving up on a server takes minutes.

    Args:
        shard: with what its manifest says.
        cache: where remote and compressed shards are kept; it compares them with their manifest when they arrive.

    Attributes:
        shard: with what its manifest says.
        in_cache: whether the shard is read from the cache rather than from its location.
        content: (how the content is known, a digest of it), as of `count`.
    """

    def __init__(self, shard: Shard, cache: ShardCache) -> None:
        self.shard, self._cache, self.in_cache = shard, cache, cache.keeps(shard)
        self.content = ("", "")
        self._digest: str | None = None  # of the index that was first read, where no sha256 is known
        self._first: Version | None = None  # the version that was first seen
        if not self.in_cache:
            with suppress(OSError):  # the error is raised again where the shard is read
                self._first = Version.of(shard.location)
        self._verified: Version | None = None  # the version whose sha256 is the manifest's
        self._opened: _Opened | None = None
        self._rejection = ""  # why the file is not the expected shard, once it is not
        self._failures, self._unreadable_until = 0, 0.0

    def __getstate__(self) -> dict:
        # What was learnt about the file travels to other processes; the open file does not.
        return self.__dict__ | {"_opened": None, "_failures": 0, "_unreadable_until": 0.0}

    # ---- reading -----------------------------------------------------------------------------------------------------

    @property
    def index(self) -> ShardIndex:
        """The index of the shard, which is opened if need be.

        Raises:
            BadSample: the shard cannot be read, or is not what its manifest says.
            ValueError: the shard was changed, and no manifest says what it should hold.
        """
        return (self._opened or self._open()).index

    def read(self, row: int) -> Members:
        """Return the members of one sample, which lie next to each other in the tar and are read at once.

        A member is cut one byte after what `MEMBER_TYPES` allows its type; one of another type is there without bytes.

        Raises:
            BadSample: as `index`, or the sample is too large, or the shard ends before its end.
            ValueError: as `index`.
        """
        index = (self._opened or self._open()).index
        if row >= len(index.key_ends):
            raise BadSample("truncated shard")
        extents = []
        members: dict[str, bytes] = {}
        columns = (index.offsets[:, row].tolist(), index.sizes[:, row].tolist())
        for name, offset, size in zip(index.types, *columns, strict=True):
            if offset >= 0:
                members[name] = b""
                if limit := MEMBER_TYPES.get(name.rpartition(".")[2]):
                    extents.append((offset, offset + min(size, limit + 1), name))
        if not extents:
            return members
        extents.sort()
        first, end = extents[0][0], extents[-1][1]
        wanted = sum(stop - begin for begin, stop, _ in extents)
        if wanted > _MAX_SAMPLE:
            raise BadSample("sample too large")
        data = self.read_bytes(first, end - first) if end - first <= wanted + _MAX_GAP else None
        for begin, stop, name in extents:
            members[name] = self.read_bytes(begin, stop - begin) if data is None else data[begin - first : stop - first]
        return members

    def read_bytes(self, offset: int, size: int) -> bytes:
        """Return bytes of the shard, of the version that its index describes.

        Raises:
            BadSample: the file ends before them, or is no longer what its manifest says.
            ValueError: the shard was changed, and no manifest says what it should hold.
        """
        for _ in range(2):
            opened = self._opened or self._open()
            if offset + size > opened.version.size:  # before memory is allocated for what a header says
                raise BadSample("truncated shard")
            try:
                data = os.pread(opened.file, size, offset)
                # After reading, or a change in between would go unnoticed.
                status = os.stat(opened.file)
                version = (status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)
                unchanged = version == opened.version or self._is_unchanged(opened.file, opened.version)
            except OSError as error:
                raise self._unreadable() from error
            if unchanged and len(data) == size:
                return data
            self.close()  # the next round opens and verifies it again
        raise self._unreadable()

    def describe(self, row: int) -> str:
        """Return "shard: key" of a sample, or its row where the shard is not open."""
        if self._opened is None or row >= len(self._opened.index):
            return f"{self.shard.name}: sample {row}"
        return f"{self.shard.name}: {self._opened.index.key(row)}"

    # ---- opening -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @contextmanager
    def hold(self) -> Iterator[Path]:
        """Hold the shard as a plain tar on local disk, fetched or unpacked now if need be.

        Raises:
            OSError: it cannot be fetched or unpacked.
        """
        if not self.in_cache:
            yield Path(self.shard.location)
            return
        with self._cache.hold(self.shard) as path:
            yield path

    def prepare(self) -> None:
        """Fetch, unpack and verify the shard ahead of its use; any thread may call this."""
        with suppress(OSError), self.hold() as path:  # the error is raised again where the shard is read
            if not self.in_cache and self.shard.sha256 is not None and path.stat().st_size >= (self.shard.bytes or 0):
                sha256_of(path)  # which notes it

    def count(self) -> tuple[int, str]:
        """Return the number of samples, by the manifest or by indexing; and what is damaged behind them, or "".

        Raises:
            ValueError: without a manifest, the shard cannot be read, is no tar, or has keys with dots.
        """
        shard, count, damage = self.shard, self.shard.samples, ""
        if count is None:
            count, damage = self._index_uncounted()
        elif shard.bytes is not None and not shard.remote and (size := os.path.getsize(shard.location)) != shard.bytes:
            warnings.warn(
                f"shard {shard.shown} has {size:,} bytes, its manifest says {shard.bytes:,}: "
                "see `diffvision data check`",
                stacklevel=5,
            )
        self.content = self._content()
        return count, damage

    def _index_uncounted(self) -> tuple[int, str]:
        """Index a shard whose number of samples no manifest gives; return the number, and any damage."""
        location = self.shard.shown
        try:
            with self.hold() as path:
                index = shard_index(path)
        except OSError as error:
            raise ValueError(f"shard {location} cannot be read: {error}") from error
        self._digest = index.digest
        if index.dotted:
            raise ValueError(f"shard {location} has keys with dots: {index.dotted}; {RENAME}")
        if index.hidden:
            warnings.warn(f"shard {location}: {index.hidden}; {RENAME}", stacklevel=5)
        if index.damage and not len(index):
            raise ValueError(
                f"shard {location} must be a tar file with samples, got one with {index.damage}: fetch it again"
            )
        return len(index), f"{location} after {len(index)} samples: {index.damage}" if index.damage else ""

    def _open(self) -> _Opened:
        """Open the shard's file; a shard that was unreadable is tried again only after a pause."""
        if self._rejection:
            raise BadSample(self._rejection)
        if time.monotonic() < self._unreadable_until:
            raise BadSample("unreadable shard")
        try:
            with self.hold() as path:
                self._opened = self._open_verified(path)
        except OSError as error:
            if is_full(error):
                raise
            raise self._unreadable() from error
        return self._opened

    def _open_verified(self, path: Path) -> _Opened:
        """Open a file and check that it is the expected shard."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            version, rejection = Version.of(file), None
            index = shard_index(path)
            try:
                self._check(path, version, index)
            except BadSample as reason:
                rejection = reason
            if not self._is_unchanged(path, version):
                raise OSError(f"{path} changes while it is opened: wait until it is written")
            if rejection is not None:
                self._rejection = str(rejection)
                raise rejection
        except BaseException:
            os.close(file)
            raise
        close = weakref.finalize(self, os.close, file)
        close.atexit = False  # the process closes it
        return _Opened(file, version, index, close)

    def _unreadable(self) -> BadSample:
        """Put off the next try, and return the error of all samples until then."""
        self.close()
        pause = min(_MAX_RETRY_AFTER, _RETRY_AFTER * 2.0**self._failures)
        self._failures += 1
        self._unreadable_until = time.monotonic() + pause
        return BadSample("unreadable shard")

    # ---- comparing the file with what the shard must hold ------------------------------------------------------------

    def _check(self, path: Path, version: Version, index: ShardIndex) -> None:
        """Check a version of the file and its index.

        Raises:
            BadSample: it is not what its manifest says; none of its samples can be used.
            ValueError: it holds more samples than it should, was damaged before its manifest was written, or was
                changed and has no manifest.
            OSError: it cannot be read.
        """
        if index.dotted:
            raise BadSample(f"shard of keys with dots ({RENAME})")
        shard = self.shard
        if self._first is None:
            self._first = version
        changed = version[:2] != self._first[:2]  # a copy may keep size and mtime
        counted = len(index) if shard.samples is None else shard.samples
        reason = self._mismatch(path, version, index, changed=changed)
        if len(index) > counted and not (reason and changed):
            raise ValueError(
                f"shard {shard.shown} holds {len(index)} samples, its manifest or sizes.json says {counted}: write "
                "it again with diffvision.data.make.write_manifest"
            )
        if reason:
            raise BadSample(reason)
        if shard.sha256 is not None and index.damage and not index.cut:
            raise ValueError(
                f"shard {shard.shown} is damaged after {len(index)} samples, as when its manifest was written "
                f"({index.damage}): fetch it again, and write the manifest again"
            )
        if not index.damage and len(index) < counted:
            raise BadSample(f"{_MISMATCH} (samples)")

    def _mismatch(self, path: Path, version: Version, index: ShardIndex, *, changed: bool) -> str:
        """Return why the file is not the expected shard, or "" where it is."""
        shard = self.shard
        if self.in_cache:
            # The cache has compared it with its manifest; without one, its index must be the one first read.
            if self._digest not in (None, index.digest):
                raise self._changed()
        elif shard.sha256 is None:
            assert self._first is not None
            if changed or (version != self._first and not self._has_same_content(path)):
                raise self._changed()
            self._first = version
        elif self._verified != version:
            if version.size < (shard.bytes or 0):
                # A tar that was cut is used as far as it goes. One that is whole is another shard, and so may be one
                # that is being written now.
                return "" if index.cut and not changed else f"{_MISMATCH} (bytes)"
            if sha256_of(path) != shard.sha256:
                return f"{_MISMATCH} (sha256)"
            self._verified = version
        if shard.sha256 is None and self._digest is None:
            self._digest = index.digest
        return ""

    def _is_unchanged(self, file: int | Path, version: Version) -> bool:
        """Return whether a file still is this version; that an open file was removed changes its ctime alone."""
        now = Version.of(file)
        return now == version or (now[:3] == version[:3] and os.stat(file).st_nlink == 0)

    def _has_same_content(self, path: Path) -> bool:
        """Return whether another file of the same size and mtime holds what was first read, as far as that is known."""
        if self._digest is not None:
            return scan(path).digest == self._digest
        return self._content() == self.content

    def _content(self) -> tuple[str, str]:
        """Return the best available evidence of what the shard contains: its kind, and its value."""
        shard = self.shard
        if shard.sha256 is not None:
            return "sha256", shard.sha256
        if self._digest is not None:
            return "members", self._digest
        if not shard.remote:
            with suppress(OSError), open(shard.location, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest = hashlib.sha256(str(size).encode())
                for begin in (0, max(0, size - _END_BYTES)):
                    file.seek(begin)
                    digest.update(file.read(_END_BYTES))
                return "ends", digest.hexdigest()
        if shard.bytes is not None:  # as its server said
            return "sizes", f"{shard.name} {shard.bytes}"
        return "names", shard.name

    def _changed(self) -> ValueError:
        return ValueError(
            f"shard {self.shard.shown} was changed after it was first read, and no manifest says what it should "
            "hold: leave it alone during a run, or write a manifest (diffvision.data.make.write_manifest); then start "
            "the run again"
        )
