"""The same shards on every rank, because ranks with others would train on wrong samples, or wait for ever."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from diffvision.training.fault_tolerance.rank_monitor import Peers


class SameShards(pl.Callback):
    """Checks before the first step that all ranks read the same shards.

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
            check_shards(self.peers.gather(shards_of(trainer)))


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
