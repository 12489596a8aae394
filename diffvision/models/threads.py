"""How many threads a small model computes with on a CPU."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from torch.nn.parameter import is_lazy

SMALL = 5_000_000
"""Parameters below which a model is small."""
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def few_threads(device: str | torch.device, *models: nn.Module) -> Iterator[None]:
    """Compute with one thread in a block, if all its models are small and on a CPU.

    The operations of a small model are so short that threads take as long to wait for each other as to compute. Where
    another process has one of the cores, each operation waits until that core is free, and a step takes ten times as
    long. A number of threads that was set, by OMP_NUM_THREADS or torch.set_num_threads, stays.

    Args:
        device: of the models.
        models: which the block runs.
    """
    threads = torch.get_num_threads()
    if torch.device(device).type != "cpu" or threads == 1 or _is_set(threads) or not all(map(is_small, models)):
        yield
        return
    _say(f"using 1 CPU thread, because the model is small; for {threads} set OMP_NUM_THREADS={threads}")
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def is_small(model: nn.Module) -> bool:
    """Return whether a model has fewer than `SMALL` parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if not is_lazy(parameter)) < SMALL


def _is_set(threads: int) -> bool:
    """Return whether the number of threads was set; torch's own is that of cores, or of pairs of hyperthreads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return any(name in os.environ for name in VARIABLES) or threads not in (cores, cores // 2)


@cache
def _say(text: str) -> None:
    """Print a text once in a process."""
    print(text, file=sys.stderr, flush=True)
