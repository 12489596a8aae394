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
def limit_threads(device: str | torch.device, *models: nn.Module) -> Iterator[None]:
    """Use one CPU thread in the block if all its models are small and on a CPU.

    Threads speed up a small model's short operations little, and if another process uses one of the cores, each
    operation waits for that core, which can make a step ten times slower. A number of threads chosen by
    OMP_NUM_THREADS or torch.set_num_threads is kept.

    Args:
        device: the models' device.
        models: the models that run in the block.
    """
    threads = torch.get_num_threads()
    if torch.device(device).type != "cpu" or threads == 1 or _is_chosen(threads) or not all(map(is_small, models)):
        yield
        return
    _print_once(f"using 1 CPU thread, because the model is small; for {threads} set OMP_NUM_THREADS={threads}")
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def is_small(model: nn.Module) -> bool:
    """Return whether a model has fewer than `SMALL` parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if not is_lazy(parameter)) < SMALL


def _is_chosen(threads: int) -> bool:
    """Return whether the user chose the number of threads: torch's default is the number of cores, or half of it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return any(name in os.environ for name in VARIABLES) or threads not in (cores, cores // 2)


@cache
def _print_once(text: str) -> None:
    """Print a text once in a process."""
    print(text, file=sys.stderr, flush=True)
