"""What the ranks of a run say to each other besides gradients: numbers now and then, and that one of them has failed.

A collective waits for every rank. One that has failed never comes, and the others would wait for half an hour; so a
thread of each rank watches the others and the process that started it, and ends its own process when they are gone.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from diffvision.training.fault_tolerance import lightning_internals

INTERVAL = 0.5  # seconds between two checks of the other ranks
GRACE = 4.0  # seconds that a rank has to end by itself: to report its error, to close its loggers
LAUNCHER = "DIFFVISION_LAUNCHER"  # in the environment: the number of the process that starts ranks
FAILED = "failed"
GONE = re.compile("closed by peer|reset by peer|Broken pipe|Connection refused|failed to recv|[Ss]ocket.*clos", re.S)


class LostRank(ConnectionError):
    """This process ends because another one has; the message says which, and its error."""


class Peers:
    """The ranks of a run, which exchange numbers and errors; with one process, there is no one to exchange with.

    Numbers are sent over a separate gloo group, on CPUs: no accelerator's queue waits for them.

    Attributes:
        rank: the index of this process.
        world: the number of processes.
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self._group: Any = None
        self._watch: Watch | None = None

    def join(self, trainer: pl.Trainer) -> None:
        """Connect the ranks; all of them call it together, once torch.distributed is initialised."""
        self.rank, self.world = trainer.global_rank, trainer.world_size
        if self.world == 1 or not dist.is_initialized() or self._watch is not None:
            return
        self._group = dist.new_group(backend="gloo")
        store = dist.distributed_c10d._get_default_store()
        # A separate client: the process group's is locked while ranks wait for each other.
        separate = dist.PrefixStore(f"diffvision/{dist.get_world_size()}/{self._group.group_name}", store.clone())
        started = lightning_internals.take_started_ranks(trainer.strategy.launcher)
        self._watch = Watch(self.rank, separate, launcher_process(), started)
        self._watch.start()

    def max(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number over all ranks."""
        if self._group is None:
            return list(numbers)
        sent = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self._group)
        return sent.tolist()

    def min(self, number: int) -> int:
        """Return the smallest number over all ranks."""
        return -self.max([-number])[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def fail(self, error: BaseException) -> None:
        """Report this rank's error to the others, unless one of theirs is the cause; this process ends soon."""
        if self._watch is not None:
            self._watch.fail(error)

    def leave(self) -> None:
        if self._watch is not None:
            self._watch.stopped.set()
        self._watch = self._group = None

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Raise an error of this rank as it was raised first, or `LostRank` where it follows from another's."""
        watch: Watch | None = None
        try:
            yield
        except BaseException as error:
            watch, self._watch = self._watch, None
            if watch is None or watch.error is None:
                raise
            if watch.reason is not None:
                raise LostRank(watch.reason) from error
            raise watch.error from watch.error.__cause__
        finally:
            if watch is not None:
                watch.stopped.set()
            self.leave()


class Watch(threading.Thread):
    """A thread that ends this process when another rank has failed, or the process that started it is gone.

    Args:
        rank: of this process.
        store: where ranks write; None where there are no others yet.
        parent: number of the process that started this one and must outlive it; None: any may end first.
        started: ranks that this process has started, the first of them rank 1.

    Attributes:
        error: of this rank, when it has failed.
        reason: why this process must end, when another one is the cause.
    """

    def __init__(self, rank: int, store: Any, parent: int | None, started: Sequence[subprocess.Popen] = ()) -> None:
        super().__init__(daemon=True, name="watch-ranks")
        self.rank, self.store, self.parent, self.started = rank, store, parent, list(started)
        self.stopped = threading.Event()
        self.error: BaseException | None = None
        self.reason: str | None = None

    def run(self) -> None:
        """Check the others until the run ends."""
        while not self.stopped.wait(INTERVAL):
            if self.parent is not None and os.getppid() != self.parent:
                end_process()  # nobody is left to report to
            if self.error is None and not self.look():
                continue
            if self.stopped.wait(GRACE):
                return
            if self.reason is not None:
                print(f"diffvision: error: {self.reason}", file=sys.stderr, flush=True)
            else:
                traceback.print_exception(self.error)
                sys.stderr.flush()
            end_process()

    def look(self) -> bool:
        """Return whether another rank has failed."""
        if cause := self._read_reported_failure() or self._find_ended_rank():
            self.reason = f"rank {self.rank} ends because {cause}"
        return bool(cause)

    def _read_reported_failure(self) -> str:
        """Return what the first rank that failed has reported, or "" if none has."""
        if self.store is None:
            return ""
        try:
            if not self.store.check([FAILED]):
                return ""
            rank, _, error = self.store.get(FAILED).decode().partition(" ")
        except Exception:  # whatever the store raises: its server, a process of this run, is gone
            return "the process that ranks meet at is gone"
        return "" if int(rank) == self.rank else f"rank {rank} has failed: {error}"

    def _find_ended_rank(self) -> str:
        """Say which of the started ranks is gone without a report, or return "" if none is."""
        for rank, process in enumerate(self.started, start=1):
            if status := process.poll():
                how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
                return f"rank {rank} is gone: {how}"
        return ""

    def fail(self, error: BaseException) -> None:
        """Note this rank's error and report it to the others, unless one of theirs is the cause."""
        if self.error is not None:
            return
        self.error = error
        if self.reason is None and not self.look():
            if GONE.search(str(error)):
                self.reason = f"rank {self.rank} ends because another rank is gone without a report: perhaps killed"
                error = LostRank("it lost the connection to a rank that is gone without a report: perhaps killed")
            try:
                self.store.compare_set(FAILED, "", f"{self.rank} {type(error).__name__}: {error}")
            except Exception:  # the store's server is gone too
                return


def is_alive(process: int) -> bool:
    """Return whether a process of that number runs, and is not a zombie; True where there is no /proc to read."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc/self").exists()


def end_process() -> None:
    """End this process and its workers now, even while its main thread waits."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def launcher_process() -> int | None:
    """Return the process that started this rank (torchrun's agent, the first rank); None where it may end first."""
    parent = os.getppid()
    return parent if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get(LAUNCHER) == str(parent) else None


@contextmanager
def watch_launcher() -> Iterator[None]:
    """End this process with the one that started it, also before it is connected to the other ranks.

    Raises:
        LostRank: that one has ended already, while this one was importing.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher and os.environ.get("LOCAL_RANK", "0") != "0" and not is_alive(int(launcher)):
        raise LostRank(f"process {launcher}, which started this rank, is gone: its error is above")
    watch = Watch(0, None, launcher_process())
    if watch.parent is not None:
        watch.start()
    else:
        os.environ[LAUNCHER] = str(os.getpid())  # for the ranks that this one starts
    try:
        yield
    finally:
        watch.stopped.set()
        if watch.parent is None:
            os.environ.pop(LAUNCHER, None)


class FailureNews(pl.Callback):
    """Reports an exception on this rank to the others.

    It must be the first of the callbacks: those after it may wait for the other ranks, which would not come.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.peers.join(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Report the exception, unless all ranks have agreed on it."""
        if isinstance(exception, SIGTERMException):
            self.peers.leave()
        else:
            self.peers.fail(exception)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.peers.leave()
