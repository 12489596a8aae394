"""One batch of samples: read, decoded, collated, with a tally of what became of each.

The loaders (`loader`, `evaluation_loader`) choose the batches and account for an epoch.
"""

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from diffvision.data.shards.order import Order
from diffvision.data.shards.report import Limits, Tally
from diffvision.data.shards.sample import BadSample, SampleId, SampleKind, SampleSource
from diffvision.data.shards.watchdog import Pulse


@dataclass(frozen=True)
class Request:
    """Positions start..stop-1 of an epoch's order."""

    epoch: int
    start: int
    stop: int


class BatchReader(Dataset):
    """Map-style dataset of Request -> (batch or None, Tally); each worker computes the epoch's order itself.

    Args:
        source: the samples.
        kind: what to make of each sample.
        order: epoch -> Order.
        stride: samples in a global batch, the step at which substitutes are searched; None leaves bad samples out.
        seed: with epoch and sample it seeds Python's, numpy's and torch's generators while the sample is decoded;
            None leaves them alone.
        limits: how many bad samples in a row are given up on.
        pulse: beats with each sample that is decoded, or is bad.
    """

    def __init__(
        self,
        source: SampleSource,
        kind: SampleKind,
        order: Callable[[int], Order],
        *,
        stride: int | None = None,
        seed: int | None = None,
        limits: Limits,
        pulse: Pulse | None = None,
    ) -> None:
        self.source, self.kind, self.stride, self.seed, self.limits = source, kind, stride, seed, limits
        self.pulse = pulse or Pulse()
        self._make_order = order
        self._order: tuple[int, Order] | None = None

    def __getitem__(self, request: Request) -> tuple[Any, Tally]:
        if self._order is None or self._order[0] != request.epoch:
            self._order = (request.epoch, self._make_order(request.epoch))
            self.source.on_progress(self.pulse.beat)  # here: a callback is not sent to other processes
        order = self._order[1]
        with _generators_restored(enabled=self.seed is not None and get_worker_info() is None):
            return self._batch(order, request)

    def _batch(self, order: Order, request: Request) -> tuple[Any, Tally]:
        tally = Tally(request.start, request.stop)
        items: dict[int, Any] = {}
        in_a_row = 0
        samples = order.samples(request.start, request.stop)
        for position, sample in zip(range(request.start, request.stop), samples, strict=True):
            try:
                items[position] = self._item(sample, request.epoch)
                in_a_row = 0
            except BadSample as reason:
                tally.bad[position] = (str(reason), self.source.describe(sample))
                in_a_row += 1
                if in_a_row >= self.limits.max_bad_in_a_row:
                    tally.stop, tally.given_up = position + 1, True
                    return None, tally
        if self.stride is not None:
            for position in tally.bad:
                if (item := self._substitute(order, position, request.epoch)) is None:
                    tally.given_up = True
                    return None, tally
                items[position] = item
                tally.substituted += 1
        batch = self.kind.collate([items[position] for position in sorted(items)]) if items else None
        return batch, tally

    def _substitute(self, order: Order, position: int, epoch: int) -> Any:
        """Return the next good sample of the same slot in other global batches, or None if there is none."""
        assert self.stride is not None
        slot = range(position % self.stride, len(order), self.stride)
        batch = position // self.stride
        for step in range(1, min(len(slot), self.limits.max_bad_in_a_row + 1)):
            other = slot[(batch + step) % len(slot)]
            try:
                return self._item(order.samples(other, other + 1)[0], epoch)
            except BadSample:
                continue
        return None

    def _item(self, sample: SampleId, epoch: int) -> Any:
        self.pulse.beat()
        members = self.source.members(sample)
        if self.seed is not None:
            _seed_generators(self.seed, epoch, sample)
        try:
            return self.kind.decode(members)
        except BadSample:
            raise
        except Exception as error:
            error.add_note(f"while making the sample {self.source.describe(sample)}")
            raise


def check_settings(batch_size: int, num_workers: int, rank: int, world_size: int) -> None:
    """Raise ValueError for a batch size, number of workers or rank that is out of range."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: it counts the samples of a batch, 1 or more")
    if num_workers < 0:
        raise ValueError(f"num_workers is {num_workers}: it counts processes, 0 to read in this one")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: ranks count from 0 to {world_size - 1}")


def identity_collate(batch: Any) -> Any:
    """Return a batch as it is, for a DataLoader whose dataset gives whole batches."""
    return batch


def _seed_generators(seed: int, epoch: int, sample: SampleId) -> None:
    digest = hashlib.blake2b(struct.pack("4q", seed, epoch, *sample), digest_size=20).digest()  # fast: once a sample
    words = struct.unpack("=QIQ", digest)
    random.seed(words[0])
    np.random.seed(words[1])  # noqa: NPY002 (transforms use numpy's global generator)
    torch.default_generator.manual_seed(words[2])


@contextmanager
def _generators_restored(*, enabled: bool) -> Iterator[None]:
    """Restore the process's random generators at the end of the block, if `enabled`."""
    if not enabled:
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])
