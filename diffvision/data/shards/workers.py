"""The batches of a DataLoader's workers: one clear error where a worker is stuck, or was killed."""

import logging
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader

from diffvision.data.shards.report import WorkerError

STALL_TIMEOUT = 300.0
"""Seconds; less than the ten minutes after which NCCL gives up on the other ranks, to report the cause first."""
LONGEST_STALL = 604_800.0
"""Seconds, a week: a thread cannot wait for ever."""

_STUCK = (
    "no batch came within {:g} s (stall_timeout): check the disk, the server and the transform, or raise stall_timeout"
)
_log = logging.getLogger(__name__)


def timeout_of(num_workers: int, stall_timeout: float) -> float:
    """Return the time limit of a DataLoader, of which `read_batches` allows two in a row."""
    return stall_timeout / 2 if num_workers else 0.0


def read_batches(loader: DataLoader, workers: list[Any]) -> Iterator[Any]:
    """Yield the loader's batches; `workers` gets the processes that it starts.

    Raises:
        WorkerError: no batch came within twice the loader's timeout, or a worker ended. The other workers are ended.
    """
    before = multiprocessing.active_children()
    batches = iter(loader)
    workers += [process for process in multiprocessing.active_children() if process not in before]
    late = False
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            stuck = str(error).startswith("DataLoader timed out")
            if stuck and not late:  # as after this process was suspended, while its workers have a batch ready
                late = True
                _log.warning("no batch came within %g s", loader.timeout)
                continue
            message = _STUCK.format(2 * loader.timeout) if stuck else _death(workers, error)
            if not message:
                raise
            _end(workers)
            raise WorkerError(message) from error
        late = False
        yield batch


def _death(workers: list[Any], error: Exception) -> str:
    """Return which worker ended and how, or "" if all are alive; a death raises many kinds of error."""
    pause = 1.0 if isinstance(error, OSError | EOFError) else 0.0  # a worker's pipes close before it has ended
    for worker in workers:
        with suppress(RuntimeError):  # DataLoader's signal handler may raise for a worker right here
            worker.join(pause)
    for worker in workers:
        if (code := worker.exitcode) is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            return (
                f"data worker (process {worker.pid}) {how}: after SIGKILL (no memory) lower num_workers, after SIGBUS "
                "(/dev/shm is full) raise --shm-size"
            )
    return ""


def _end(workers: list[Any]) -> None:
    """Kill the workers and wait for them, so that DataLoader's signal handler raises here, where it is suppressed."""
    for act in (lambda worker: worker.kill(), lambda worker: worker.join(1.0)):
        for worker in workers:
            with suppress(RuntimeError):
                act(worker)
