"""Consistency of a run's ranks: none outlives the first, and all read the same shards.

If a rank fails, the launcher (torchrun, srun or Lightning's) ends the others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

import lightning.pytorch as pl

from diffvision.training.fault_tolerance.finite import gather_from_ranks

PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent has ended
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")  # environment variables of launchers that end ranks by themselves


def end_with_first_rank() -> None:
    """Let the kernel kill this rank when the first one, which started it (Trainer(devices=N)), ends."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or any(name in os.environ for name in LAUNCHERS):
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class SameShards(pl.Callback):
    """Checks before the first step that all ranks read the same shards."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the ranks' shards; a loader without shards is not compared.

        Raises:
            ValueError: ranks read different shards.
        """
        shards: Any = getattr(trainer.train_dataloader, "shards", None)
        mine = "none"
        if hasattr(shards, "fingerprint"):
            mine = f"{len(shards):,} samples in {len(shards.counts):,} shards ({shards.content}, {shards.fingerprint})"
        seen = gather_from_ranks(trainer, mine)
        for rank, theirs in enumerate(seen):
            if theirs != seen[0]:
                raise ValueError(f"all ranks must read the same shards: rank 0 has {seen[0]}, rank {rank} has {theirs}")
