"""Random access to the samples of a set of shards, wherever they lie."""

import hashlib
import json
import os
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from diffvision.data.cache import ShardCache
from diffvision.data.decode import BadSample
from diffvision.data.index import ShardIndex, shard_index
from diffvision.data.order import Sample
from diffvision.data.samples import Members
from diffvision.data.sources import COMPRESSED, SIZES, Shard, find_shards
from diffvision.data.verify import sha256_of

_OPEN_FILES = 64  # a few shuffle windows
_NAMED = 10  # damaged shards, in one message
_RETRY_AFTER = 30.0  # seconds before an unreadable shard is tried again; doubled each time, up to an hour


class ShardSet:
    """Shards with known counts, read by (shard, row).

    Args:
        source: a directory, a tar, a brace pattern, a URL, or a list of these; see `sources.find_shards`.
        cache: where remote and compressed shards are kept.

    Shards whose counts no manifest tells are indexed now, which takes a second for some ten thousand samples, once.

    Raises:
        ValueError: nothing there, a shard that is not a tar or is damaged, a refused URL.
    """

    def __init__(self, source: str | Path | Sequence[str | Path], cache: ShardCache | None = None) -> None:
        self.cache = cache or ShardCache()
        self.shards = find_shards(source)
        self._indices: OrderedDict[int, ShardIndex] = OrderedDict()
        self._files: OrderedDict[int, int] = OrderedDict()
        self._unreadable: dict[int, float] = {}  # until when
        self._failures: Counter[int] = Counter()
        self._differs: dict[int, bool] = {}
        self.counts = np.array(self._counts(), dtype=np.int64)

    caption_key = "txt"
    """The member that holds the caption, where no other is named."""

    def __len__(self) -> int:
        """Samples, as the manifests have it."""
        return int(self.counts.sum())

    def __getstate__(self) -> dict:
        own: dict = {"_indices": OrderedDict(), "_files": OrderedDict(), "_unreadable": {}, "_failures": Counter()}
        return self.__dict__ | own

    def __del__(self) -> None:
        for file in self.__dict__.get("_files", {}).values():
            os.close(file)

    @property
    def beside(self) -> dict[str, int]:
        """Counts of what no sample holds, for reports."""
        return {}

    @property
    def fingerprint(self) -> str:
        """Changes with the shards' names and counts, not with where they lie."""
        listing = [[shard.name, int(count)] for shard, count in zip(self.shards, self.counts, strict=True)]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]

    def in_cache(self, number: int) -> bool:
        """Whether a shard is read from the cache rather than where it lies."""
        return self.shards[number].remote or self.shards[number].name.endswith(COMPRESSED)

    def path(self, number: int) -> Path:
        """A shard as a plain tar on local disk. Fetches it if need be (then OSError where that fails)."""
        shard = self.shards[number]
        return self.cache.fetch(shard) if self.in_cache(number) else Path(shard.location)

    def prepare(self, number: int) -> None:
        """Have a shard at hand, and compared with its manifest, before it is needed. Any thread may do it."""
        with suppress(OSError):  # it shows again where the shard is read
            self._as_the_manifest_says(number, self.path(number))

    def index(self, number: int) -> ShardIndex:
        if number not in self._indices:
            shard = self.shards[number]
            index = shard_index(self.path(number))
            if shard.samples is not None and len(index) > shard.samples:
                raise ValueError(
                    f"shard {shard.location} holds {len(index)} samples, its manifest or sizes.json says "
                    f"{shard.samples}: write it anew with diffvision.data.make.write_manifest"
                )
            _keep(self._indices, number, index)
        self._indices.move_to_end(number)
        return self._indices[number]

    def members(self, sample: Sample) -> Members:
        """The members of one sample.

        Raises:
            BadSample: the shard cannot be read, is not what its manifest says, or ends before this sample.
        """
        number, row = sample
        try:
            self._check_readable(number)
            index = self.index(number)
            if number not in self._differs:
                self._differs[number] = not self._as_the_manifest_says(number, self.path(number))
        except OSError as error:
            raise self._unreadable_now(number) from error
        if self._differs[number]:
            raise BadSample("shard not as its manifest says (sha256)")
        if row >= len(index):
            raise BadSample("truncated shard")
        return ShardMembers(self, number, row, index)

    def describe(self, sample: Sample) -> str:
        """A sample as "shard: key", for reports."""
        number, row = sample
        name = self.shards[number].name
        index = self._indices.get(number)
        return f"{name}: {index.key(row)}" if index is not None and row < len(index) else f"{name}: sample {row}"

    def pread(self, number: int, offset: int, size: int) -> bytes:
        try:
            if number not in self._files:
                for old in _keep(self._files, number, os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC)):
                    os.close(old)
            self._files.move_to_end(number)
            if offset + size > os.fstat(self._files[number]).st_size:  # or room would be made for what a header says
                raise BadSample("truncated shard")
            data = os.pread(self._files[number], size, offset)
        except OSError as error:
            raise self._unreadable_now(number) from error
        if len(data) < size:
            raise BadSample("truncated shard")
        return data

    def _as_the_manifest_says(self, number: int, path: Path) -> bool:
        """Whether its sha256 is the manifest's. A shard that is shorter was cut: its index tells what is left of it,
        and that is used. What the cache holds was compared when it came."""
        shard = self.shards[number]
        if shard.sha256 is None or self.in_cache(number) or path.stat().st_size < (shard.bytes or 0):
            return True
        return sha256_of(path, self.cache.progress) == shard.sha256

    def _unreadable_now(self, number: int) -> BadSample:
        """What its samples are until it is tried again: later each time, for to give up on a server takes minutes."""
        self._failures[number] += 1
        pause = min(3600.0, _RETRY_AFTER * 2.0 ** (self._failures[number] - 1))
        self._unreadable[number] = time.monotonic() + pause
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
                "fetch or write them again, or take them out of the data set (diffvision.data.make.write_manifest "
                "then lists what is good); to use what lies before the damage, list the samples of every shard of "
                f"the directory in {SIZES}"
            )
        return counts

    def _count(self, number: int, damaged: list[str]) -> int:
        shard = self.shards[number]
        if shard.samples is not None:
            self._warn_of_size(shard)
            return shard.samples
        try:
            index = shard_index(self.path(number))
        except OSError as error:
            raise ValueError(f"shard {shard.location} cannot be read: {error}") from error
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

    def size(self, member_type: str) -> int | None:
        place = self._index.place(self._row, member_type)
        return None if place is None else place[1]

    def read(self, member_type: str, at_most: int) -> bytes:
        place = self._index.place(self._row, member_type)
        if place is None:
            raise KeyError(member_type)
        offset, size = place
        return self._shards.pread(self._number, offset, min(size, at_most))


def _keep(kept: OrderedDict, key: int, value: object) -> list:
    """Put a value into a bounded dictionary; returns what had to leave."""
    kept[key] = value
    return [kept.popitem(last=False)[1] for _ in range(len(kept) - _OPEN_FILES)]
