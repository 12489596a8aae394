"""The processes of an evaluation: its ranks, their devices, and what all of them computed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of processes; (0, 1) where torch.distributed is not in use."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def resolve_device(device: str) -> str:
    """Return the device itself, or the one that "auto" means: CUDA where there is one.

    Raises:
        ValueError: torch does not find it.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device must be auto, cpu, or one that torch finds, got {device!r} ({reason})") from None
    return device


@contextmanager
def process_group(device: str) -> Iterator[str]:
    """Initialise torch.distributed in a block, if torchrun started several processes; yield the rank's device.

    Args:
        device: as `resolve_device` takes it; with several processes "cuda" means each rank's device.
    """
    device = resolve_device(device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # what kernels, and the choice among them, ask about
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in their order, on every rank."""
    _, world = rank_and_world()
    if world == 1:
        return [value]
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return values
