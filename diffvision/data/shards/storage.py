"""Random access to the samples of a set of shards, wherever they lie."""

import hashlib
import json
import os
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diffvision.data.images.decode import BadSample
from diffvision.data.images.samples import Members, caption_key, label_key
from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.index import ShardIndex, Version, correct_sidecars, scan, shard_index
from diffvision.data.shards.order import Sample
from diffvision.data.shards.sources import SIZES, Shard, find_shards
from diffvision.data.shards.verify import sha256_of

_OPEN_FILES = 64  # a few shuffle windows
_FEW = 16  # samples, to see what a data set has
_NAMED = 10  # damaged shards, in one message
RENAME = "rename the members, or pack the pictures anew with `diffvision data make folder`"
"""The remedy for names that are no keys."""
_ENDS = 1 << 16  # bytes at either end of a shard of which nothing but a count is known, to tell it from others
_NOT_AS_TOLD = "shard not as its manifest says"
_RETRY_AFTER = 30.0  # seconds before an unreadable shard is tried again; doubled each time, up to an hour


@dataclass(frozen=True)
class _Open:
    """A shard that is open: the index is that of this version of the file."""

    file: int
    version: Version
    index: ShardIndex


class ShardSet:
    """Shards with known counts, read by (shard, row).

    Args:
        source: a directory, a tar, a pattern, a URL, or a list of these; see `sources.find_shards`.
        cache: where remote and compressed shards are kept.

    Shards that no manifest counts are indexed now, which takes a second for some ten thousand samples, once.

    A file is believed as long as its size, mtime and inode stay; with a manifest, its ctime too. One that was changed
    is compared with its manifest again. Where there is none, reading it is an error, except for another file of the
    same size and mtime whose index is the same, such as a copy made with `cp -p`.

    Attributes:
        content: changes with what the shards hold, not with where they lie: "how that is known:digest". Two of them
            can be compared if it is known in the same way.

    Raises:
        ValueError: nothing there, a shard that is not a tar or is damaged, a refused URL; while reading, a shard that
            was changed and that no manifest describes, or whose index is false.
    """

    def __init__(self, source: str | Path | Sequence[str | Path | Shard], cache: ShardCache | None = None) -> None:
        self.cache = cache or ShardCache()
        self.shards = self.cache.pinned(find_shards(source))
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._unreadable: dict[int, float] = {}  # until when
        self._failures: Counter[int] = Counter()
        self._refused: dict[int, str] = {}  # why
        self._compared: dict[int, Version] = {}  # files that are what their manifest says
        self._first = {n: version for n in range(len(self.shards)) if (version := self._version(n)) is not None}
        self._indexed: dict[int, str] = {}  # digests of the indices, where no sha256 is known
        self.counts = np.array(self._counts(), dtype=np.int64)
        self._told = [self._told_content(number) for number in range(len(self.shards))]
        self.content = f"{'+'.join(sorted({kind for kind, _ in self._told}))}:{_digest(self._told)}"

    @property
    def caption_key(self) -> str:
        """The member that holds the caption, where no other is named: see `samples.caption_key`."""
        return self._key(caption_key) or "txt"

    @property
    def label_key(self) -> str:
        """The member that holds the class number, where no other is named: see `samples.label_key`."""
        return self._key(label_key) or "cls"

    def __len__(self) -> int:
        """Samples, as the manifests have it."""
        return int(self.counts.sum())

    def __getstate__(self) -> dict:
        # What was found out about the files travels; the files do not.
        return self.__dict__ | {"_open": OrderedDict(), "_unreadable": {}, "_failures": Counter()}

    def __del__(self) -> None:
        for opened in self.__dict__.get("_open", {}).values():
            os.close(opened.file)

    @property
    def beside(self) -> dict[str, int]:
        """Counts of what no sample holds, for reports."""
        return {}

    @property
    def fingerprint(self) -> str:
        """Changes with the shards' names and counts, not with where they lie or what they hold."""
        listing = [[shard.name, int(count)] for shard, count in zip(self.shards, self.counts, strict=True)]
        return _digest(listing)

    def in_cache(self, number: int) -> bool:
        """Whether a shard is read from the cache rather than where it lies."""
        return self.cache.keeps(self.shards[number])

    @contextmanager
    def held(self, number: int) -> Iterator[Path]:
        """A shard as a plain tar on local disk, which stays there meanwhile. It is fetched now if need be.

        Raises:
            OSError: that fails.
        """
        if not self.in_cache(number):
            yield Path(self.shards[number].location)
            return
        if not self.shards[number].pinned:  # its server did not answer at the start
            self.shards[number] = self.cache.pin(self.shards[number])
        with self.cache.held(self.shards[number]) as path:
            yield path

    def prepare(self, number: int) -> None:
        """Have a shard at hand, and compared with its manifest, before it is needed. Any thread may do it."""
        with suppress(OSError), self.held(number) as path:  # it shows again where the shard is read
            shard = self.shards[number]
            if shard.sha256 is not None and not self.in_cache(number) and os.path.getsize(path) >= (shard.bytes or 0):
                sha256_of(path, self.cache.progress)  # which notes it

    def index(self, number: int) -> ShardIndex:
        """The index of a shard, which is open then.

        Raises:
            BadSample, ValueError: as `members`.
        """
        return self._opened(number).index

    def members(self, sample: Sample) -> Members:
        """The members of one sample.

        Raises:
            BadSample: the shard cannot be read, is not what its manifest says, or ends before this sample.
            ValueError: the shard was changed, and no manifest says what it should hold.
        """
        number, row = sample
        index = self.index(number)
        if row >= len(index):
            raise BadSample("truncated shard")
        return ShardMembers(self, number, row, index)

    def first(self) -> list[Members]:
        """The first few samples of the first shard; none where it cannot be read."""
        with suppress(BadSample):
            return [self.members((0, row)) for row in range(min(_FEW, len(self.index(0))))]
        return []

    def _key(self, of: Callable[[Members], str | None]) -> str | None:
        """What most of the first samples have."""
        keys = Counter(key for members in self.first() if (key := of(members)) is not None)
        return keys.most_common(1)[0][0] if keys else None

    def describe(self, sample: Sample) -> str:
        """A sample as "shard: key", for reports."""
        number, row = sample
        name = self.shards[number].name
        opened = self._open.get(number)
        if opened is None or row >= len(opened.index):
            return f"{name}: sample {row}"
        return f"{name}: {opened.index.key(row)}"

    def pread(self, number: int, offset: int, size: int) -> bytes:
        """Bytes of a shard, of the version that its index is of.

        Raises:
            BadSample: they are not there, or the shard is no longer what its manifest says.
            ValueError: the shard was changed, and no manifest says what it should hold.
        """
        for _ in range(2):
            opened = self._opened(number)
            if offset + size > opened.version.size:  # or room would be made for what a header says
                raise BadSample("truncated shard")
            try:
                data = os.pread(opened.file, size, offset)
                unchanged = self._same_file(number, opened, opened.file)  # after reading: else it may come in between
            except OSError as error:
                raise self._unreadable_now(number) from error
            if unchanged and len(data) == size:
                return data
            self._close(number)  # to be opened anew, and compared with its manifest
        raise self._unreadable_now(number)

    def false_index(self, number: int, member: str) -> ValueError:
        """What to raise where a member is not where the index says. Sidecars that say so are made anew."""
        location = self.shards[number].location
        with self.held(number) as path:
            found = correct_sidecars(path, scan(path)) or ["the file was written to"]
        return ValueError(
            f"shard {location} does not hold {member} where its index says: {'; '.join(found)}. See `diffvision data "
            "check`, then start or resume the run again"
        )

    def _opened(self, number: int) -> _Open:
        if number in self._refused:
            raise BadSample(self._refused[number])
        self._check_readable(number)
        if number not in self._open:
            try:
                opened = self._open_anew(number)
            except OSError as error:
                raise self._unreadable_now(number) from error
            for old in _keep(self._open, number, opened):
                os.close(old.file)
        self._open.move_to_end(number)
        return self._open[number]

    def _open_anew(self, number: int) -> _Open:
        with self.held(number) as path:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                opened = _Open(file, Version.of(file), shard_index(path))
                reason = self._mismatch(number, path, opened)
                if not self._same_file(number, opened, path):
                    raise OSError(f"{path} changes while it is opened")
                if reason:
                    self._refused[number] = reason
                    raise BadSample(reason)
            except BaseException:
                os.close(file)
                raise
        return opened

    def _same_file(self, number: int, opened: _Open, file: int | Path) -> bool:
        """Whether a file is still the version that was opened.

        Its ctime counts where it can be compared with a manifest again; not in the cache, where each use of a file
        changes it, and not of an open file that was removed, for that changes it too.
        """
        version = Version.of(file)
        if version[:3] != opened.version[:3]:
            return False
        if version == opened.version or self.shards[number].sha256 is None or self.in_cache(number):
            return True
        return os.stat(file).st_nlink == 0

    def _close(self, number: int) -> None:
        os.close(self._open.pop(number).file)

    def _mismatch(self, number: int, path: Path, opened: _Open) -> str:
        """Why a shard must not be used, as the reason of a bad sample; nothing where it may be.

        Raises:
            ValueError: it holds more samples than it should, was damaged before its manifest was written, or was
                changed and nothing says what it should hold.
        """
        shard, index, version = self.shards[number], opened.index, opened.version
        if index.dotted:
            return f"shard of keys with dots ({RENAME})"
        changed = version[:2] != self._first.setdefault(number, version)[:2]  # a copy may keep these
        counted = len(index) if shard.samples is None else shard.samples
        reason = self._other(number, path, opened, changed=changed)
        if len(index) > counted and not (reason and changed):
            raise ValueError(
                f"shard {shard.location} holds {len(index)} samples, its manifest or sizes.json says {counted}: write "
                "it anew with diffvision.data.make.write_manifest"
            )
        if not reason and shard.sha256 is not None and index.damage and not index.cut:
            raise ValueError(
                f"shard {shard.location} is damaged after {len(index)} samples, and was so when its manifest was "
                f"written: {index.damage}; fetch it again and write the manifest anew"
            )
        if not reason and not index.damage and len(index) < counted:
            return f"{_NOT_AS_TOLD} (samples)"
        return reason

    def _other(self, number: int, path: Path, opened: _Open, *, changed: bool) -> str:
        """Why a shard is not the one that was meant; nothing where it is. ValueError where that cannot be known."""
        shard, index, version = self.shards[number], opened.index, opened.version
        if self.in_cache(number):
            # It was compared with its manifest when it came; without one, it has to be what was counted.
            if index.digest != self._indexed.get(number, index.digest):
                raise _changed(shard)
        elif shard.sha256 is None:
            if changed or (version.inode != self._first[number].inode and not self._same_content(number, path)):
                raise _changed(shard)
            self._first[number] = version
        elif self._compared.get(number) != version:
            if version.size < (shard.bytes or 0):
                # A tar that was cut is used as far as it goes. One that is whole is another, and so may be one that is
                # being written now.
                return "" if index.cut and not changed else f"{_NOT_AS_TOLD} (bytes)"
            if sha256_of(path, self.cache.progress) != shard.sha256:
                return f"{_NOT_AS_TOLD} (sha256)"
            self._compared[number] = version
        if shard.sha256 is None and number not in self._indexed:
            self._indexed[number] = index.digest
        return ""

    def _same_content(self, number: int, path: Path) -> bool:
        """Whether another file of the same size and mtime holds what was first read, as far as that is known. Its
        headers are read, for the sidecar may be of the first file."""
        if number in self._indexed:
            return scan(path).digest == self._indexed[number]
        return self._told_content(number) == self._told[number]

    def _version(self, number: int) -> Version | None:
        """Of a shard that is read where it lies; None where there is none."""
        if self.in_cache(number):
            return None
        try:
            return Version.of(self.shards[number].location)
        except OSError:
            return None  # it shows again where the shard is read

    def _told_content(self, number: int) -> tuple[str, str]:
        """(how it is known, what it is) of what a shard holds."""
        shard = self.shards[number]
        if shard.sha256 is not None:
            return "sha256", shard.sha256
        if number in self._indexed:
            return "members", self._indexed[number]
        if not shard.remote:
            with suppress(OSError), open(shard.location, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest = hashlib.sha256(str(size).encode())
                for begin in (0, max(0, size - _ENDS)):
                    file.seek(begin)
                    digest.update(file.read(_ENDS))
                return "ends", digest.hexdigest()
        if shard.bytes is not None:  # as its server said
            return "sizes", f"{shard.name} {shard.bytes}"
        return "names", shard.name

    def _unreadable_now(self, number: int) -> BadSample:
        """What its samples are until it is tried again: later each time, for to give up on a server takes minutes."""
        self._failures[number] += 1
        pause = min(3600.0, _RETRY_AFTER * 2.0 ** (self._failures[number] - 1))
        self._unreadable[number] = time.monotonic() + pause
        if number in self._open:
            self._close(number)
        return BadSample("unreadable shard")

    def _check_readable(self, number: int) -> None:
        if number in self._unreadable:
            if time.monotonic() < self._unreadable[number]:
                raise BadSample("unreadable shard")
            del self._unreadable[number]

    def _counts(self) -> list[int]:
        damaged: list[str] = []
        counts = [self._count(number, damaged) for number in range(len(self.shards))]
        if damaged:
            # No manifest says what is missing: to go on would be to train on less without a word.
            more = f"\n  and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
            listed = "".join(f"\n  {line}" for line in damaged[:_NAMED])
            raise ValueError(
                f"{len(damaged)} of {len(self.shards)} shards are damaged:{listed}{more}\n"
                "fetch or write them again (tars are joined with `tar --concatenate`, not with cat), or take them out "
                "of the data set (diffvision.data.make.write_manifest then lists what is good); to use what lies "
                f"before the damage, list the samples of every shard of the directory in {SIZES}"
            )
        return counts

    def _count(self, number: int, damaged: list[str]) -> int:
        shard = self.shards[number]
        if shard.samples is not None:
            self._warn_of_size(shard)
            return shard.samples
        try:
            with self.held(number) as path:
                index = shard_index(path)
        except OSError as error:
            raise ValueError(f"shard {shard.location} cannot be read: {error}") from error
        self._indexed[number] = index.digest
        if index.dotted:
            raise ValueError(f"shard {shard.location} has keys with dots: {index.dotted}; {RENAME}")
        if index.hidden:
            warnings.warn(f"shard {shard.location}: {index.hidden}; {RENAME}", stacklevel=4)
        if index.damage and not len(index):
            raise ValueError(f"shard {shard.location} is not a tar file, or holds nothing: {index.damage}")
        if index.damage:
            damaged.append(f"{shard.location} after {len(index)} samples: {index.damage}")
        return len(index)

    def _warn_of_size(self, shard: Shard) -> None:
        if shard.bytes is None or shard.remote:
            return
        size = os.path.getsize(shard.location)
        if size != shard.bytes:
            warnings.warn(
                f"shard {shard.location} has {size:,} bytes, its manifest says {shard.bytes:,}: "
                "see `diffvision data check`",
                stacklevel=5,
            )


class ShardMembers:
    """The members of one sample of a shard, read on demand."""

    def __init__(self, shards: ShardSet, number: int, row: int, index: ShardIndex) -> None:
        self._shards, self._number, self._row, self._index = shards, number, row, index

    @property
    def key(self) -> str:
        return self._index.key(self._row)

    def types(self) -> list[str]:
        return self._index.members(self._row)

    def names(self) -> list[str]:
        return self._index.names(self._row)

    def size(self, member_type: str) -> int | None:
        place = self._index.place(self._row, member_type)
        return None if place is None else place[1]

    def read(self, member_type: str, at_most: int) -> bytes:
        place = self._index.place(self._row, member_type)
        if place is None:
            raise KeyError(member_type)
        offset, size = place
        head = self._index.head(self._row, member_type)
        data = self._shards.pread(self._number, offset - head, head + min(size, at_most))
        if not self._index.matches(self._row, member_type, data[:head]):
            raise self._shards.false_index(self._number, f"{self.key}.{member_type}")
        return data[head:]


def _changed(shard: Shard) -> ValueError:
    return ValueError(
        f"shard {shard.location} was changed after it was first read, and no manifest says what it should hold: leave "
        "it alone during a run, or write a manifest (diffvision.data.make.write_manifest); then start the run again"
    )


def _digest(value: list) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _keep(kept: OrderedDict, key: int, value: _Open) -> list[_Open]:
    """Put a value into a bounded dictionary; returns what had to leave."""
    kept[key] = value
    return [kept.popitem(last=False)[1] for _ in range(len(kept) - _OPEN_FILES)]
