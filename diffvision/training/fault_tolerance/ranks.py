"""What the ranks of a run say to each other besides gradients, and that none outlives the first.

A rank that fails is left to the launcher: torchrun, srun and Lightning's own end the others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent has ended
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")  # environment variables of launchers that end ranks by themselves


class Peers:
    """The ranks of a run, which exchange numbers; with one process, there is no one to exchange with.

    Numbers are sent over a separate gloo group, on CPUs: no accelerator's queue waits for them.

    Attributes:
        world: the number of processes.
    """

    def __init__(self) -> None:
        self.world = 1
        self._group: Any = None

    def join(self, trainer: pl.Trainer) -> None:
        """Connect the ranks; all of them call it together, once torch.distributed is initialised."""
        self.world = trainer.world_size
        if self.world > 1 and dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo")

    def leave(self) -> None:
        self._group = None

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


def end_with_first_rank() -> None:
    """Let the kernel end a rank that the first one has started (Trainer(devices=N)) when that one has ended."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or any(name in os.environ for name in LAUNCHERS):
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        raise SystemExit("the process that started this rank is gone: its error is above")


class SameShards(pl.Callback):
    """Checks before the first step that all ranks read the same shards, or they would train on wrong samples.

    Args:
        peers: the run's ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the ranks' shards.

        Raises:
            ValueError: ranks read different shards.
        """
        if self.peers.world > 1:
            check_shards(self.peers.gather(describe_shards(trainer)))


def describe_shards(trainer: pl.Trainer) -> str:
    """Return what identifies a loader's shards; "none" for a loader without shards."""
    shards = getattr(trainer.train_dataloader, "shards", None)
    fingerprint, content = getattr(shards, "fingerprint", None), getattr(shards, "content", None)
    if shards is None or fingerprint is None or content is None:
        return "none"
    return f"{len(shards):,} samples in {len(shards.counts):,} shards ({content}, {fingerprint})"


def check_shards(seen: Sequence[str]) -> None:
    """Raise ValueError where ranks see different shards."""
    for rank, shards in enumerate(seen):
        if shards != seen[0]:
            raise ValueError(
                f"ranks see different shards: rank 0 has {seen[0]}; rank {rank} has {shards}. Put the same files where "
                "every rank looks"
            )
