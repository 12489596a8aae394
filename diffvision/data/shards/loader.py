"""Batches for training: exact order, true length, an account of every sample, resumable at any batch.

Global batch i of an epoch is positions i*B .. (i+1)*B-1 of the epoch's order, whatever the number of workers and ranks;
rank r of w has the r-th of w equal slices of it. A bad sample is replaced by the next good one at the
same slot of a later global batch: no batch has a sample twice, and no rank needs to know of the others.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch.utils.data import DataLoader

from diffvision.data.shards.batch_reader import BatchReader, Request, check_settings, identity_collate
from diffvision.data.shards.order import ShuffledOrder
from diffvision.data.shards.report import Limits, Report
from diffvision.data.shards.sample import BadSample, SampleKind, SampleSource
from diffvision.data.shards.watchdog import STALL_TIMEOUT, Pulse, watched

_PREPARING_THREADS = 2


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
        window: shards shuffled together, see `order.ShuffledOrder`.
        stall_timeout: seconds without a sample, while a batch is waited for, after which workers count as stuck.

    Raises:
        ValueError: a batch size that ranks cannot share or that is larger than the dataset; a state of another run.
        BadDataError: while iterating, when there are too many bad samples.
        StalledError: while iterating, when workers are stuck.
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
    ) -> None:
        check_settings(batch_size, num_workers, rank, world_size)
        if batch_size % world_size:
            raise ValueError(f"batch_size {batch_size} is that of all ranks: it must be a multiple of {world_size}")
        if len(shards) < batch_size:
            raise ValueError(
                f"the data have {len(shards)} samples: fewer than one global batch of {batch_size}; lower batch_size"
            )
        shards.check_room(at_once=2 * window)  # those of a window, and of the next one
        self.shards, self.batch_size, self.seed, self.window = shards, batch_size, seed, window
        self.rank, self.world_size, self.limits = rank, world_size, limits or Limits()
        self._position = (0, 0)  # epoch, batches consumed
        self._resume = False  # whether the next iteration starts there rather than at the beginning of the epoch
        self.order = partial(ShuffledOrder, shards.counts, seed, window=window)  # epoch -> order
        self.report = self._new_report(0, 0)
        self.stall_timeout, self._pulse = stall_timeout, Pulse()
        shards.on_progress(self._pulse.beat)
        reader = BatchReader(
            shards, kind, self.order, stride=batch_size, seed=seed, limits=self.limits, pulse=self._pulse
        )
        self._requests = _Requests(shards, self.order, batch_size, rank, world_size)
        self._loader = DataLoader(
            reader,
            batch_size=None,
            sampler=self._requests,
            num_workers=num_workers,
            collate_fn=identity_collate,
            generator=torch.Generator(),  # else each epoch would draw from the process's generator
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
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
        self._requests.epoch, self._requests.first = epoch, first
        batches = watched(self._loader, self._pulse, self.stall_timeout)
        for number, (batch, tally) in enumerate(batches, start=first):
            report.add(tally, self.limits)
            self._position = (epoch, number + 1) if number + 1 < len(self) else (epoch + 1, 0)
            yield batch

    def names(self, epoch: int, batch: int) -> list[str]:
        """Return this rank's share of a batch, each sample as "shard: key"; a substitute's is the bad sample's."""
        share = self.batch_size // self.world_size
        start = batch * self.batch_size + self.rank * share
        samples = self.order(epoch).samples(start, start + share)
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
        added = self.shards.sample_settings.keys()  # which earlier versions did not save
        for name, value in self._identity().items():
            if state.get(name, value if name in added else None) != value:
                raise ValueError(
                    f"cannot resume: {name} was {state.get(name)!r} and is {value!r} now; the order of samples would "
                    "not be the same. Restore it, or start a new run from the weights alone"
                )
        self._compare_content(state.get("content", "names and counts:"))
        self._position, self._resume = (int(state["epoch"]), int(state["batches_consumed"])), True

    def _compare_content(self, saved: str) -> None:
        kind, current = saved.partition(":")[0], self.shards.content
        if kind != current.partition(":")[0]:  # a checkpoint of an earlier version, or a manifest written since
            warnings.warn(
                f"resuming on shards of the same names and counts; whether they hold the same cannot be compared: the "
                f"checkpoint knows their {kind}, now their {current.partition(':')[0]} are known",
                stacklevel=3,
            )
        elif saved != current:
            raise ValueError(
                f"cannot resume: the shards have the names and counts of those of the checkpoint, and other content "
                f"({current}, not {saved}). Restore them, or start a new run from the weights alone"
            )

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
        self._wanted: SimpleQueue | None = None

    def __len__(self) -> int:
        return len(self.shards) // self.batch_size

    def __iter__(self) -> Iterator[Request]:
        epoch, order, window = self.epoch, self.order(self.epoch), -1
        for batch in range(self.first, len(self)):
            start = batch * self.batch_size + self.rank * self.share
            if (number := order.window_at(start)) != window:
                self._prepare(shard for n in (number, number + 1) for shard in order.window_shards(n))
                window = number
            yield Request(epoch, start, start + self.share)

    def _prepare(self, numbers: Iterator[int]) -> None:
        if self._wanted is None:
            self._wanted = SimpleQueue()
            weakref.finalize(self, _end, self._wanted)
            for _ in range(_PREPARING_THREADS):
                # Daemons: an interpreter that exits does not wait until all shards are fetched.
                Thread(
                    target=_prepare_all, args=(self.shards, self._wanted), name="prepare-shards", daemon=True
                ).start()
        for number in numbers:
            if self.shards.needs_preparing(number):
                self._wanted.put(number)


def _prepare_all(shards: SampleSource, wanted: SimpleQueue) -> None:
    while (number := wanted.get()) is not None:
        shards.prepare(number)


def _end(wanted: SimpleQueue) -> None:
    for _ in range(_PREPARING_THREADS):
        wanted.put(None)
