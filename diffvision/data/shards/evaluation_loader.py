"""Batches for evaluation: every sample once, in order, over all ranks. `loader` has those for training."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from diffvision.data.shards.batch_reader import BatchReader, Request, check_settings, identity_collate
from diffvision.data.shards.order import Order, SequentialOrder
from diffvision.data.shards.report import Limits, Report, Tally
from diffvision.data.shards.sample import SampleKind, SampleSource
from diffvision.data.shards.watchdog import STALL_TIMEOUT, Pulse, watched


class EvaluationLoader:
    """Batches of samples in order, each sample exactly once over all ranks; the last batch may be smaller.

    Rank r of w has the r-th of w contiguous parts, so joining the ranks' results keeps the order. Bad samples are left
    out and counted in `report`, which is of this rank's part.

    Args:
        source: the samples.
        kind: what to make of each sample.
        batch_size: samples of a batch, on each rank.
        num_workers: processes that read and decode; 0 does it in this one.
        rank: this process's rank, of `world_size`.
        world_size: the number of ranks.
        limits: how many bad samples stop the evaluation.
        stall_timeout: seconds without a sample, while a batch is waited for, after which workers count as stuck.
    """

    def __init__(
        self,
        source: SampleSource,
        kind: SampleKind,
        batch_size: int = 64,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        limits: Limits | None = None,
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        check_settings(batch_size, num_workers, rank, world_size)
        self.batch_size, self.limits = batch_size, limits or Limits(settable=False)
        self.stall_timeout, self._pulse = stall_timeout, Pulse()
        start, stop = (len(source) * r // world_size for r in (rank, rank + 1))
        firsts = range(start, stop, batch_size)
        self._requests = [Request(0, first, min(first + batch_size, stop)) for first in firsts]
        self._samples = stop - start
        self._extra_counts, self._num_workers = source.extra_counts, num_workers
        self.report = self.new_report()
        order = partial(_sequential, source.counts)
        self._reader = BatchReader(source, kind, order, limits=self.limits, pulse=self._pulse)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        self.report = self.new_report()
        for batch, tally in self.tallied(range(len(self))):
            self.report.add(tally, self.limits)
            if batch is not None:
                yield batch

    def tallied(self, numbers: Sequence[int]) -> Iterator[tuple[Any, Tally]]:
        """Yield batches by their numbers: each (None where no sample is good) with what became of its samples."""
        loader = DataLoader(
            self._reader,
            batch_size=None,
            sampler=[self._requests[number] for number in numbers],
            num_workers=min(self._num_workers, len(numbers)),
            collate_fn=identity_collate,
            generator=torch.Generator(),  # else it would draw from the process's, and change the training around it
        )
        yield from watched(loader, self._pulse, self.stall_timeout)

    def new_report(self) -> Report:
        """Return an empty report of this rank's part."""
        return Report(self._samples, extra_counts=self._extra_counts)


def _sequential(counts: np.ndarray, epoch: int) -> Order:
    return SequentialOrder(counts)
