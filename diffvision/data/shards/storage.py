"""A set of shards, read by (shard, row): which shards there are, how many samples each has, what they hold.

Reading goes down from here to `reader.ShardReader`, a shard that is open.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from diffvision.data.shards.reader import ShardReader
from diffvision.data.shards.remote import Shard, ShardCache
from diffvision.data.shards.sample import BadSample, Members, SampleId, SampleSource
from diffvision.data.shards.sources import SIZES, find_shards

_MAX_OPEN = 64  # shards; a few shuffle windows
_FIRST_SAMPLES = 16  # that show which members the samples of a dataset have
_LISTED = 10  # damaged shards, in one message


class ShardSet(SampleSource):
    """Shards with known counts, read by (shard, row).

    Args:
        source: a directory, a tar, a pattern, a URL, or a list of these; see `sources.find_shards`.
        cache: where remote shards are kept.

    Shards that no manifest counts are indexed now, which takes a second for some ten thousand samples, once.

    A file is trusted as long as its size, times and inode stay. One that was changed is compared with its manifest
    again. Where there is none, reading it is an error, except for a copy with the same size, mtime and index.

    Raises:
        ValueError: no shards, a shard that is not a tar, is damaged or larger than the cache, a refused URL; while
            reading, a shard that was changed and that no manifest describes, or whose index is false.
        OSError: a server does not answer, or lacks a shard.
    """

    def __init__(self, source: str | Path | Sequence[str | Path | Shard], cache: ShardCache | None = None) -> None:
        self.cache = cache or ShardCache()
        self._readers = [ShardReader(shard, self.cache) for shard in self.cache.pin(find_shards(source))]
        self._used: OrderedDict[int, None] = OrderedDict()  # the shards that may be open, in the order of opening
        self.counts = np.array(self._count(), dtype=np.int64)
        contents = [reader.content() for reader in self._readers]
        self.content = f"{'+'.join(sorted({kind for kind, _ in contents}))}:{_digest(contents)}"

    @property
    def shards(self) -> list[Shard]:
        """The shards, in their fixed order."""
        return [reader.shard for reader in self._readers]

    @property
    def fingerprint(self) -> str:
        """A digest of the shards' names and counts, wherever they lie and whatever they hold."""
        return _digest([[shard.name, int(count)] for shard, count in zip(self.shards, self.counts, strict=True)])

    def reader(self, number: int) -> ShardReader:
        """Return the reader of a shard, which stays open until 64 others have been opened."""
        if number not in self._used:
            self._used[number] = None
            if len(self._used) > _MAX_OPEN:
                self._readers[self._used.popitem(last=False)[0]].close()
        return self._readers[number]

    def members(self, sample: SampleId) -> Members:
        """Return the members of one sample.

        Raises:
            BadSample: the shard cannot be read, is not what its manifest says, or ends before this sample.
            ValueError: the shard was changed, and no manifest says what it should hold.
        """
        number, row = sample
        return self.reader(number).read(row)

    def first(self) -> list[Members]:
        """Return the first few samples of the first shard; none where it cannot be read."""
        with suppress(BadSample):
            return [self.members((0, row)) for row in range(min(_FIRST_SAMPLES, len(self.reader(0).index)))]
        return []

    def describe(self, sample: SampleId) -> str:
        """Return "shard: key" of a sample, for reports; the row in place of the key where the index is not known."""
        number, row = sample
        return self._readers[number].describe(row)

    def prepare(self, number: int) -> None:
        """Fetch and verify a shard ahead of its use; any thread may call this."""
        self._readers[number].prepare()

    def _count(self) -> list[int]:
        """Return the number of samples of every shard; damaged shards without a manifest are refused."""
        counts, damages = zip(*(reader.count() for reader in self._readers), strict=True)
        if damaged := list(filter(None, damages)):
            # No manifest says what is missing: to continue would be to train on fewer samples unnoticed.
            listed = "".join(f"\n  {line}" for line in damaged[:_LISTED])
            raise ValueError(
                f"{len(damaged)} of {len(counts)} shards are damaged: fetch them again, remove them, or list the "
                f"samples of each shard in {SIZES}{listed}\njoin tars by `tar --concatenate`, not by cat"
            )
        return list(counts)


def _digest(value: list) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
