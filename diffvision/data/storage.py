"""Random access to the samples of a set of shards, wherever they lie."""

import hashlib
import json
import os
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diffvision.data.cache import ShardCache
from diffvision.data.decode import BadSample
from diffvision.data.index import ShardIndex, shard_index
from diffvision.data.order import Sample
from diffvision.data.samples import Members
from diffvision.data.sources import COMPRESSED, SIZES, Shard, find_shards

_OPEN_FILES = 64  # a few shuffle windows
_NAMED = 10  # damaged shards, in one message
_RETRY_AFTER = 30.0  # seconds before an unreadable shard is tried again


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
        self._unreadable: dict[int, tuple[float, str]] = {}
        self.counts = np.array(self._counts(), dtype=np.int64)

    def __len__(self) -> int:
        """Samples, as the manifests have it."""
        return int(self.counts.sum())

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_indices": OrderedDict(), "_files": OrderedDict(), "_unreadable": {}}

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
            BadSample: the shard cannot be read, or ends before this sample.
        """
        number, row = sample
        try:
            self._check_readable(number)
            index = self.index(number)
        except OSError as error:
            self._unreadable[number] = (time.monotonic() + _RETRY_AFTER, str(error))
            raise BadSample("unreadable shard") from error
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
            data = os.pread(self._files[number], size, offset)
        except OSError as error:
            self._unreadable[number] = (time.monotonic() + _RETRY_AFTER, str(error))
            raise BadSample("unreadable shard") from error
        if len(data) < size:
            raise BadSample("truncated shard")
        return data

    def _check_readable(self, number: int) -> None:
        if number in self._unreadable:
            until, reason = self._unreadable[number]
            if time.monotonic() < until:
                raise OSError(reason)
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
