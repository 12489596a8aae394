"""Two ranks that train: rank 0 is gone, the port is taken, or one sees other shards.

`tests/training/fault_tolerance/test_preemption.py` has the same with rank 1, and signals to either.
"""

import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import training_fits
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from command_line import KEPT, fit, run, write_data
from diffvision.training.fault_tolerance.checkpoints import DurableCheckpointIO
from diffvision.training.fault_tolerance.preemption import Preemption
from diffvision.training.fault_tolerance.ranks import SameShards
from ranks import Ranks, kill

pytestmark = [pytest.mark.faults, pytest.mark.forks]


class Line(pl.LightningModule):
    """A linear layer that does something to its process at a step, on one rank."""

    def __init__(self, at: int | None = None, act: Callable[[], object] = int, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.at, self.act, self.rank = nn.Linear(3, 3), at, act, rank

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.at and self.global_rank == self.rank:
            self.act()
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def train(module: Line) -> None:
    """Train as one of two ranks, 6 steps an epoch, with a checkpoint every 2."""
    saver = ModelCheckpoint(KEPT, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    settings = {"devices": 2, "strategy": DDPStrategy(timeout=timedelta(minutes=10)), "use_distributed_sampler": True}
    settings |= {"max_epochs": 2, "max_steps": -1, "plugins": [DurableCheckpointIO()]}
    trainer = training_fits.trainer(saver, SameShards(), Preemption(None), **settings)
    trainer.fit(module, DataLoader(torch.ones(12, 3)))


def leave() -> None:
    os._exit(0)


def fail() -> None:
    raise KeyError("no such colour")


@pytest.mark.parametrize("act", [kill, leave, fail])
def test_rank_1_ends_in_time_when_rank_0_is_gone(act):
    _, left = Ranks(Path("ranks"), lambda: train(Line(3, act))).ended()
    assert left.code not in (0, None), left
    assert (KEPT / "step=2.ckpt").is_file()


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])

        def rank() -> None:
            os.environ["MASTER_PORT"] = port
            train(Line())

        (first,) = Ranks(Path("ranks"), rank, count=1).ended()
    assert first.code == 1, first.output[-300:]
    assert any("EADDRINUSE" in line and port in line for line in first.output.splitlines())


def test_a_shard_that_is_missing_on_one_rank_is_an_error_before_the_first_step():
    write_data("all")
    write_data("some", count=7)

    def work() -> None:
        data = "all" if os.environ["LOCAL_RANK"] == "0" else "some"
        sys.exit(run(*fit("--trainer.devices=2", "--trainer.strategy=ddp", data=data))[0])

    ended = Ranks(Path("ranks"), work).ended(30)
    assert [rank.code for rank in ended] == [1, 1]
    assert any("error: all ranks must read the same shards" in rank.output for rank in ended)
    assert not list(KEPT.glob("*.ckpt"))
