"""One shard, opened once: its file, compared with what it must hold, its index, and its samples by row.

The set of shards is in `storage`. The order in which samples are read is in `order`.
"""

import hashlib
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from diffvision.data.shards.index import MEMBER_TYPES, ShardIndex, shard_index
from diffvision.data.shards.remote import Shard, ShardCache, is_full
from diffvision.data.shards.sample import BadSample, Members
from diffvision.data.shards.sidecars import Version, sha256_of, version_of

_RETRY_AFTER = 60.0  # seconds before an unreadable shard is tried again: to give up on a server takes minutes
_END_BYTES = 1 << 16  # read at either end of a shard of which only a count is known, to distinguish it from others
_MAX_SAMPLE = 5 << 28  # bytes: a member of lines is at most 1 << 30
_REMEDY = "write it again with diffvision.data.write_manifest"


@dataclass(frozen=True)
class _Opened:
    """An open file with the index of this version of it."""

    file: int
    version: Version
    index: ShardIndex
    close: weakref.finalize  # also when the reader is collected


class ShardReader:
    """Reads the samples of one shard, which is opened, indexed and verified when it is first read.

    A file that changes afterwards is opened and verified again. One that cannot be read is tried again a minute later.

    Args:
        shard: with what its manifest says.
        cache: where remote shards are kept; it compares them with their manifest when they arrive.
    """

    def __init__(self, shard: Shard, cache: ShardCache) -> None:
        self.shard, self._cache = shard, cache
        self._digest: str | None = None  # of the index that was first read
        self._first: Version | None = None  # the version that was first seen
        if not self.shard.remote:
            with suppress(OSError):  # the error is raised again where the shard is read
                self._first = version_of(shard.location)
        self._opened: _Opened | None = None
        self._rejection = ""  # why the file is not the expected shard, once it is not
        self._unreadable_until = 0.0

    def __getstate__(self) -> dict:
        # What was learnt about the file travels to other processes; the open file does not.
        return self.__dict__ | {"_opened": None, "_unreadable_until": 0.0}

    @property
    def index(self) -> ShardIndex:
        """The index of the shard, which is opened if need be.

        Raises:
            BadSample: the shard cannot be read, or is not what its manifest says.
            ValueError: the shard was changed, and no manifest says what it should hold.
        """
        return (self._opened or self._open()).index

    def read(self, row: int) -> Members:
        """Return the members of one sample.

        A member is cut one byte after what `MEMBER_TYPES` allows its type; one of another type is there without bytes.

        Raises:
            BadSample: as `index`, or the shard ends before the sample's end.
            ValueError: as `index`.
        """
        for _ in range(2):
            opened = self._opened or self._open()
            try:
                members = _read(opened, row)
                # After reading, or a change in between would go unnoticed.
                if members is not None and _is_unchanged(opened.file, opened.version):
                    return members
            except OSError as error:
                raise self._unreadable() from error
            self.close()  # the next round opens and verifies it again
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
    def hold(self) -> Iterator[Path]:
        """Hold the shard as a plain tar on local disk, fetched now if need be; raise OSError if it cannot be."""
        if self.shard.remote:
            with self._cache.hold(self.shard) as path:
                yield path
        else:
            yield Path(self.shard.location)

    def prepare(self) -> None:
        """Fetch and verify the shard ahead of its use; any thread may call this."""
        with suppress(OSError), self.hold() as path:  # the error is raised again where the shard is read
            if not self.shard.remote and self.shard.sha256 is not None:
                sha256_of(path)  # which notes it

    def count(self) -> tuple[int, str]:
        """Return the number of samples, by the manifest or by indexing; and what is damaged behind them, or "".

        Raises:
            ValueError: without a manifest, the shard cannot be read.
        """
        if self.shard.samples is not None:
            return self.shard.samples, ""
        try:
            with self.hold() as path:
                index = shard_index(path)
        except OSError as error:
            raise ValueError(f"shard {self.shard.shown} cannot be read: {error}") from error
        self._digest = index.digest
        return len(index), index.damage and f"{self.shard.shown} after {len(index)} samples: {index.damage}"

    def content(self) -> tuple[str, str]:
        """Return how the shard's content is known, and a digest of it."""
        if self.shard.sha256 is not None:
            return "sha256", self.shard.sha256
        if self._digest is not None:
            return "index", self._digest
        if not self.shard.remote:
            with suppress(OSError), open(self.shard.location, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest = hashlib.sha256(str(size).encode())
                for begin in (0, max(0, size - _END_BYTES)):
                    file.seek(begin)
                    digest.update(file.read(_END_BYTES))
                return "ends", digest.hexdigest()
        return "sizes", f"{self.shard.name} {self.shard.bytes}"

    def _open(self) -> _Opened:
        """Open the shard's file and check that it is the expected shard."""
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
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            version, index = version_of(file), shard_index(path)
            rejection = self._check(path, version, index)
            if not _is_unchanged(path, version):
                raise OSError(f"{path} changes while it is opened: wait until it is written")
            if rejection:
                self._rejection = rejection
                raise BadSample(rejection)
        except BaseException:
            os.close(file)
            raise
        self._first, self._digest = None if self.shard.remote else version, index.digest
        close = weakref.finalize(self, os.close, file)
        close.atexit = False  # the process closes it
        return _Opened(file, version, index, close)

    def _unreadable(self) -> BadSample:
        """Put off the next try, and return the error of all samples until then."""
        self.close()
        self._unreadable_until = time.monotonic() + _RETRY_AFTER
        return BadSample("unreadable shard")

    def _check(self, path: Path, version: Version, index: ShardIndex) -> str:
        """Return why a version of the file is not the shard of its manifest, or "" where it is.

        Raises:
            ValueError: it was changed and has no manifest; its manifest was written of a damaged shard, or is wrong.
            OSError: it cannot be read.
        """
        shard, counted = self.shard, self.shard.samples
        if shard.sha256 is not None:
            is_other = not self.shard.remote and (version.size != shard.bytes or sha256_of(path) != shard.sha256)
            is_wrong = bool(index.damage) or len(index) != counted
        else:
            self._refuse_changed(version, index)
            is_other = counted is not None and not index.damage and len(index) < counted
            is_wrong = counted is not None and len(index) > counted
        if is_wrong and not is_other:
            raise ValueError(
                f"shard {shard.shown} must hold {counted} samples by its manifest or sizes.json, got {len(index)}"
                f"{index.damage and f' ({index.damage})'}: {_REMEDY}"
            )
        return "shard not as its manifest says" if is_other else ""

    def _refuse_changed(self, version: Version, index: ShardIndex) -> None:
        """Raise ValueError if a file without a manifest is neither what was first seen, nor a copy as by `cp -p`."""
        # The mode and links of a file may change before it is first opened.
        is_first = (self._first is None or version[:3] == self._first[:3]) and self._digest in (None, index.digest)
        is_copy = self._first is not None and version[:2] == self._first[:2] and self._digest == index.digest
        if not (is_first or is_copy):
            raise ValueError(
                f"shard {self.shard.shown} was changed during the run and has no manifest: leave it alone or "
                f"{_REMEDY}, and start again"
            )


def _read(opened: _Opened, row: int) -> Members | None:
    """Return the members of a sample, or None where fewer bytes came than the file has.

    Raises:
        BadSample: the file ends before them, or they are too large.
    """
    index = opened.index
    if row >= len(index.key_ends):
        raise BadSample("truncated shard")
    members: dict[str, bytes] = {}
    room = _MAX_SAMPLE
    columns = (index.offsets[:, row].tolist(), index.sizes[:, row].tolist())
    for name, offset, size in zip(index.types, *columns, strict=True):
        if offset >= 0:
            limit = MEMBER_TYPES.get(name.rpartition(".")[2])
            size = min(size, limit + 1) if limit else 0
            if offset + size > opened.version.size:  # before memory is allocated for what a header says
                raise BadSample("truncated shard")
            if (room := room - size) < 0:
                raise BadSample("sample too large")
            members[name] = os.pread(opened.file, size, offset) if size else b""
            if len(members[name]) != size:
                return None
    return members


def _is_unchanged(file: int | Path, version: Version) -> bool:
    """Return whether a file still is this version; that an open file was removed changes its ctime alone."""
    now = version_of(file)
    return now == version or (now[:3] == version[:3] and os.stat(file).st_nlink == 0)
