"""Batches of samples for training and for evaluation, with an account of every sample.

`ShardLoader` has those for training: global batch i of an epoch is positions i*B .. (i+1)*B-1 of the epoch's order,
whatever the number of workers and ranks; rank r of w has the r-th of w equal slices of it. A bad sample is replaced by
the next good one at the same slot of a later global batch: no batch has a sample twice, and no rank needs to know of
the others. `EvaluationLoader` has every sample once, in order.
"""

import hashlib
import random
import struct
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from diffvision.data.shards.order import Order, SequentialOrder, ShuffledOrder
from diffvision.data.shards.report import Limits, Report, Tally
from diffvision.data.shards.sample import BadSample, SampleId, SampleKind, SampleSource
from diffvision.data.shards.worker_batches import STALL_TIMEOUT, make_loader, read_batches

_PREPARING_THREADS = 2


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
    ) -> None:
        self.source, self.kind, self.stride, self.seed, self.limits = source, kind, stride, seed, limits
        self._make_order = order
        self._order: tuple[int, Order] | None = None

    def __getitem__(self, request: Request) -> tuple[Any, Tally]:
        if self._order is None or self._order[0] != request.epoch:
            self._order = (request.epoch, self._make_order(request.epoch))
        if self.seed is None or get_worker_info() is not None:
            return self._read(self._order[1], request)
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
        try:
            return self._read(self._order[1], request)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            torch.default_generator.set_state(states[2])

    def _read(self, order: Order, request: Request) -> tuple[Any, Tally]:
        """Read one batch; bad samples are counted and, with a stride, substituted."""
        tally = Tally(request.start, request.stop)
        items: dict[int, Any] = {}
        in_a_row = 0
        for position, sample in enumerate(order.samples(request.start, request.stop), start=request.start):
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
        tally.cut = getattr(self.kind, "cut", 0)
        return batch, tally

    def _substitute(self, order: Order, position: int, epoch: int) -> Any:
        """Return the next good sample of the same slot in other global batches, or None if there is none."""
        assert self.stride is not None
        slot = range(position % self.stride, len(order), self.stride)
        batch = position // self.stride
        for step in range(1, min(len(slot), self.limits.max_bad_in_a_row + 1)):
            other = slot[(batch + step) % len(slot)]
            with suppress(BadSample):
                return self._item(order.samples(other, other + 1)[0], epoch)
        return None

    def _item(self, sample: SampleId, epoch: int) -> Any:
        """Read and decode one sample; what is drawn at random follows from the seed, the epoch and the sample."""
        members = self.source.members(sample)
        if self.seed is not None:
            digest = hashlib.blake2b(struct.pack("4q", self.seed, epoch, *sample), digest_size=20).digest()
            words = struct.unpack("=QIQ", digest)
            random.seed(words[0])
            np.random.seed(words[1])  # noqa: NPY002 (transforms use numpy's global generator)
            torch.default_generator.manual_seed(words[2])
        try:
            return self.kind.decode(members)
        except BadSample:
            raise
        except Exception as error:
            error.add_note(f"while making the sample {self.source.describe(sample)}")
            raise


class ShardLoader:
    """Training batches from shards: exact order, true length, resumable at any batch, on other ranks and workers too.

    Iterating gives one epoch and moves on to the next; `set_epoch` chooses another. A batch counts as consumed when it
    is yielded, so `state_dict()` taken after a training step resumes with the next one, on every rank alike.

    Args:
        shards: what to read.
        kind: what to make of each sample.
        batch_size: samples of a global batch, over all ranks; each rank gets batch_size / world_size of them.
        seed: determines the order, with the epoch; and augmentation, with epoch and sample.
        num_workers: processes that read and decode; 0 does it in this one.
        rank: this process's rank, of `world_size`.
        world_size: the number of ranks.
        window: shards shuffled together, see `order.ShuffledOrder`.
        limits: how many bad samples stop the run.
        stall_timeout: seconds that the next batch may take before the workers count as stuck.
        repeats: whether every epoch has the batches of the first one, augmented alike.

    Attributes:
        waited: seconds that its users have waited for batches.

    Raises:
        ValueError: a batch size that ranks cannot share or that is larger than the dataset; a state of another run.
        BadDataError: while iterating, when there are too many bad samples.
        WorkerError: while iterating, when a worker is stuck or was killed.
    """

    batch_sampler = None  # which Lightning reads of a loader that has a sampler

    def __init__(
        self,
        shards: SampleSource,
        kind: SampleKind,
        batch_size: int,
        *,
        seed: int = 0,
        num_workers: int = 2,
        rank: int = 0,
        world_size: int = 1,
        window: int = 16,
        limits: Limits | None = None,
        stall_timeout: float = STALL_TIMEOUT,
        repeats: bool = False,
    ) -> None:
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(f"batch_size {batch_size} is that of all ranks: it must be a multiple of {world_size}")
        if len(shards) < batch_size:
            raise ValueError(
                f"the data have {len(shards)} samples: fewer than one global batch of {batch_size}; lower batch_size"
            )
        self.shards, self.batch_size, self.seed, self.window = shards, batch_size, seed, window
        self.rank, self.world_size, self.limits = rank, world_size, limits or Limits()
        self._position = (0, 0)  # epoch, batches consumed
        self.repeats = repeats
        self._resume = False  # whether the next iteration starts there rather than at the beginning of the epoch
        self.order = partial(ShuffledOrder, shards.counts, seed, window=window)  # epoch -> order
        self.report = self._new_report(0, 0)
        self.waited = 0.0
        reader = BatchReader(shards, kind, self.order, stride=batch_size, seed=seed, limits=self.limits)
        self._requests = _Requests(shards, self.order, batch_size, rank, world_size)
        shared = {"persistent_workers": num_workers > 0, "pin_memory": torch.cuda.is_available()}
        self._loader = make_loader(reader, self._requests, num_workers, stall_timeout, **shared)
        # A trainer holds its loader in reference cycles. If the DataLoader were part of one, collecting it would wait
        # five seconds for each worker; so it is held from outside, and released as soon as this object is.
        weakref.finalize(self, len, (self._loader,)).atexit = False

    def __len__(self) -> int:
        """Return the batches in an epoch, the same on every rank."""
        return len(self.shards) // self.batch_size

    @property
    def sampler(self) -> "ShardLoader":
        """The loader itself, because Lightning calls `set_epoch` of a loader's sampler."""
        return self

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._position[0]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a position that was restored within the same epoch stays."""
        if epoch != self._position[0]:
            ended = self._resume and self._position == (epoch + 1, 0)  # restored where nothing of this epoch is left
            self._position, self._resume = (epoch, len(self) if ended else 0), False
            self.report = self._new_report(*self._position)

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self._position
        if not self._resume:
            first = 0
        self._position, self._resume = (epoch, first), False
        self.report = report = self._new_report(epoch, first)
        self._requests.epoch, self._requests.first = 0 if self.repeats else epoch, first
        last = len(self) - 1
        batches, begun = read_batches(self._loader), time.monotonic()
        for number, (batch, tally) in enumerate(batches, start=first):
            self.waited += time.monotonic() - begun
            report.add(tally, self.limits)
            self._position = (epoch, number + 1) if number < last else (epoch + 1, 0)
            yield batch
            begun = time.monotonic()

    def names(self, epoch: int, batch: int) -> list[str]:
        """Return "shard: key" of each sample of a global batch; for a substitute, that of the bad sample."""
        start = batch * self.batch_size
        samples = self.order(0 if self.repeats else epoch).samples(start, start + self.batch_size)
        for sample in samples:
            with suppress(BadSample):
                self.shards.members(sample)  # opens the index, which only workers may have done
        return [self.shards.describe(sample) for sample in samples]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and all that the order depends on."""
        epoch, consumed = self._position
        if consumed == len(self):
            epoch, consumed = epoch + 1, 0
        return {"epoch": epoch, "batches_consumed": consumed, "content": self.shards.content} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position of a state.

        Raises:
            ValueError: the state is of another order, or of shards with other content.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"cannot resume: {name} was {state.get(name)!r} and is {value!r} now: restore it, or start a "
                    "new run from the weights"
                )
        saved, current = state.get("content", "names:"), self.shards.content
        kinds = [content.partition(":")[0] for content in (saved, current)]
        if kinds[0] != kinds[1]:  # a checkpoint of an earlier version, or a manifest written since
            warnings.warn(
                "resuming on shards of the same names and counts; whether they hold the same cannot be compared: the "
                f"checkpoint knows their {kinds[0]}, now their {kinds[1]} are known",
                stacklevel=2,
            )
        elif saved != current:
            raise ValueError(
                f"cannot resume: the shards have other content ({current}, not {saved}): restore them, or start a "
                "new run from the weights"
            )
        self._position, self._resume = (int(state["epoch"]), int(state["batches_consumed"])), True

    def _identity(self) -> dict[str, Any]:
        """Return all that an epoch's batches follow from, besides the epoch and augmentation."""
        return {
            "format": 1,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "window": self.window,
            **self.shards.sample_settings,
            "samples": len(self.shards),
            "shards": self.shards.fingerprint,
        }

    def _new_report(self, epoch: int, first: int) -> Report:
        total = len(self.shards)
        before = first * self.batch_size
        tail, extra_counts = total % self.batch_size, self.shards.extra_counts
        return Report(total, epoch, tail=tail, before=before, world_size=self.world_size, extra_counts=extra_counts)


class _Requests:
    """The sampler of a ShardLoader: this rank's slice of each global batch.

    Shards are fetched and verified a window ahead. It has no reference to the loader: a reference cycle would keep the
    worker processes until garbage is collected.
    """

    def __init__(
        self,
        shards: SampleSource,
        order: Callable[[int], ShuffledOrder],
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.shards, self.order, self.batch_size = shards, order, batch_size
        self.rank, self.share = rank, batch_size // world_size
        self.epoch, self.first = 0, 0

    @cached_property
    def _wanted(self) -> "SimpleQueue[int | None]":
        """Shards to prepare by background threads, which start here: after workers were forked."""
        wanted: SimpleQueue[int | None] = SimpleQueue()
        for _ in range(_PREPARING_THREADS):
            # Daemons: an interpreter that exits does not wait until all shards are fetched.
            Thread(target=_prepare_all, args=(self.shards, wanted), name="prepare-shards", daemon=True).start()
            weakref.finalize(self, wanted.put, None)
        return wanted

    def __iter__(self) -> Iterator[Request]:
        epoch, order, window = self.epoch, self.order(self.epoch), -1
        for batch in range(self.first, len(order) // self.batch_size):
            start = batch * self.batch_size + self.rank * self.share
            if (number := order.window_at(start)) != window:
                for shard in order.window_shards(number) + order.window_shards(number + 1):
                    self._wanted.put(shard)
                window = number
            yield Request(epoch, start, start + self.share)


def _prepare_all(shards: SampleSource, wanted: SimpleQueue) -> None:
    while (number := wanted.get()) is not None:
        shards.prepare(number)


class EvaluationLoader:
    """Batches of samples in order, each sample exactly once over all ranks; the last batch may be smaller.

    Rank r of w has the r-th of w contiguous parts, so joining the ranks' results keeps the order. Bad samples are left
    out and counted in `report`, which is of this rank's part.

    Args:
        source: the samples.
        batch_size: samples of a batch, on each rank.
        kind, num_workers, rank, world_size, limits, stall_timeout: as of `ShardLoader`.
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
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
        self.batch_size, self.limits = batch_size, limits or Limits(settable=False)
        start, stop = (len(source) * r // world_size for r in (rank, rank + 1))
        firsts = range(start, stop, batch_size)
        self._requests = [Request(0, first, min(first + batch_size, stop)) for first in firsts]
        self._new_report = partial(Report, stop - start, extra_counts=source.extra_counts)
        self.report = self._new_report()
        reader = BatchReader(source, kind, partial(SequentialOrder, source.counts), limits=self.limits)
        self._loader = make_loader(reader, self._requests, min(num_workers, len(self)), stall_timeout)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        self.report = self._new_report()
        for batch, tally in read_batches(self._loader):
            self.report.add(tally, self.limits)
            if batch is not None:
                yield batch
