"""Stuck workers are noticed, named and ended, so that a run stops with an error instead of waiting for ever.

DataLoader's `timeout` does not notice a worker that was stopped: the main process waits while a tensor is handed over,
where no time limit holds. So a thread watches the progress: while a batch is waited for, some sample must be made or
some piece of a shard arrive every `stall_timeout` seconds.
"""

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

STALL_TIMEOUT = 300.0
"""Seconds; less than the ten minutes after which NCCL gives up on the other ranks, to report the cause first."""

_WARN_AFTER = 0.2  # of the timeout: when a long wait is logged
_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or network drive",
    "Z": "ended",
    "R": "running",
    "S": "asleep",
}
_log = logging.getLogger(__name__)


class StalledError(RuntimeError):
    """No process that reads data made progress for too long."""


class WorkerDiedError(RuntimeError):
    """A process that reads data ended in the middle of it."""


class Pulse:
    """The time at which any of the processes that share it last made progress."""

    def __init__(self) -> None:
        self.clock = multiprocessing.RawValue("d", 0.0)  # as `time.monotonic`

    def beat(self) -> None:
        """Note progress, now."""
        self.clock.value = time.monotonic()


def watched(loader: DataLoader, pulse: Pulse, stall_timeout: float) -> Iterator[Any]:
    """Yield the loader's batches.

    Raises:
        StalledError: a batch was waited for, and for `stall_timeout` seconds there was no pulse. The workers are ended.
        WorkerDiedError: a worker was killed, or left.
    """
    if stall_timeout <= 0:
        raise ValueError(f"stall_timeout is {stall_timeout} seconds: it must be above 0")
    batches = iter(loader)
    workers = getattr(batches, "_workers", [])
    watch = _Watch([worker.pid for worker in workers], pulse, stall_timeout)
    try:
        while True:
            try:
                watch.since = time.monotonic()
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                if watch.stall:
                    _end(workers)
                    raise StalledError(watch.stall) from error
                if deaths := _deaths(workers, wait=isinstance(error, (OSError, EOFError))):
                    _end(workers)
                    raise WorkerDiedError(deaths) from error
                raise
            finally:
                watch.since = None
            yield batch
    finally:
        watch.ended.set()


def _end(workers: list[Any]) -> None:
    """Kill the workers, and wait until they have ended.

    DataLoader's signal handler raises in the main process when a worker ends, a little after its pipes close: it should
    raise here, where it is suppressed, and not in the code that handles our error or while DataLoader is deleted.
    """
    for act in (lambda worker: worker.kill(), lambda worker: worker.join(1.0)):
        for worker in workers:
            with suppress(RuntimeError):
                act(worker)


def _deaths(workers: list[Any], *, wait: bool) -> str:
    """Return which workers died of what, or ""; deaths raise many kinds of error, such as a reset connection."""
    ends: dict[int, str] = {}
    for _ in range(len(workers) + 1):
        with suppress(RuntimeError):  # DataLoader's signal handler may raise for a worker right here
            if wait and workers:
                wait = False
                ready = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1.0)
                for worker in workers:
                    if worker.sentinel in ready:
                        worker.join(1.0)  # its pipes close a little before it can be asked for its exit code
            for number, worker in enumerate(workers):
                if (code := worker.exitcode) is not None:
                    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
                    ends[number] = f"worker {number} (process {worker.pid}) {how}"
            break
    if not ends:
        return ""
    return (
        f"{', '.join(ends.values())}. SIGKILL is mostly the system's out-of-memory killer: see dmesg, and take fewer "
        "num_workers. SIGBUS is a full /dev/shm. Resume from the last checkpoint"
    )


class _Watch:
    """A thread that looks at the workers while a batch is waited for; none where there are no workers."""

    def __init__(self, workers: list[int], pulse: Pulse, timeout: float) -> None:
        self.stall = ""  # what was stuck, once something was
        self._workers, self._pulse, self._timeout = workers, pulse, timeout
        self.since: float | None = None  # when the wait for a batch began
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-workers", daemon=True)
        if workers:
            self._thread.start()

    def _run(self) -> None:
        """Warn, and then kill the workers, when no batch or sample has come for too long."""
        tick = min(1.0, self._timeout / 10)
        quiet, warned, before = 0.0, False, time.monotonic()
        while not self.ended.wait(tick):
            now, since = time.monotonic(), self.since
            if since is None or max(since, self._pulse.clock.value) > before:
                quiet, warned = 0.0, False
            else:
                quiet += min(now - before, 2 * tick)  # bounded, because this process may have been suspended itself
            before = now
            if quiet and any(_state(pid) == _STATES["Z"] for pid in self._workers):
                return  # a death DataLoader sees by itself, in five seconds at most
            if quiet > _WARN_AFTER * self._timeout and not warned:
                warned = True
                _log.warning("no data for %.0f s: %s", quiet, self._described())
            if quiet > self._timeout:
                self._kill(quiet)
                return

    def _kill(self, quiet: float) -> None:
        self.stall = (
            f"no batch came and no sample was made for {quiet:.0f} s (stall_timeout): {self._described()}. They are "
            "ended. A stopped process was stopped from outside (kill -STOP, a debugger); one that waits for a disk is "
            "on a drive that hangs; one that runs is in a transform without end, or the limit is too short for it. "
            "Resume from the last checkpoint"
        )
        for pid in self._workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # reaches a stopped process too; DataLoader then sees it dead

    def _described(self) -> str:
        return ", ".join(f"worker {n} (process {pid}) is {_state(pid)}" for n, pid in enumerate(self._workers))


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone, or not visible here"
    return _STATES.get(letter, f"in state {letter}")
