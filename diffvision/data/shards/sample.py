"""What one sample is to a loader: a dictionary of bytes, and the kinds of sample that are made of it.

Only protocols and the error of an unusable sample are here; `images` and `text` implement them.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

SampleId = tuple[int, int]
"""(shard number, row in that shard)."""
Members = Mapping[str, bytes]
"""The members of one sample by type, such as {"jpg": ..., "txt": ...}; empty bytes where a type is not read."""


class BadSample(Exception):
    """A sample that cannot be used; `str()` of it is the reason under which it is counted."""


class BadSource(ValueError):
    """What a dataset is to be made of is not there, or too little; `data make` adds where it comes from."""


class SampleKind(Protocol):
    """How samples become a batch: `images.samples` and `text.tokens.TokenSequence` implement it."""

    def decode(self, members: Members) -> Any:
        """Decode one sample; raise `BadSample` where it cannot be used."""
        ...

    def collate(self, items: list[Any]) -> Any:
        """Join decoded samples into a batch."""
        ...


class SampleSource:
    """Samples that a loader reads by (shard, row): the base of `ShardSet` and of `images.image_set.ImageSet`.

    Attributes:
        counts: the samples of each shard, int64 [shards].
        content: a digest of what the samples hold, as "how that is known:digest". Two of them can be compared if it is
            known in the same way.
    """

    counts: np.ndarray
    content: str

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.counts.sum())

    @property
    def fingerprint(self) -> str:
        """A digest of the shards' names and counts, wherever they lie and whatever they hold."""
        raise NotImplementedError

    @property
    def extra_counts(self) -> dict[str, int]:
        """Counts of what is in no sample, for reports."""
        return {}

    @property
    def sample_settings(self) -> dict[str, Any]:
        """Settings by which samples are divided, by their names in a configuration."""
        return {}

    def members(self, sample: SampleId) -> Members:
        """Return the members of one sample; raise `BadSample` where its shard cannot be used."""
        raise NotImplementedError

    def describe(self, sample: SampleId) -> str:
        """Return "shard: key" of a sample, for reports."""
        raise NotImplementedError

    def prepare(self, number: int) -> None:
        """Fetch and verify a shard ahead of its use, where it needs that; any thread may call this."""


def check_key(key: str, types: tuple[str, ...]) -> None:
    """Raise ValueError if a member key is of none of these types."""
    if key.rpartition(".")[2] not in types:
        raise ValueError(f"member {key!r} is of a type that is not read here: use one of {', '.join(types)}")
