"""Consistency of a run's ranks: none outlives the first, and all read the same shards.

If a rank fails, the launcher (torchrun, srun or Lightning's) ends the others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

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
        """Compare the ranks' shards.

        Raises:
            ValueError: ranks read different shards.
        """
        check_shards(gather_from_ranks(trainer, describe_shards(trainer)))


def describe_shards(trainer: pl.Trainer) -> str:
    """Return a text that identifies the training loader's shards; "none" for a loader without shards."""
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
