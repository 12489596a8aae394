"""Conversations packed whole into windows: which ones share a window, and the batches that are made of windows.

The files are those of `tokens`; nothing in them depends on the windows' length.
"""

from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np
import torch

from diffvision.data.batches import TokenBatch
from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.sample import BadSample, Members, SampleId
from diffvision.data.text.tokens import LEARNED, LENGTH_DTYPE, LENGTHS, MEMBER, TokenAccount, TokenSequence, TokenShards
from diffvision.progress import track

_BUFFER = 2000  # conversations that are packed together


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return which of the lengths share a window: each, longest first, goes where the least room is left over.

    Args:
        lengths: of what is packed, none above `capacity`.
        capacity: of a window.

    Returns:
        For each window the indices of its lengths, in order.
    """
    windows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, window), sorted
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        fit = bisect_left(rooms, (length, -1))
        room, window = rooms.pop(fit) if fit < len(rooms) else (capacity, len(windows))
        if window == len(windows):
            windows.append([])
        windows[window].append(index)
        insort(rooms, (room - length, window))
    return [sorted(window) for window in windows]


class PackedShards(TokenShards):
    """Shards of conversations as windows of whole ones; a sample's row is the number of the window in its shard.

    A window holds `length + 1` tokens: what a model reads, and the last one's prediction. Conversations are packed best
    fit decreasing, 2,000 after another at a time. One that is longer than a window is left out and counted, or cut at
    its end; cut before the first learned token, it is left out too.

    Args:
        source: as `ShardSet`'s.
        length: tokens that a model reads of each window.
        cut: cut conversations that are longer than a window.

    Attributes:
        long: the number of conversations that are longer than a window.
        first_long: the first of them, as "shard: conversation N", from 1; "" where there is none.

    Raises:
        ValueError: as `TokenShards`; a damaged shard; no conversation fits.
    """

    def __init__(self, source: Any, length: int, *, cut: bool = False, cache: ShardCache | None = None) -> None:
        self.cut, self.long, self._left_out, self.first_long = cut, 0, 0, ""
        self._packed: list[_Windows] = []
        super().__init__(source, length, cache)

    @property
    def fingerprint(self) -> str:
        """A digest of names and counts, of the length, of how they are packed and of the tokenizer."""
        return f"{super().fingerprint}-packed{'-cut' * self.cut}"

    @property
    def sample_settings(self) -> dict[str, Any]:
        """The length of a window, and whether longer conversations are cut."""
        return {**super().sample_settings, "cut": self.cut}

    @property
    def extra_counts(self) -> dict[str, int]:
        """Conversations that are longer than a window, tokens of padding, and rows that are not in the shards."""
        used = sum(int(windows.used) for windows in self._packed)
        padding = int(self.counts.sum()) * (self.length + 1) - used
        counts = {"long_conversations": self.long, "left_out_conversations": self._left_out, "padding_tokens": padding}
        return counts | {"skipped_documents": self.account.bad, "empty_documents": self.account.empty}

    def members(self, sample: SampleId) -> Members:
        """Return the conversations of a window as the arrays that shards have of them."""
        number, row = sample
        pieces = self._packed[number].pieces(row)
        return {
            MEMBER: b"".join(self.read_tokens(number, start, stop) for start, stop in pieces),
            LEARNED: b"".join(self.read_learned(number, start, stop) for start, stop in pieces),
            LENGTHS: np.array([stop - start for start, stop in pieces], LENGTH_DTYPE).tobytes(),
        }

    def describe(self, sample: SampleId) -> str:
        """Return "shard: window N" of a sample, for reports."""
        return f"{self.shards[sample[0]].name}: window {sample[1]}"

    def _counted_sequences(self, source: Any) -> np.ndarray:
        """Pack every shard, and return how many windows each fills."""
        capacity, longest = self.length + 1, 0
        for number in track(range(len(self.shards)), "packing"):
            lengths = self.lengths(number)
            longest = max(longest, int(lengths.max(initial=0)))
            self._packed.append(self._pack(number, lengths, capacity))
        counts = np.array([len(windows.stops) for windows in self._packed], dtype=np.int64)
        if not counts.any():
            raise ValueError(
                f"no conversation of {source} fits into a window of {capacity:,} tokens, the longest has {longest:,}: "
                "take a larger length, or cut them"
            )
        return counts

    def _pack(self, number: int, lengths: np.ndarray, capacity: int) -> "_Windows":
        """Pack one shard's conversations into windows of at most `capacity` tokens; longer ones are cut or left out."""
        stops = np.cumsum(lengths)
        kept = lengths <= capacity
        long = np.flatnonzero(~kept)
        self.long += len(long)
        if len(long) and not self.first_long:
            self.first_long = f"{self.shards[number].name}: conversation {int(long[0]) + 1}"
        for index in long.tolist() if self.cut else ():
            kept[index] = self._has_learned(number, int(stops[index] - lengths[index]), capacity)
        self._left_out += int((~kept).sum())
        chosen = np.flatnonzero(kept)
        starts, sizes = (stops - lengths)[chosen], np.minimum(lengths[chosen], capacity)
        windows = [
            [index + first for index in window]
            for first in range(0, len(chosen), _BUFFER)
            for window in best_fit_decreasing(sizes[first : first + _BUFFER], capacity)
        ]
        order = np.array([index for window in windows for index in window], dtype=np.int64)
        return _Windows(starts[order], sizes[order], np.cumsum([len(window) for window in windows], dtype=np.int64))

    def _has_learned(self, number: int, start: int, capacity: int) -> bool:
        try:
            return any(self.read_learned(number, start + 1, start + capacity))
        except BadSample as reason:
            raise ValueError(f"{self.shards[number].location}: {reason}; write the token shards again") from reason


class _Windows(NamedTuple):
    """The windows of a shard: where each conversation starts in it, its tokens, and where each window ends in these."""

    starts: np.ndarray
    sizes: np.ndarray
    stops: np.ndarray

    @property
    def used(self) -> int:
        return int(self.sizes.sum())

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return the first token of each conversation of a window, and the one after its last."""
        part = slice(int(self.stops[row - 1]) if row else 0, int(self.stops[row]))
        starts, sizes = self.starts[part], self.sizes[part]
        return list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))


class PackedSequence(TokenSequence):
    """`TokenBatch` of windows, with the number of each token's conversation and whether it is learned.

    What is left of a window is padding: the tokenizer's end of a document, not learned, of a number by itself.

    Args:
        account: of the shards that the windows come from.
        length: tokens that a model reads of each window.
    """

    def __init__(self, account: TokenAccount, length: int) -> None:
        super().__init__(account, documents=True)
        self._size = length + 1

    def decode(self, members: Members) -> Any:
        """Return tokens, the number of their conversations and whether they are learned, each [L + 1]."""
        tokens = super().decode(members)
        learned = np.frombuffer(members[LEARNED], np.uint8) != 0
        lengths = np.frombuffer(members[LENGTHS], LENGTH_DTYPE)
        padding = (0, self._size - len(tokens))
        documents = np.repeat(np.arange(len(lengths)), lengths)
        return (
            np.pad(tokens, padding, constant_values=self._eos_id),
            np.pad(documents, padding, constant_values=len(lengths)),
            np.pad(learned, padding),
        )

    def collate(self, items: list[Any]) -> TokenBatch:
        """Join windows into a batch."""
        tokens, documents, learned = (np.stack(part) for part in zip(*items, strict=True))
        return {
            "tokens": torch.from_numpy(tokens.astype(np.int64)),
            "documents": torch.from_numpy(documents),
            "learned": torch.from_numpy(learned),
        }
