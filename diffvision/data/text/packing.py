"""Conversations packed whole into windows: which ones share a window, and the batches that are made of windows.

The files are those of `tokens`; nothing in them depends on the windows' length.
"""

from bisect import bisect_left, insort
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from diffvision.data.batches import TokenBatch
from diffvision.data.shards.sample import Members, SampleId
from diffvision.data.text.tokens import (
    BLOCK,
    IDS,
    LEARNED,
    LENGTHS,
    MEMBER_DTYPE,
    Block,
    TokenAccount,
    TokenSequence,
    TokenWindows,
)
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


class PackedWindows(TokenWindows):
    """Token files of conversations as windows of whole ones; a sample is a block and the window's number in it.

    A window holds `length + 1` tokens: what a model reads, and the last one's prediction. Conversations are packed best
    fit decreasing, 2,000 after another at a time. One that is longer than a window is left out and counted.

    Args:
        source, length, block: as `TokenWindows`'s. A conversation is in the block of its first token.

    Attributes:
        long: the number of conversations that are longer than a window.
        first_long: the first of them, as "folder: conversation N", from 1; "" where there is none.

    Raises:
        ValueError: as `TokenWindows`; no conversation fits.
    """

    def __init__(self, source: Any, length: int, *, block: int = BLOCK) -> None:
        self.long, self.first_long = 0, ""
        super().__init__(source, length, block=block)

    def _count_windows(self, block: int) -> list[int]:
        """Pack every block, and return how many windows each fills."""
        self._blocks: list[Block] = []  # of conversations
        self._packed: list[_Windows] = []
        for file in self.files:
            lengths = file.array(LENGTHS).astype(np.int64)
            if (total := int(lengths.sum())) != (count := file.account.count):
                raise ValueError(
                    f"lengths in {file.folder / LENGTHS} must add up to {count:,} tokens, got {total:,}: run "
                    "`diffvision data tokenize` again"
                )
            starts = np.cumsum(lengths) - lengths
            edges = [*np.searchsorted(starts, range(0, count, block)).tolist(), len(lengths)]
            for number, (first, stop) in enumerate(pairwise(edges)):
                self._blocks.append(Block(file, number, first, stop))
                self._packed.append(self._pack(self._blocks[-1], starts[first:stop], lengths[first:stop]))
        counts = [len(windows.edges) - 1 for windows in self._packed]
        if not any(counts):
            raise ValueError(f"data.length must hold a conversation, got {self.length:,}: all are longer")
        return counts

    @property
    def fingerprint(self) -> str:
        """A digest of the windows in each block, of the length, of how they are packed and of the tokenizer."""
        return f"{super().fingerprint}-packed"

    @property
    def extra_counts(self) -> dict[str, int]:
        """Conversations that are longer than a window, tokens of padding, and rows that are not in the files."""
        used = sum(int(windows.sizes.sum()) for windows in self._packed)
        padding = int(self.counts.sum()) * (self.length + 1) - used
        counts = {"left_out_conversations": self.long, "padding_tokens": padding}
        return counts | {"skipped_documents": self.account.bad, "empty_documents": self.account.empty}

    def members(self, sample: SampleId) -> Members:
        """Return the conversations of a window: ids in uint32, which are learned, and the tokens of each."""
        file, (starts, sizes) = self._blocks[sample[0]].file, self._packed[sample[0]].conversations(sample[1])
        pieces = [slice(start, start + size) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
        ids, learned = (
            np.concatenate([content[piece] for piece in pieces]) for content in (file.array(IDS), file.array(LEARNED))
        )
        return {IDS: ids.astype(MEMBER_DTYPE).tobytes(), LEARNED: learned.tobytes(), LENGTHS: sizes.tobytes()}

    def _first_token(self, sample: SampleId) -> int:
        return int(self._packed[sample[0]].conversations(sample[1])[0][0])

    def _pack(self, block: Block, starts: np.ndarray, lengths: np.ndarray) -> "_Windows":
        """Pack a block's conversations into windows; longer ones are left out."""
        capacity = self.length + 1
        fits = lengths <= capacity
        long = np.flatnonzero(~fits)
        self.long += len(long)
        if len(long) and not self.first_long:
            self.first_long = f"{block.file.folder.name}: conversation {block.start + int(long[0]) + 1}"
        starts, sizes = starts[fits], lengths[fits]
        windows = [
            [index + first for index in window]
            for first in track(range(0, len(sizes), _BUFFER), "packing")
            for window in best_fit_decreasing(sizes[first : first + _BUFFER], capacity)
        ]
        order = np.array([index for window in windows for index in window], dtype=np.int64)
        edges = np.cumsum([0, *map(len, windows)], dtype=np.int64)
        return _Windows(starts[order], sizes[order], edges)


class _Windows(NamedTuple):
    """The windows of a block: each conversation's first token and number of tokens, and the windows' edges in these."""

    starts: np.ndarray
    sizes: np.ndarray
    edges: np.ndarray

    def conversations(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first token of each conversation of a window, and its number of tokens."""
        part = slice(self.edges[window], self.edges[window + 1])
        return self.starts[part], self.sizes[part]


class PackedSequence(TokenSequence):
    """`TokenBatch` of windows, with the number of each token's conversation and whether it is learned.

    What is left of a window is padding: the tokenizer's end of a document, not learned, of a number by itself.

    Args:
        account: of the files that the windows come from.
        length: tokens that a model reads of each window.
    """

    def __init__(self, account: TokenAccount, length: int) -> None:
        super().__init__(account)
        self._size = length + 1

    def decode(self, members: Members) -> Any:
        """Return tokens, the number of their conversations and whether they are learned, each [L + 1]."""
        tokens = super().decode(members)
        lengths = np.frombuffer(members[LENGTHS], np.int64)
        documents = np.repeat(np.arange(len(lengths)), lengths)
        padding = (0, self._size - len(tokens))
        return (
            np.pad(tokens.astype(np.int64), padding, constant_values=self._eos_id),
            np.pad(documents, padding, constant_values=len(lengths)),
            np.pad(np.frombuffer(members[LEARNED], bool), padding),
        )

    def collate(self, items: list[Any]) -> TokenBatch:
        """Join windows into a batch."""
        tokens, documents, learned = (torch.from_numpy(np.stack(part)) for part in zip(*items, strict=True))
        return {"tokens": tokens, "documents": documents, "learned": learned}
