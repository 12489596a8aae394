"""Steps that are not finite: skipped on every rank, reported, and at last an end; and what keeps them away."""

import copy
import math
import re

import lightning.pytorch as pl
import pytest
import torch
import training_fits
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from diffvision.training.fault_tolerance import LastCheckpoint, lightning_internals
from diffvision.training.fault_tolerance.checkpoints import (
    LAST,
    DurableCheckpointIO,
    find_newest,
)
from diffvision.training.fault_tolerance.finite import StepGuard
from diffvision.training.optim import OptimizerSettings, create_optimizer, param_groups

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, monkeypatch):
    """Where a run without a logger writes to."""
    monkeypatch.chdir(tmp_path)


class Loader(DataLoader):
    """One that knows its samples' names, as ours do."""

    def names(self, epoch, batch):
        return [f"{epoch}.tar: {batch * self.batch_size + i}" for i in range(self.batch_size)]


class Tiny(pl.LightningModule):
    """Two lines. A batch of sixes has a loss that is infinite, while its gradients are finite."""

    def __init__(self, **guard):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.guard = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), StepGuard(**guard)

    def configure_callbacks(self):
        return [self.guard]

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"]).square().mean()
        return out + torch.where((batch["x"] == 6).all(), INF, 0.0)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


class States(pl.Callback):
    """The weights and moments after each batch."""

    def __init__(self):
        self.after = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        moments = [dict(state) for state in trainer.optimizers[0].state.values()]
        self.after.append(copy.deepcopy((pl_module.state_dict(), moments)))


def batches(count=6, **bad):
    """Batches of four rows; `bad` says what fills those of a number: b2=NAN."""
    rows = torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(0))
    for name, value in bad.items():
        rows[int(name[1:]), 1 if math.isnan(value) else slice(None)] = value
    return rows


def fit(module, rows, root, *callbacks, plugins=(), **settings):
    settings = {"max_epochs": 1, "max_steps": -1, "log_every_n_steps": 1} | settings
    logger, plugins = CSVLogger(root, "fit", version=0), [DurableCheckpointIO(), *plugins]
    trainer = training_fits.trainer(*callbacks, default_root_dir=root, logger=logger, plugins=plugins, **settings)
    trainer.fit(module, Loader([{"x": row} for row in rows.flatten(0, 1)], batch_size=4))
    return trainer


def steps(warned):
    """The numbers of the steps that were reported as skipped."""
    return [int(step) for line in warned for step in re.findall(r"at step (\d+) .*skipped", str(line.message))]


def equal(one, two):
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(flat(one), flat(two), strict=True))


def flat(state):
    values = state.values() if isinstance(state, dict) else state
    return [t for v in values for t in (flat(v) if isinstance(v, dict | list | tuple) else [v])]


# --- skipping ---


def test_a_skipped_step_changes_nothing_and_is_reported(tmp_path):
    """A NaN in the batch; an infinite loss with finite gradients; the others train as if these two were not there."""
    module, states = Tiny(clip_norm=1.0), States()
    with pytest.warns(UserWarning, match="skipped") as warned:
        trainer = fit(module, batches(b2=NAN, b4=6.0), tmp_path, states)
    assert equal(states.after[1], states.after[2])
    assert equal(states.after[3], states.after[4])
    assert not equal(states.after[2], states.after[3])

    good, untouched = Tiny(clip_norm=1.0), States()
    fit(good, batches()[[0, 1, 3, 5]], tmp_path / "good", untouched)
    assert equal(states.after[-1], untouched.after[-1])
    assert trainer.global_step == 6  # the schedule is a function of it

    assert steps(warned) == [2, 4]
    (text,) = [text for text in map(str, (line.message for line in warned)) if "at step 2 " in text]
    assert "(epoch 0, batches 2)" in text
    assert text.endswith("samples: 0.tar: 8, 0.tar: 9, 0.tar: 10, 0.tar: 11")
    assert trainer.logged_metrics["train/skipped_steps"] == 2


def test_steps_skipped_between_two_readings_change_nothing_and_are_all_reported(monkeypatch, tmp_path):
    """As on a GPU, where steps are read when every fifth is logged, by a fused optimizer."""

    class Fused(Tiny):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5, fused=True)

    monkeypatch.setattr(lightning_internals, "may_wait_for_device", lightning_internals.is_logging_step)
    module, good, states, untouched = Fused(clip_norm=1.0), Fused(clip_norm=1.0), States(), States()
    saver = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=3)
    with pytest.warns(UserWarning, match="skipped") as warned:
        trainer = fit(module, batches(10, b2=NAN, b6=NAN, b9=NAN), tmp_path, states, saver, log_every_n_steps=5)
    fit(good, batches(10)[[0, 1, 3, 4, 5, 7, 8]], tmp_path / "good", untouched)
    assert equal(states.after[-1], untouched.after[-1])
    assert steps(warned) == [2, 6, 9]
    texts = [str(line.message) for line in warned]
    assert all(any(f"skipped (1 in a row); samples: 0.tar: {4 * n}," in text for text in texts) for n in (2, 6, 9))
    assert trainer.logged_metrics["train/skipped_steps"] == 3
    saved = torch.load(tmp_path / "kept" / "step=9.ckpt", weights_only=True)
    assert saved["callbacks"]["StepGuard"] == {"skipped": 2, "in_a_row": 0}


def test_with_accumulation_the_whole_step_is_skipped(tmp_path):
    module, states = Tiny(), States()
    with pytest.warns(UserWarning, match="batches 3, 4, 5.* 0.tar: 19 and 4 more$"):
        trainer = fit(module, batches(b4=6.0), tmp_path, states, accumulate_grad_batches=3)
    assert not equal(states.after[1], states.after[2])
    assert equal(states.after[2], states.after[5])
    assert trainer.global_step == 2


def test_after_so_many_in_a_row_the_run_stops_and_the_last_good_checkpoint_stays(tmp_path):
    """The file that a run resumes from is not written while steps are skipped, and holds the counts."""
    saving = [ModelCheckpoint(tmp_path / "kept", "{step}"), LastCheckpoint(every_n_train_steps=1)]
    bad = batches(8, b2=NAN, b4=NAN, b5=NAN, b6=NAN)
    module = Tiny(max_skipped=2)
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(FloatingPointError, match="steps 4 to 6") as raised:
        fit(module, bad, tmp_path, *saving)
    assert "optimizer.max_skipped" in str(raised.value)
    assert find_newest([tmp_path / "kept"]) == (tmp_path / "kept" / LAST, 4, {})
    again = Tiny(max_skipped=2)
    again.guard.load_state_dict(torch.load(tmp_path / "kept" / LAST, weights_only=True)["callbacks"]["StepGuard"])
    assert (again.guard.in_a_row, again.guard.skipped) == (0, 1)
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(FloatingPointError, match="max_skipped=0"):
        fit(Tiny(max_skipped=0), batches(b0=NAN), tmp_path / "none")


def test_a_gradient_scaler_looks_for_its_scale_until_there_is_none_left(tmp_path):
    """Overflows of a scale that is too high do not count; an infinite loss or overflows at any scale are not."""

    def run(root, rows, scale, module):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        fit(module, rows, root, precision=None, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
        assert scaler.get_scale() < scale
        return module.guard.skipped

    assert run(tmp_path / "high", batches(), 2.0**30, Tiny(max_skipped=0)) == 0
    with pytest.warns(UserWarning, match="skipped"):
        assert run(tmp_path / "bad", batches(b2=NAN), 1024.0, Tiny(max_skipped=1)) == 1
    module = Tiny(max_skipped=1)
    module.net[1].weight.register_hook(lambda gradient: gradient * INF)
    with (
        pytest.warns(UserWarning, match="is inf at step [12] "),
        pytest.raises(FloatingPointError, match="steps 1 to 2"),
    ):
        run(tmp_path / "none", batches(), 1.0, module)


class RankOne(Tiny):
    """Gives NaN to rank 1 alone in batch 1, and an infinite loss with finite gradients in batch 3."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx in (1, 3):
            batch["x"][1 if batch_idx == 1 else slice(None)] = NAN if batch_idx == 1 else 6.0
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        torch.save((self.state_dict(), self.guard.skipped), f"{self.global_rank}.pt")


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:the gradient's norm is nan")  # in the two processes, where it cannot be expected
def test_what_one_rank_sees_no_rank_steps_on(tmp_path):
    two = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": False}
    states = States()
    fit(RankOne(), batches(), tmp_path, states, **two)
    (one, skipped), (other, too) = (torch.load(f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert skipped == too == 2
    assert equal(one, other)

    # As one process trains on the good batches, which both have: DDP's mean of two equal gradients is either.
    good = Tiny()
    fit(good, batches()[[0, 2, 4, 5]], tmp_path / "good")
    torch.testing.assert_close(one, good.state_dict())


FUSED = {"args": {"fused": True}}


@pytest.mark.parametrize(
    ("name", "settings", "bad"),
    [("lion", {}, 2), ("muon", {}, 2), ("sgd", {}, 2), ("sgd", FUSED, 0), ("lamb", {}, 0), ("adan", {}, 0)],
)
def test_other_optimizers_skip_a_step_too(name, settings, bad, tmp_path):
    """Also their counts of steps, which LAMB and Adan keep with a group's settings, and the start of a momentum.

    For fused SGD, `found_inf` would leave its momentum uninitialised if the first step is skipped.
    """

    class Other(Tiny):
        def configure_optimizers(self):
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1))
            torch.manual_seed(1)
            for parameter in self.parameters():
                nn.init.normal_(parameter)
            groups = param_groups(self, OptimizerSettings(weight_decay=0.5))
            return create_optimizer(groups, OptimizerSettings(name=name, lr=1e-4, **settings))

    skipping, good = Other(), Other()
    with pytest.warns(UserWarning, match="is skipped"):
        first = fit(skipping, batches(**{f"b{bad}": NAN}), tmp_path)
    second = fit(good, batches()[[number for number in range(6) if number != bad]], tmp_path / "good")
    assert equal(skipping.state_dict(), good.state_dict())
    groups = [
        [{k: v for k, v in g.items() if k != "params"} for g in t.optimizers[0].param_groups] for t in (first, second)
    ]
    assert groups[0] == groups[1]
