"""The order of an epoch's samples: a pure function of (seed, epoch), computed on integers, a window at a time.

Shards are permuted, then the samples of each window of consecutive shards are shuffled together. Only one window's
permutation is in memory, and any place in the epoch is reached without computing what lies before it.
"""

from typing import Protocol

import numpy as np

Sample = tuple[int, int]
"""(shard number, row in that shard)"""


class Order(Protocol):
    def __len__(self) -> int: ...

    def samples(self, start: int, stop: int) -> list[Sample]:
        """The samples at places start..stop-1 of the order."""
        ...


class SequentialOrder:
    """Shards and rows as they come, for evaluation."""

    def __init__(self, counts: np.ndarray) -> None:
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def samples(self, start: int, stop: int) -> list[Sample]:
        places = np.arange(start, stop)
        shards = np.searchsorted(self._ends, places, side="right")
        begins = np.concatenate(([0], self._ends))[shards]
        return list(zip(shards.tolist(), (places - begins).tolist(), strict=True))


class ShuffledOrder:
    """Shards permuted, then samples shuffled within windows of `window` shards.

    Args:
        counts: samples in each shard, int64 [shards].
        seed, epoch: all the randomness there is; the same two give the same order anywhere.
        window: shards shuffled together. Larger mixes better; smaller reads (and of remote shards keeps) less at once.
    """

    def __init__(self, counts: np.ndarray, seed: int, epoch: int, window: int = 16) -> None:
        if window < 1:
            raise ValueError(f"shuffle window is {window} shards: it must be at least 1")
        self._seed, self._epoch, self.window = seed, epoch, window
        self._shards = np.random.default_rng([seed, epoch, 0]).permutation(len(counts))
        self._counts = np.asarray(counts, dtype=np.int64)[self._shards]
        ends = np.cumsum(self._counts)
        self._window_ends = np.append(ends[window - 1 : -1 : window], ends[-1:])
        self._kept: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return int(self._window_ends[-1]) if len(self._window_ends) else 0

    def samples(self, start: int, stop: int) -> list[Sample]:
        found: list[Sample] = []
        while start < stop:
            number = self.window_at(start)
            begin = int(self._window_ends[number - 1]) if number else 0
            end = min(stop, int(self._window_ends[number]))
            shards, rows = self._shuffled(number)
            part = slice(start - begin, end - begin)
            found += zip(shards[part].tolist(), rows[part].tolist(), strict=True)
            start = end
        return found

    def window_at(self, place: int) -> int:
        """The number of the window that holds this place."""
        if not 0 <= place < len(self):
            raise IndexError(f"place {place} of an order of {len(self)} samples")
        return int(np.searchsorted(self._window_ends, place, side="right"))

    def window_shards(self, number: int) -> list[int]:
        """The shards of a window; none past the last one."""
        return self._shards[number * self.window : (number + 1) * self.window].tolist()

    def _shuffled(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if self._kept is None or self._kept[0] != number:
            part = slice(number * self.window, (number + 1) * self.window)
            counts = self._counts[part]
            shards = np.repeat(self._shards[part], counts)
            begins = np.repeat(np.cumsum(counts) - counts, counts)
            rows = np.arange(len(shards)) - begins
            shuffle = np.random.default_rng([self._seed, self._epoch, 1, number]).permutation(len(shards))
            self._kept = (number, shards[shuffle], rows[shuffle])
        return self._kept[1], self._kept[2]
