"""The order of an epoch's samples: a pure function of (seed, epoch), computed on integers, a window at a time.

Shards are permuted, then the samples of each window of consecutive shards are shuffled together. Only one window's
permutation is in memory, and any position in the epoch is reached without computing what lies before it. Nothing is
read here.
"""

import numpy as np

from diffvision.data.shards.sample import SampleId


class SequentialOrder:
    """Shards and rows as they come, for evaluation."""

    def __init__(self, counts: np.ndarray, epoch: int = 0) -> None:
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def samples(self, start: int, stop: int) -> list[SampleId]:
        """Return the samples at positions start..stop-1 of the order."""
        positions = np.arange(start, stop)
        shards = np.searchsorted(self._ends, positions, side="right")
        begins = np.concatenate(([0], self._ends))[shards]
        return list(zip(shards.tolist(), (positions - begins).tolist(), strict=True))


class ShuffledOrder:
    """Shards permuted, then samples shuffled within windows of `window` shards.

    Args:
        counts: samples in each shard, int64 [shards].
        seed, epoch: all the randomness there is; the same two give the same order anywhere.
        window: shards shuffled together. Larger mixes better; smaller reads (and of remote shards keeps) less at once.
    """

    def __init__(self, counts: np.ndarray, seed: int, epoch: int, window: int = 16) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 shard, got {window}")
        self._seed, self._epoch, self.window = seed, epoch, window
        self._shards = np.random.default_rng([seed, epoch, 0]).permutation(len(counts))
        self._counts = np.asarray(counts, dtype=np.int64)[self._shards]
        ends = np.cumsum(self._counts)
        self._window_ends = np.append(ends[window - 1 : -1 : window], ends[-1:])
        self._shuffled: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return int(self._window_ends[-1]) if len(self._window_ends) else 0

    def samples(self, start: int, stop: int) -> list[SampleId]:
        """Return the samples at positions start..stop-1 of the order."""
        samples: list[SampleId] = []
        while start < stop:
            number = self.window_at(start)
            begin = int(self._window_ends[number - 1]) if number else 0
            end = min(stop, int(self._window_ends[number]))
            if self._shuffled is None or self._shuffled[0] != number:
                self._shuffled = (number, *self._shuffle(number))
            _, shards, rows = self._shuffled
            part = slice(start - begin, end - begin)
            samples += zip(shards[part].tolist(), rows[part].tolist(), strict=True)
            start = end
        return samples

    def window_at(self, position: int) -> int:
        """Return the number of the window that holds this position."""
        if not 0 <= position < self._window_ends[-1]:
            raise IndexError(f"position {position} of an order of {len(self)} samples")
        return int(np.searchsorted(self._window_ends, position, side="right"))

    def window_shards(self, number: int) -> list[int]:
        """Return the shards of a window; none past the last one."""
        return self._shards[number * self.window : (number + 1) * self.window].tolist()

    def _shuffle(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards and rows of a window's samples in their order."""
        part = slice(number * self.window, (number + 1) * self.window)
        counts = self._counts[part]
        shards = np.repeat(self._shards[part], counts)
        begins = np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.arange(len(shards)) - begins
        order = np.random.default_rng([self._seed, self._epoch, 1, number]).permutation(len(shards))
        return shards[order], rows[order]


Order = SequentialOrder | ShuffledOrder
"""The samples of an epoch, one after another."""
