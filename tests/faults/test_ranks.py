"""Two ranks that train: rank 0 is gone, one cannot save, the port is taken, or one sees other shards.

`tests/training/fault_tolerance/test_preemption.py` has the same with rank 1, and signals to either.
"""

import multiprocessing
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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from command_line import KEPT, fit, run, write_data
from diffvision.training.fault_tolerance.checkpoints import DurableCheckpointIO, find_newest_valid
from diffvision.training.fault_tolerance.preemption import Preemption
from diffvision.training.fault_tolerance.rank_monitor import LAUNCHER, FailureNews, Peers, watch_launcher
from diffvision.training.fault_tolerance.same_shards import SameShards
from ranks import Ranks, alive, alone, kill, until

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


def train(module: Line, **saving: Any) -> None:
    """Train as one of two ranks, 6 steps an epoch, with a checkpoint every 2."""
    peers = Peers()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(timeout=timedelta(minutes=10)),
        logger=False,
        max_epochs=2,
        callbacks=[
            FailureNews(peers),
            ModelCheckpoint(KEPT, filename="{step}", every_n_train_steps=2, save_top_k=-1, **saving),
            SameShards(peers),
            Preemption(peers),
        ],
        plugins=[DurableCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with watch_launcher(), peers.report_errors():
        trainer.fit(module, DataLoader(torch.ones(12, 3)))


def leave() -> None:
    os._exit(0)


def fail() -> None:
    raise KeyError("no such colour")


LOST = "another rank is gone without a report"
ENDS = {
    "is killed": (kill, LOST),
    "exits with status 0": (leave, LOST),
    "raises an exception": (fail, "has failed: KeyError: 'no such colour'"),
}
# Rank 0 holds the port that ranks meet at: it may be gone before the other asks what happened.
PORT_GONE = "because the process that ranks meet at is gone"


@pytest.mark.parametrize("end", ENDS)
def test_rank_1_ends_in_time_when_rank_0_is_gone(end):
    act, words = ENDS[end]
    _, left = Ranks(Path("ranks"), lambda: train(Line(3, act))).ended()
    assert left.code not in (0, None), left
    assert left.output.count(words) + left.output.count(PORT_GONE) == 1, left.output[-500:]
    assert find_newest_valid([KEPT]) == (KEPT / "step=2.ckpt", {})


def test_a_save_on_an_exception_does_not_wait_for_the_rank_that_failed():
    ended = Ranks(Path("ranks"), lambda: train(Line(3, fail, rank=1), save_on_exception=True)).ended()
    assert all(rank.code not in (0, None) for rank in ended), ended
    assert ended[0].output.count(ENDS["raises an exception"][1]) == 1, ended[0].output[-500:]
    assert find_newest_valid([KEPT]) == (KEPT / "step=2.ckpt", {})


def test_a_port_that_is_taken_ends_both_ranks_and_is_named():
    def rank(number: int) -> None:
        os.environ.update(MASTER_PORT=port, LOCAL_RANK=str(number))
        train(Line())

    def launch() -> None:
        os.environ[LAUNCHER] = str(os.getpid())
        second = multiprocessing.get_context("fork").Process(target=rank, args=(1,))
        second.start()
        Path("second").write_text(str(second.pid))
        rank(0)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = alone(launch, seconds=10)
        assert ended.code == 1, ended.output[-300:]
        until(lambda: not alive(int(Path("second").read_text())), 5, "the end of rank 1, which waits at the port")
    assert any("EADDRINUSE" in line and port in line for line in ended.output.splitlines())


def test_a_shard_that_is_missing_on_one_rank_is_an_error_before_the_first_step():
    write_data("all")
    write_data("some", count=7)

    def work() -> None:
        data = "all" if os.environ["LOCAL_RANK"] == "0" else "some"
        sys.exit(run(*fit("--trainer.devices=2", "--trainer.strategy=ddp", data=data))[0])

    ended = Ranks(Path("ranks"), work).ended(30)
    assert [rank.code for rank in ended] == [1, 1]
    assert any("error: ranks see different shards" in rank.output for rank in ended)
    assert not list(KEPT.glob("*.ckpt"))
