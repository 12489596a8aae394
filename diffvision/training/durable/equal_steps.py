"""As many steps on every rank: a rank with a batch more than the others would wait for them for ever."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from diffvision.training.durable.rank_monitor import Peers

REMEDY = "Give each as many (a DistributedSampler does; trainer.limit_train_batches cuts)"
LAST, NONE = 1, 2  # of a rank's batches in an epoch: this one is the last; there was none


class EvenRanks(pl.Callback):
    """Sees before the first step that all ranks read the same shards, and ends each epoch where the first rank has no
    batch left.

    A loader that says how long it is costs nothing; of one that does not, the ranks ask each other at each batch.

    Args:
        peers: the run's ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._asks = False  # whether batches are counted as they come
        self._trained = 0  # of this epoch
        self._told = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.peers.join(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raises ValueError where ranks read different shards, or one has no batch."""
        if self.peers.world > 1:
            same_shards(self.peers.gathered(shards_of(trainer)))
            self._even(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trained = 0
        if self.peers.world > 1 and trainer.current_epoch and vars(trainer)["reload_dataloaders_every_n_epochs"]:
            self._even(trainer)

    def _even(self, trainer: pl.Trainer) -> None:
        lengths = self.peers.gathered(trainer.num_training_batches)
        self._asks = math.inf in lengths
        if min(lengths) == max(lengths):
            return
        if min(lengths) == 0:
            empty = [rank for rank, length in enumerate(lengths) if not length]
            raise ValueError(f"{named(empty)} no batch and the others up to {max(lengths)}: {REMEDY}")
        trainer.fit_loop.max_batches = min(lengths)
        if trainer.val_check_batch not in (None, math.inf):  # which Lightning has computed from each rank's own length
            trainer.val_check_batch = self.peers.least(int(trainer.val_check_batch))
        if not self._asks:
            left = ", ".join(f"rank {r} {n - min(lengths)} of {n}" for r, n in enumerate(lengths) if n > min(lengths))
            rank_zero_warn(f"ranks have different numbers of batches; each epoch leaves out: {left}. {REMEDY}")

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._trained += 1
        if not self._asks:
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress
        states = self._told_of(LAST if progress.is_last_batch else 0)
        if any(states) and not progress.is_last_batch:
            progress.is_last_batch = True  # so that this step and what follows it are as on the others
        if any(states) and not all(states) and not self._told:
            self._told = True
            last = [rank for rank, state in enumerate(states) if state]
            rank_zero_warn(
                f"{named(last)} no batch left after {self._trained} in an epoch and others have: what they have left "
                f"is left out, in every epoch. {REMEDY}"
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._asks and self._trained == 0:
            self._told_of(NONE)

    def _told_of(self, state: int) -> list[int]:
        """What each rank says of its batches. Raises ValueError where some have none at all."""
        states = self.peers.most([state if rank == self.peers.rank else 0 for rank in range(self.peers.world)])
        empty = [rank for rank, state in enumerate(states) if state == NONE]
        if empty and len(empty) < len(states):
            raise ValueError(f"{named(empty)} no batch in this epoch and others have: {REMEDY}")
        return states


def shards_of(trainer: pl.Trainer) -> tuple[str, str] | None:
    """What tells a loader's shards from others, and that in words for a reader; None where it reads none."""
    shards = getattr(trainer.train_dataloader, "shards", None)
    fingerprint, content = getattr(shards, "fingerprint", None), getattr(shards, "content", None)
    if shards is None or fingerprint is None or content is None:
        return None
    return f"{fingerprint} {content}", f"{len(shards):,} samples in {len(shards.counts):,} shards ({content})"


def same_shards(seen: list[tuple[str, str] | None]) -> None:
    """ValueError where ranks see other shards."""
    if len(set(seen)) == 1:
        return
    groups: dict[Any, list[int]] = {}
    for rank, own in enumerate(seen):
        groups.setdefault(own, []).append(rank)
    told = "; ".join(f"{named(ranks)} {own[1] if own else 'none'}" for own, ranks in groups.items())
    raise ValueError(f"ranks see different shards: {told}. Put the same files where every rank looks")


def named(ranks: list[int]) -> str:
    """Ranks as the subject of a sentence."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    few = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {few} have"
