"""Two ranks of plain Lightning, with our callbacks or without, one of which does something to itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from battery.ranks import Ended, Ranks
from battery.small import short
from diffvision.training.durable.checkpoints import DurableCheckpointIO, newest_valid
from diffvision.training.durable.equal_steps import EvenRanks
from diffvision.training.durable.preemption import Preemption
from diffvision.training.durable.rank_monitor import FailureNews, Peers, watched_launcher

TIMEOUT = 10  # seconds that the process group of a stock run waits, where it would be half an hour
KEPT = Path("kept")


class Line(pl.LightningModule):
    """A linear layer, which does something to its process at a step, on some ranks."""

    def __init__(self, at: int | None = None, do: Callable[[], object] = int, ranks: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.at, self.do, self.ranks = nn.Linear(3, 3), at, do, ranks

        self.saves = False  # whether ModelCheckpoint saves on an exception, which takes all ranks

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.at and self.global_rank in self.ranks:
            self.do()
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def plain_fit(module: Line, data: DataLoader | None = None, *, ours: bool, devices: int = 1, epochs: int = 2) -> None:
    """Train in the current directory, in this process as one of `devices`; 6 steps an epoch, a checkpoint every 2."""
    peers = Peers()
    saving = ModelCheckpoint(
        KEPT, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_on_exception=module.saves
    )
    strategy = DDPStrategy(timeout=timedelta(seconds=600 if ours else TIMEOUT)) if devices > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=False,
        max_epochs=epochs,
        callbacks=[FailureNews(peers), saving, EvenRanks(peers), Preemption(peers)] if ours else [saving],
        plugins=[DurableCheckpointIO()] if ours else [],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(torch.ones(6 * devices, 3)) if data is None else data
    if not ours:
        trainer.fit(module, data)
    else:
        with watched_launcher(), peers.errors_reported():
            trainer.fit(module, data)
    print(f"made {trainer.global_step} steps")


def two(module: Line, data: DataLoader | None = None, *, ours: bool) -> list[Ended]:
    """Two ranks that have ended by themselves. AssertionError where one hung for longer than ten seconds, as both do
    that wait for a stock process group's time-out."""
    ranks = Ranks(Path("ranks"), lambda: plain_fit(module, data, ours=ours, devices=2)).ended(40)
    slowest = max(rank.seconds for rank in ranks)
    hung = [rank.code for rank in ranks if rank.code is None]
    assert not hung, "hung for 40 s"
    waited = [line for rank in ranks for line in rank.told.splitlines() if "imed out" in line or "imeout" in line]
    assert not waited, f"hung until the group's time-out, {slowest:.0f} s: {short(waited[-1])}"
    assert slowest < TIMEOUT, f"took {slowest:.0f} s"
    return ranks


def at_the_end(directory: str) -> dict[str, Any]:
    path, _ = newest_valid([Path(directory)])
    assert path is not None, f"no valid checkpoint in {directory}"
    return torch.load(path, weights_only=True)
