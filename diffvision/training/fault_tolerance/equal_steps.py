"""As many steps on every rank, because a rank with more batches than the others would wait for them for ever.

How ranks exchange numbers is in `rank_monitor`.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from diffvision.training.fault_tolerance.rank_monitor import Peers

REMEDY = "Give each as many (a DistributedSampler does; trainer.limit_train_batches cuts)"
LAST, NONE = 1, 2  # of a rank's batches in an epoch: this one is the last; there was none


class EvenRanks(pl.Callback):
    """Checks before the first step that all ranks read the same shards, and ends epochs on all ranks together.

    An epoch ends as soon as one rank has no batch left. If all loaders know their length, that costs no messages; if
    not, the ranks ask each other at each batch.

    Args:
        peers: the run's ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._asks = False  # whether ranks ask each other at each batch
        self._trained = 0  # batches of this epoch
        self._warned = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the ranks' shards and numbers of batches.

        Raises:
            ValueError: ranks read different shards, or one has no batch.
        """
        if self.peers.world > 1:
            check_shards(self.peers.gather(shards_of(trainer)))
            self._shorten(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count batches, and compare their numbers again where Lightning reloads the loaders."""
        self._trained = 0
        if self.peers.world > 1 and trainer.current_epoch and vars(trainer)["reload_dataloaders_every_n_epochs"]:
            self._shorten(trainer)

    def _shorten(self, trainer: pl.Trainer) -> None:
        """End the epoch of all ranks where the shortest rank's data end."""
        lengths = self.peers.gather(trainer.num_training_batches)
        self._asks = math.inf in lengths
        if min(lengths) == max(lengths):
            return
        if min(lengths) == 0:
            empty = [rank for rank, length in enumerate(lengths) if not length]
            raise ValueError(f"{name_ranks(empty)} no batch and the others up to {max(lengths)}: {REMEDY}")
        trainer.fit_loop.max_batches = min(lengths)
        # Lightning has computed val_check_batch from the length of each rank's loader.
        if trainer.val_check_batch not in (None, math.inf):
            trainer.val_check_batch = self.peers.min(int(trainer.val_check_batch))
        if not self._asks:
            left = ", ".join(f"rank {r} {n - min(lengths)} of {n}" for r, n in enumerate(lengths) if n > min(lengths))
            rank_zero_warn(f"ranks have different numbers of batches; each epoch leaves out: {left}. {REMEDY}")

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Mark this batch as the epoch's last if it is the last one of any rank."""
        self._trained += 1
        if not self._asks:
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress
        states = self._exchange(LAST if progress.is_last_batch else 0)
        if any(states) and not progress.is_last_batch:
            progress.is_last_batch = True  # so that this step and what follows it are as on the others
        if any(states) and not all(states) and not self._warned:
            self._warned = True
            last = [rank for rank, state in enumerate(states) if state]
            rank_zero_warn(
                f"{name_ranks(last)} no batch left after {self._trained} in an epoch and others have: theirs are left "
                f"out, in every epoch. {REMEDY}"
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Answer the others where this rank had no batch in the epoch."""
        if self._asks and self._trained == 0:
            self._exchange(NONE)

    def _exchange(self, state: int) -> list[int]:
        """Return every rank's state of its batches; raise ValueError where some ranks have none at all."""
        states = self.peers.max([state if rank == self.peers.rank else 0 for rank in range(self.peers.world)])
        empty = [rank for rank, state in enumerate(states) if state == NONE]
        if empty and len(empty) < len(states):
            raise ValueError(f"{name_ranks(empty)} no batch in this epoch and others have: {REMEDY}")
        return states


def shards_of(trainer: pl.Trainer) -> tuple[str, str] | None:
    """Return what identifies a loader's shards, and a description of them; None for a loader without shards."""
    shards = getattr(trainer.train_dataloader, "shards", None)
    fingerprint, content = getattr(shards, "fingerprint", None), getattr(shards, "content", None)
    if shards is None or fingerprint is None or content is None:
        return None
    return f"{fingerprint} {content}", f"{len(shards):,} samples in {len(shards.counts):,} shards ({content})"


def check_shards(seen: list[tuple[str, str] | None]) -> None:
    """Raise ValueError where ranks see different shards."""
    if len(set(seen)) == 1:
        return
    groups: dict[Any, list[int]] = {}
    for rank, shards in enumerate(seen):
        groups.setdefault(shards, []).append(rank)
    listed = "; ".join(f"{name_ranks(ranks)} {shards[1] if shards else 'none'}" for shards, ranks in groups.items())
    raise ValueError(f"ranks see different shards: {listed}. Put the same files where every rank looks")


def name_ranks(ranks: list[int]) -> str:
    """Return ranks as the subject of a sentence."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    numbers = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {numbers} have"
