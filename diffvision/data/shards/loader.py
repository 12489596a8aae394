"""The one WebDataset pipeline: plan (order from seed and epoch) -> read -> decode -> batch, and an account of it all.

Global batch i of an epoch is places i*B .. (i+1)*B-1 of the epoch's order, whatever the number of workers and ranks;
rank r of w has the r-th of w equal slices of it. A bad sample's place is taken by the next good one of the places a
whole number of global batches further on: no batch has a sample twice, and no rank needs to know of the others.
"""

import hashlib
import random
import struct
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from diffvision.data.images.decode import BadSample
from diffvision.data.images.picture_set import PictureSet
from diffvision.data.images.samples import SampleKind
from diffvision.data.shards.order import Order, Sample, ShuffledOrder
from diffvision.data.shards.report import Limits, Report, Tally
from diffvision.data.shards.storage import ShardSet
from diffvision.data.shards.watchdog import STALL_TIMEOUT, Pulse, watched

_PREPARING = 2  # threads


@dataclass(frozen=True)
class Request:
    """Places start..stop-1 of an epoch's order."""

    epoch: int
    start: int
    stop: int


class BatchReader(Dataset):
    """Request -> (batch or None, Tally). Map-style: a worker computes the order it needs by itself.

    Args:
        order: epoch -> Order.
        stride: samples in a global batch, the step at which substitutes are looked for; None leaves bad samples out.
        seed: with epoch and sample it seeds Python's, numpy's and torch's generators while the sample is made;
            None leaves them alone.
        pulse: beats with each sample that is made, or found bad.
    """

    def __init__(
        self,
        shards: ShardSet | PictureSet,
        kind: SampleKind,
        order: Callable[[int], Order],
        *,
        stride: int | None = None,
        seed: int | None = None,
        limits: Limits,
        pulse: Pulse | None = None,
    ) -> None:
        self.shards, self.kind, self.stride, self.seed, self.limits = shards, kind, stride, seed, limits
        self.pulse = pulse or Pulse()
        self._make_order = order
        self._order: tuple[int, Order] | None = None

    def __getitem__(self, request: Request) -> tuple[Any, Tally]:
        if self._order is None or self._order[0] != request.epoch:
            self._order = (request.epoch, self._make_order(request.epoch))
            self.shards.cache.progress = self.pulse.beat  # here: it cannot be sent to another process by itself
        order = self._order[1]
        with _generators_restored(enabled=self.seed is not None and get_worker_info() is None):
            return self._batch(order, request)

    def _batch(self, order: Order, request: Request) -> tuple[Any, Tally]:
        tally = Tally(request.start, request.stop)
        items: dict[int, Any] = {}
        in_a_row = 0
        samples = order.samples(request.start, request.stop)
        for place, sample in zip(range(request.start, request.stop), samples, strict=True):
            try:
                items[place] = self._item(sample, request.epoch)
                in_a_row = 0
            except BadSample as reason:
                tally.bad[place] = (str(reason), self.shards.describe(sample))
                in_a_row += 1
                if in_a_row >= self.limits.max_bad_in_a_row:
                    tally.stop, tally.given_up = place + 1, True
                    return None, tally
        if self.stride is not None:
            for place in tally.bad:
                if (item := self._substitute(order, place, request.epoch)) is None:
                    tally.given_up = True
                    return None, tally
                items[place] = item
                tally.substituted += 1
        batch = self.kind.collate([items[place] for place in sorted(items)]) if items else None
        return batch, tally

    def _substitute(self, order: Order, place: int, epoch: int) -> Any:
        """The next good sample of the places that share this one's slot in other batches; None if there is none."""
        assert self.stride is not None
        slot = range(place % self.stride, len(order), self.stride)
        own = place // self.stride
        for step in range(1, min(len(slot), self.limits.max_bad_in_a_row + 1)):
            other = slot[(own + step) % len(slot)]
            try:
                return self._item(order.samples(other, other + 1)[0], epoch)
            except BadSample:
                continue
        return None

    def _item(self, sample: Sample, epoch: int) -> Any:
        self.pulse.beat()
        members = self.shards.members(sample)
        if self.seed is not None:
            _seed_generators(self.seed, epoch, sample)
        try:
            return self.kind.decode(members)
        except BadSample:
            raise
        except Exception as error:
            error.add_note(f"while making the sample {self.shards.describe(sample)}")
            raise


class ShardLoader:
    """Training batches from shards: exact order, true length, resumable at any batch, on other ranks and workers too.

    Iterating gives one epoch and moves on to the next; `set_epoch` chooses another. A batch counts as consumed when it
    is handed out, so `state_dict()` taken after a training step resumes with the next one, on every rank alike.

    Args:
        shards: what to read.
        kind: what to make of each sample.
        batch_size: samples of a global batch, over all ranks; each rank gets batch_size / world_size of them.
        seed: with the epoch, all there is to the order; with epoch and sample, all there is to augmentation.
        num_workers: processes that read and decode; 0 does it in this one.
        window: shards shuffled together, see `order.ShuffledOrder`.
        stall_timeout: seconds without a sample, while a batch is waited for, after which workers count as stuck.

    Raises:
        ValueError: a batch size that ranks cannot share or that is larger than the data set; a state of another run.
        BadDataError: while iterating, when there are too many bad samples.
        StalledError: while iterating, when workers are stuck.
    """

    def __init__(
        self,
        shards: ShardSet | PictureSet,
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
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it counts the samples of a batch, 1 or more")
        if batch_size % world_size:
            raise ValueError(f"batch_size {batch_size} is that of all ranks: it must be a multiple of {world_size}")
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}: it counts processes, 0 to read in this one")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: ranks count from 0 to {world_size - 1}")
        if len(shards) < batch_size:
            raise ValueError(
                f"the shards hold {len(shards)} samples: fewer than one global batch of {batch_size}; lower batch_size"
            )
        shards.cache.check_room(shards.shards, at_once=2 * window)  # those of a window, and of the next one
        self.shards, self.batch_size, self.seed, self.window = shards, batch_size, seed, window
        self.rank, self.world_size, self.limits = rank, world_size, limits or Limits()
        self._position = (0, 0)  # epoch, batches consumed
        self._resume = False  # whether the next iteration starts there rather than at the epoch's begin
        self.order = partial(ShuffledOrder, shards.counts, seed, window=window)  # epoch -> order
        self.report = self._new_report(0, 0)
        self.stall_timeout, self._pulse = stall_timeout, Pulse()
        shards.cache.progress = self._pulse.beat
        reader = BatchReader(
            shards, kind, self.order, stride=batch_size, seed=seed, limits=self.limits, pulse=self._pulse
        )
        self._requests = _Requests(shards, self.order, batch_size, rank, world_size)
        self._loader = DataLoader(
            reader,
            batch_size=None,
            sampler=self._requests,
            num_workers=num_workers,
            collate_fn=as_is,
            generator=torch.Generator(),  # or each epoch would draw from the process's own
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
        # A trainer holds its loader in circles. Were the DataLoader part of one, collecting it would wait five seconds
        # for each worker; so it is held from outside, and let go as soon as this object goes.
        weakref.finalize(self, len, (self._loader,)).atexit = False

    def __len__(self) -> int:
        """Batches in an epoch: the same on every rank."""
        return len(self.shards) // self.batch_size

    @property
    def sampler(self) -> "ShardLoader":
        """Itself: Lightning calls `set_epoch` of a loader's sampler."""
        return self

    @property
    def epoch(self) -> int:
        return self._position[0]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives. A restored place in this very epoch stays."""
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
        """This rank's share of a batch, each sample as "shard: key"; of one that was substituted, the bad one."""
        share = self.batch_size // self.world_size
        start = batch * self.batch_size + self.rank * share
        samples = self.order(epoch).samples(start, start + share)
        for sample in samples:
            with suppress(BadSample):
                self.shards.members(sample)  # opens the index, which only workers may have done
        return [self.shards.describe(sample) for sample in samples]

    def state_dict(self) -> dict[str, Any]:
        epoch, consumed = self._position
        if consumed == len(self):
            epoch, consumed = epoch + 1, 0
        return {"epoch": epoch, "batches_consumed": consumed, "content": self.shards.content} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"cannot resume: {name} was {state.get(name)!r} and is {value!r} now; the order of samples would "
                    "not be the same. Restore it, or start a new run from the weights alone"
                )
        self._compare_content(state.get("content", "names and counts:"))
        self._position, self._resume = (int(state["epoch"]), int(state["batches_consumed"])), True

    def _compare_content(self, theirs: str) -> None:
        kind, ours = theirs.partition(":")[0], self.shards.content
        if kind != ours.partition(":")[0]:  # a checkpoint of an earlier version, or a manifest written since
            warnings.warn(
                f"resuming on shards of the same names and counts; whether they hold the same cannot be compared: the "
                f"checkpoint knows their {kind}, now their {ours.partition(':')[0]} are known",
                stacklevel=3,
            )
        elif theirs != ours:
            raise ValueError(
                f"cannot resume: the shards have the names and counts of those of the checkpoint, and other content "
                f"({ours}, not {theirs}). Restore them, or start a new run from the weights alone"
            )

    def _identity(self) -> dict[str, Any]:
        """What an epoch's batches follow from, beside epoch and augmentation."""
        return {
            "format": 1,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "window": self.window,
            "samples": len(self.shards),
            "shards": self.shards.fingerprint,
        }

    def _new_report(self, epoch: int, first: int) -> Report:
        total = len(self.shards)
        before = first * self.batch_size
        tail, beside = total % self.batch_size, self.shards.beside
        return Report(total, epoch, tail=tail, before=before, world_size=self.world_size, beside=beside)


class _Requests:
    """The sampler of a ShardLoader: this rank's slice of each global batch; shards are fetched and compared with their
    manifest a window ahead.

    It knows nothing of the loader: a circle of references would keep its processes until garbage is collected.
    """

    def __init__(
        self,
        shards: ShardSet | PictureSet,
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
            for _ in range(_PREPARING):
                # Daemons: an interpreter that exits does not wait until everything asked for is fetched.
                Thread(
                    target=_prepare_all, args=(self.shards, self._wanted), name="prepare-shards", daemon=True
                ).start()
        for number in numbers:
            if self.shards.in_cache(number) or self.shards.shards[number].sha256 is not None:
                self._wanted.put(number)


def _prepare_all(shards: ShardSet | PictureSet, wanted: SimpleQueue) -> None:
    while (number := wanted.get()) is not None:
        shards.prepare(number)


def _end(wanted: SimpleQueue) -> None:
    for _ in range(_PREPARING):
        wanted.put(None)


def as_is(batch: Any) -> Any:
    return batch


def _seed_generators(seed: int, epoch: int, sample: Sample) -> None:
    digest = hashlib.blake2b(struct.pack("4q", seed, epoch, *sample), digest_size=20).digest()  # once a sample: quick
    words = struct.unpack("=QIQ", digest)
    random.seed(words[0])
    np.random.seed(words[1])  # noqa: NPY002 (transforms use numpy's global generator)
    torch.default_generator.manual_seed(words[2])


@contextmanager
def _generators_restored(*, enabled: bool) -> Iterator[None]:
    """Leaves the process's generators as they were; a worker has them to itself and needs no such care."""
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
