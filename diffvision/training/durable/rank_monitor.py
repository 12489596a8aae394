"""The processes of a run beside their gradients: a word at each step, and the news that one of them has failed.

A collective waits for every rank. One that has failed never comes, and its peers would wait for half an hour; so a
thread of each rank looks after the others and after the process that started it, and ends its own when they are gone.
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
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

LOOK = 0.5  # seconds between two looks at the others
GRACE = 4.0  # seconds that a rank has to end by itself: to tell its error, to close its loggers
LAUNCHER = "DIFFVISION_LAUNCHER"  # in the environment: the process that starts ranks, by its number
FAILED = "failed"
GONE = re.compile("closed by peer|reset by peer|Broken pipe|Connection refused|failed to recv|[Ss]ocket.*clos", re.S)


class LostRank(ConnectionError):
    """This process ends because another one has; the message is which, and its error."""


class Peers:
    """What the ranks of a run tell each other; with one process, nothing.

    Numbers go over a gloo group of their own, on CPUs: no accelerator's queue waits for them.

    Attributes:
        rank, world: of how many processes this is which.
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self._group: Any = None
        self._watch: Watch | None = None

    def join(self, trainer: pl.Trainer) -> None:
        """To be called by all ranks together, once torch.distributed is up."""
        self.rank, self.world = trainer.global_rank, trainer.world_size
        if self.world == 1 or not dist.is_initialized() or self._watch is not None:
            return
        self._group = dist.new_group(backend="gloo")
        store = dist.distributed_c10d._get_default_store()
        # A client of its own: the ranks' one is locked while they wait for each other.
        own = dist.PrefixStore(f"diffvision/{dist.get_world_size()}/{id_of(self._group)}", store.clone())
        self._watch = Watch(self.rank, own, started_by(), taken_over(trainer))
        self._watch.start()

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Of each number the largest that any rank has."""
        if self._group is None:
            return list(numbers)
        sent = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self._group)
        return sent.tolist()

    def least(self, number: int) -> int:
        """The smallest number that any rank has."""
        return -self.most([-number])[0]

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def fail(self, error: BaseException) -> None:
        """Tell the others of this rank's error, unless it is but the echo of theirs; this process ends soon."""
        if self._watch is not None:
            self._watch.fail(error)

    def leave(self) -> None:
        """Nobody is looked after any more."""
        if self._watch is not None:
            self._watch.stopped.set()
        self._watch = self._group = None

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """An error of this rank as it was raised first; `LostRank` where it is the echo of another's."""
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
    """Looks whether another rank has failed, or the starting process is gone, and ends this process if need be.

    Args:
        store: where ranks write; None where there are no others yet.
        parent: number of the process that started this one and must outlive it; None: any may go.
        started: ranks that this process has started, the first of them rank 1.

    Attributes:
        error: of this rank, when it has failed.
        reason: why it must end, in words, when that is another's doing.
    """

    def __init__(self, rank: int, store: Any, parent: int | None, started: Sequence[subprocess.Popen] = ()) -> None:
        super().__init__(daemon=True, name="look-after-ranks")
        self.rank, self.store, self.parent, self.started = rank, store, parent, list(started)
        self.stopped = threading.Event()
        self.error: BaseException | None = None
        self.reason: str | None = None

    def run(self) -> None:
        while not self.stopped.wait(LOOK):
            if self.parent is not None and os.getppid() != self.parent:
                end()  # nobody is left to be told
            if self.error is None and not self.look():
                continue
            if self.stopped.wait(GRACE):
                return
            if self.reason is not None:
                print(f"diffvision: error: {self.reason}", file=sys.stderr, flush=True)
            else:
                traceback.print_exception(self.error)
                sys.stderr.flush()
            end()

    def look(self) -> bool:
        """Whether another rank has failed."""
        if told := self._told() or self._ended():
            self.reason = f"rank {self.rank} ends because {told}"
        return bool(told)

    def _told(self) -> str:
        """What the first rank that failed has told, if one has."""
        if self.store is None:
            return ""
        try:
            if not self.store.check([FAILED]):
                return ""
            rank, _, error = self.store.get(FAILED).decode().partition(" ")
        except Exception:  # whatever the store raises: its server, a process of this run, is gone
            return "the process that ranks meet at is gone"
        return "" if int(rank) == self.rank else f"rank {rank} has failed: {error}"

    def _ended(self) -> str:
        """Which of the started ranks is gone without having told anything, if one is."""
        for rank, process in enumerate(self.started, start=1):
            if status := process.poll():
                how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
                return f"rank {rank} is gone: {how}"
        return ""

    def fail(self, error: BaseException) -> None:
        if self.error is not None:
            return
        self.error = error
        if self.reason is None and not self.look():
            if GONE.search(str(error)):
                self.reason = f"rank {self.rank} ends because another rank is gone without a word: killed, perhaps"
                error = LostRank("it lost the connection to a rank that is gone without a word: killed, perhaps")
            try:
                self.store.compare_set(FAILED, "", f"{self.rank} {type(error).__name__}: {error}")
            except Exception:  # the store's server is gone too
                return


def alive(process: int) -> bool:
    """Whether a process of that number runs; one that has ended and waits for its parent does not. True where there is
    no /proc to tell."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc/self").exists()


def end() -> None:
    """Ends this process now, whatever its main thread waits for, and the workers that it has."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def taken_over(trainer: pl.Trainer) -> list[subprocess.Popen]:
    """The ranks that Lightning's launcher has started, which are now ours to look after.

    Its own watch kills this process, the first rank, as soon as one of them has an exit status: also that of a
    preempted run, and before this one could tell the error.
    """
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return []
    started = list(launcher.procs)
    launcher.procs.clear()
    return started


def id_of(group: Any) -> str:
    """The same on all ranks, another for each group."""
    return str(group.group_name)


def started_by() -> int | None:
    """The process that started this rank, as torchrun's agent or the first rank; None where that may end before it."""
    parent = os.getppid()
    return parent if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get(LAUNCHER) == str(parent) else None


@contextmanager
def looked_after() -> Iterator[None]:
    """While a rank has not met the others yet: it ends with the process that started it.

    Raises:
        LostRank: that one has ended already, while this one was importing.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher and os.environ.get("LOCAL_RANK", "0") != "0" and not alive(int(launcher)):
        raise LostRank(f"process {launcher}, which started this rank, is gone: its error is above")
    watch = Watch(0, None, started_by())
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
    """Tells the other ranks of an exception on this one. It must be the first of the callbacks: those after it may wait
    for the others, who would not come."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.peers.join(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):  # which all ranks have agreed upon
            self.peers.leave()
        else:
            self.peers.fail(exception)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.peers.leave()
