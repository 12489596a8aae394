"""One shard, opened once: the version of its file, its index, and its members by offset.

The set of shards is in `storage`; the comparison of a file with what its shard must hold is in `expected`.
"""

import os
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.expected import RENAME, ExpectedShard
from diffvision.data.shards.index import ShardIndex, Version, correct_sidecars, scan, shard_index
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sources import Shard
from diffvision.data.shards.verify import sha256_of

_RETRY_AFTER = 30.0  # seconds before an unreadable shard is tried again; doubled each time, up to an hour
_MAX_RETRY_AFTER = 3600.0


@dataclass(frozen=True)
class _Opened:
    """An open file with the index of this version of it."""

    file: int
    version: Version
    index: ShardIndex
    close: weakref.finalize  # also when the reader is collected


class ShardReader:
    """Reads the members of one shard, which is opened, indexed and verified when it is first read.

    A file that changes afterwards is opened and verified anew. One that cannot be read is tried again later: after 30
    seconds, then twice as long each time, for giving up on a server takes minutes.

    Args:
        shard: with what its manifest says.
        cache: where remote and compressed shards are kept.
    """

    def __init__(self, shard: Shard, cache: ShardCache) -> None:
        self.expected, self._cache = ExpectedShard(shard, cache), cache
        self._opened: _Opened | None = None
        self._rejected = ""  # the reason, once the file is not the expected shard
        self._failures, self._unreadable_until = 0, 0.0

    def __getstate__(self) -> dict:
        # What was learnt about the file travels to other processes; the open file does not.
        return self.__dict__ | {"_opened": None, "_failures": 0, "_unreadable_until": 0.0}

    @property
    def shard(self) -> Shard:
        """The shard, with its pinned version where it has one."""
        return self.expected.shard

    @property
    def index(self) -> ShardIndex:
        """The index of the shard, which is opened if need be.

        Raises:
            BadSample: the shard cannot be read, or is not what its manifest says.
            ValueError: the shard was changed, and no manifest says what it should hold.
        """
        return self._open().index

    def members(self, row: int) -> "ShardMembers":
        """Return the members of one sample.

        Raises:
            BadSample: as `index`, or the shard ends before this sample.
            ValueError: as `index`.
        """
        index = self._open().index
        if row >= len(index):
            raise BadSample("truncated shard")
        return ShardMembers(self, index, row)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the shard, of the version that its index describes.

        Raises:
            BadSample: the file ends before them, or is no longer what its manifest says.
            ValueError: the shard was changed, and no manifest says what it should hold.
        """
        for _ in range(2):
            opened = self._open()
            if offset + size > opened.version.size:  # before memory is allocated for what a header says
                raise BadSample("truncated shard")
            try:
                data = os.pread(opened.file, size, offset)
                # After reading, or a change in between would go unnoticed.
                unchanged = self.expected.unchanged(opened.file, opened.version)
            except OSError as error:
                raise self._unreadable() from error
            if unchanged and len(data) == size:
                return data
            self.close()  # the next round opens and verifies it anew
        raise self._unreadable()

    def describe(self, row: int) -> str:
        """Return "shard: key" of a sample, or its row where the shard is not open."""
        if self._opened is None or row >= len(self._opened.index):
            return f"{self.shard.name}: sample {row}"
        return f"{self.shard.name}: {self._opened.index.key(row)}"

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @contextmanager
    def held(self) -> Iterator[Path]:
        """Hold the shard as a plain tar on local disk, fetched or unpacked now if need be.

        Raises:
            OSError: it cannot be fetched or unpacked.
        """
        if not self.expected.in_cache:
            yield Path(self.shard.location)
            return
        if not self.shard.pinned:  # its server did not answer at the start
            self.expected.shard = self._cache.pin(self.shard)
        with self._cache.held(self.shard) as path:
            yield path

    def prepare(self) -> None:
        """Fetch, unpack and verify the shard ahead of its use; any thread may call this."""
        with suppress(OSError), self.held() as path:  # the error is raised again where the shard is read
            shard = self.shard
            verifiable = shard.sha256 is not None and not self.expected.in_cache
            if verifiable and os.path.getsize(path) >= (shard.bytes or 0):
                sha256_of(path, self._cache.progress)  # which notes it

    def indexed(self) -> ShardIndex:
        """Index a shard that no manifest counts.

        Raises:
            ValueError: it cannot be read, is no tar, or has keys with dots.
        """
        location = self.shard.location
        try:
            with self.held() as path:
                index = shard_index(path)
        except OSError as error:
            raise ValueError(f"shard {location} cannot be read: {error}") from error
        self.expected.digest = index.digest
        if index.dotted:
            raise ValueError(f"shard {location} has keys with dots: {index.dotted}; {RENAME}")
        if index.hidden:
            warnings.warn(f"shard {location}: {index.hidden}; {RENAME}", stacklevel=4)
        if index.damage and not len(index):
            raise ValueError(f"shard {location} is not a tar file, or holds nothing: {index.damage}")
        return index

    def false_index(self, member: str) -> ValueError:
        """Return the error for a member that is not where the index says; false sidecars are replaced."""
        with self.held() as path:
            corrected = correct_sidecars(path, scan(path)) or ["the file was written to"]
        return ValueError(
            f"shard {self.shard.location} does not hold {member} where its index says: {'; '.join(corrected)}. See "
            "`diffvision data check`, then start or resume the run again"
        )

    def _open(self) -> _Opened:
        if self._opened is not None:
            return self._opened
        if self._rejected:
            raise BadSample(self._rejected)
        if time.monotonic() < self._unreadable_until:
            raise BadSample("unreadable shard")
        try:
            with self.held() as path:
                self._opened = self._verified(path)
        except OSError as error:
            raise self._unreadable() from error
        return self._opened

    def _verified(self, path: Path) -> _Opened:
        """Open a file and check that it is the expected shard."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            version, rejection = Version.of(file), None
            index = shard_index(path)
            try:
                self.expected.check(path, version, index)
            except BadSample as reason:
                rejection = reason
            if not self.expected.unchanged(path, version):
                raise OSError(f"{path} changes while it is opened")
            if rejection is not None:
                self._rejected = str(rejection)
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


class ShardMembers:
    """The members of one sample of a shard, read on demand."""

    def __init__(self, reader: ShardReader, index: ShardIndex, row: int) -> None:
        self._reader, self._index, self._row = reader, index, row

    @property
    def key(self) -> str:
        """The key of the sample."""
        return self._index.key(self._row)

    def types(self) -> list[str]:
        """Return the types of the members that can be read."""
        return self._index.members(self._row)

    def names(self) -> list[str]:
        """Return the sorted types of all members, including those that cannot be read."""
        return self._index.names(self._row)

    def size(self, member_type: str) -> int | None:
        """Return the bytes of a member, or None where the sample has no such member."""
        extent = self._index.extent(self._row, member_type)
        return None if extent is None else extent[1]

    def read(self, member_type: str, at_most: int) -> bytes:
        """Return the first `at_most` bytes of a member, after its header is compared with the index.

        Raises:
            KeyError: the sample has no such member.
            BadSample: the shard cannot be read, or ends before the member.
            ValueError: the header is not the indexed one, or the shard was changed and has no manifest.
        """
        extent = self._index.extent(self._row, member_type)
        if extent is None:
            raise KeyError(member_type)
        offset, size = extent
        header_size = self._index.head(self._row, member_type)
        data = self._reader.read(offset - header_size, header_size + min(size, at_most))
        if not self._index.matches(self._row, member_type, data[:header_size]):
            raise self._reader.false_index(f"{self.key}.{member_type}")
        return data[header_size:]
