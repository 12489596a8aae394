"""The DataLoader of our loaders, and its batches: one clear error where a worker is stuck, or was killed."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from diffvision.data.shards.report import WorkerError

STALL_TIMEOUT = 300.0
"""Seconds; less than the ten minutes after which NCCL gives up on the other ranks, to report the cause first."""
_REMEDY = (
    "check the disk, the server and the transform, or raise stall_timeout; if memory was full lower num_workers, if "
    "/dev/shm was full (SIGBUS) raise --shm-size"
)


def make_loader(
    reader: Dataset, requests: Iterable[Any], num_workers: int, stall_timeout: float, **settings: Any
) -> DataLoader:
    """Return a DataLoader that reads one request after another, for `read_batches`; settings are DataLoader's."""
    return DataLoader(
        reader,
        batch_size=None,
        sampler=requests,
        num_workers=num_workers,
        timeout=stall_timeout / 2 if num_workers else 0.0,  # of which two in a row are a stall
        collate_fn=tuple,  # of what is a pair already
        generator=torch.Generator(),  # else each epoch would draw from the process's generator
        **settings,
    )


def read_batches(loader: DataLoader) -> Iterator[Any]:
    """Yield the loader's batches; raise WorkerError where none came within twice its timeout, or a worker ended."""
    batches, is_late = iter(loader), False
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            message = str(error).partition("\n")[0]
            # A worker that is killed while it hands over a batch breaks the connection before it counts as dead.
            is_broken = loader.num_workers > 0 and not isinstance(error, RuntimeError)
            if is_broken and not message.startswith("Caught "):  # as errors do that a worker raised
                message = "DataLoader worker ended"
            if not message.startswith("DataLoader "):
                raise
            if "timed out" in message and not is_late:  # this process may have been suspended, and its workers with it
                is_late = True
                continue
            raise WorkerError(f"{message.rstrip('. ')}: {_REMEDY}") from error
        is_late = False
        yield batch
