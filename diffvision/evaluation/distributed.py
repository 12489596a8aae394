"""Rows from every rank, in the order of the ranks, however many each has."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


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
        resolved = torch.device(device)
    except RuntimeError:  # not even a name
        resolved = None
    counts = {"cpu": 1, "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0}
    counts["mps"] = int(torch.backends.mps.is_available())
    if resolved is None or (resolved.index or 0) >= counts.get(resolved.type, 0):
        raise ValueError(f"device {device!r} is not here: give auto, cpu, or cuda where torch finds a GPU")
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


def gather_rows(rows: Tensor | None, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the rows [n_r, ...] of all ranks, concatenated in their order: [sum n_r, ...] on the CPU, on every rank.

    Args:
        rows: of at most two dimensions; None on a rank that has none (and so does not know their width).
        device: one that the process group can send from (a CUDA device under NCCL).
        dtype: of the rows, on every rank.
    """
    _, world = rank_and_world()
    if world == 1:
        return torch.empty(0, dtype=dtype) if rows is None else rows.cpu()
    shape = [0, 0] if rows is None else [len(rows), rows.shape[1] if rows.ndim == 2 else 0]
    shapes = torch.empty(world, 2, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(shapes, torch.tensor([shape], device=device))
    counts, width = shapes[:, 0].tolist(), int(shapes[:, 1].max())
    # All ranks send equally many rows, padded with zeros: collectives need equal shapes.
    tail = [width] if width else []
    sent = torch.zeros(max(counts), *tail, dtype=dtype, device=device)
    if rows is not None:
        sent[: len(rows)] = rows.to(device)
    received = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(received, sent)
    return torch.cat([block[:count].cpu() for block, count in zip(received, counts, strict=True)])
