"""`protect` around the fit of a script: what it adds to a trainer, and that a stopped run resumes."""

import re
from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import training_fits
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader
from training_fits import Tiny

from diffvision.training import (
    EMA,
    ClassificationModule,
    DataReport,
    LambdaMonitor,
    LastCheckpoint,
    Throughput,
)
from diffvision.training.fault_tolerance import StepGuard, protect, protection
from diffvision.training.fault_tolerance.checkpoints import DurableCheckpointIO, read_step
from diffvision.training.fault_tolerance.preemption import Preemption
from diffvision.training.fault_tolerance.ranks import SameShards
from diffvision.training.progress import ProgressLine
from diffvision.training.summary import RunSummary

pytestmark = pytest.mark.filterwarnings("ignore:resumed from:UserWarning")


def trainer_of(root, steps, **settings):
    saving = ModelCheckpoint(root / "kept", "{step}", every_n_train_steps=1, save_top_k=-1), LastCheckpoint(1)
    return training_fits.trainer(*saving, logger=CSVLogger(root, "fit", 0), **{"max_steps": steps} | settings)


def test_callbacks_have_the_order_that_they_need_and_are_replaced_by_the_next_fit(tmp_path):
    trainer, module = trainer_of(tmp_path, 1), Tiny()
    trainer.callbacks.insert(0, EarlyStopping("loss"))
    for _ in range(2):
        with protect(trainer, module, settings={"seed": 1}):
            pass
        names = [type(callback).__name__ for callback in trainer.callbacks]
        assert names == ["EarlyStopping", "SameShards", "Preemption", "ModelCheckpoint", "LastCheckpoint"]
    assert isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO)


def test_no_modelcheckpoint_writes_the_same_file(tmp_path):
    trainer = trainer_of(tmp_path, 1)
    trainer.callbacks[:] = [saver := ModelCheckpoint(tmp_path / "kept", "best", "loss", save_last=True)]
    with protect(trainer, Tiny()):
        assert not saver.save_last
    trainer.callbacks[:] = [ModelCheckpoint(tmp_path / "kept", "last")]
    with pytest.raises(ValueError, match="LastCheckpoint"), protect(trainer, Tiny()):
        pass


@pytest.mark.parametrize(
    ("strategy", "setting"),
    [
        (ModelParallelStrategy(), "save_distributed_checkpoint"),
        (FSDPStrategy(state_dict_type="sharded"), "state_dict_type"),
    ],
)
def test_a_strategy_that_would_save_shards_is_refused(strategy, setting):
    with pytest.raises(ValueError, match=setting), protect(SimpleNamespace(strategy=strategy), Tiny()):
        pass


class Validated(Tiny):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.layers(batch).square().mean())


@pytest.mark.parametrize("length", [{"max_steps": 3}, {"max_epochs": 1, "check_val_every_n_epoch": 2}])
def test_a_run_that_ends_before_its_first_validation_leaves_its_last_state(tmp_path, length):
    module, loader = Validated(), DataLoader(torch.ones(8, 3))
    trainer = trainer_of(tmp_path, -1, limit_val_batches=1, val_check_interval=8, **length)
    trainer.callbacks[:] = [ModelCheckpoint(tmp_path / "kept", "best", "loss")]
    with protect(trainer, module):
        trainer.fit(module, loader, loader)
    final, last = sorted((tmp_path / "kept").glob("*.ckpt"))
    assert (read_step(final), read_step(last)) == (trainer.global_step, trainer.global_step - 1)
    assert str(final) in [saver.last_model_path for saver in trainer.checkpoint_callbacks]
    weights = torch.load(final, weights_only=True)["state_dict"]
    assert torch.equal(weights["layers.0.weight"], module.layers[0].weight)


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_checkpointing": False},
        {"fast_dev_run": True},
        {"fast_dev_run": True, "callbacks": [ModelCheckpoint(save_last=True, every_n_train_steps=500)]},
    ],
)
def test_no_last_state_is_left_where_none_is_wanted(tmp_path, settings):
    module, trainer = Tiny(), pl.Trainer(accelerator="cpu", logger=False, max_steps=2, default_root_dir=tmp_path,
                                         enable_progress_bar=False, enable_model_summary=False, **settings)  # fmt: skip
    with protect(trainer, module):
        trainer.fit(module, DataLoader(torch.ones(8, 3)))
    assert not [*tmp_path.rglob("*.ckpt")]


def test_the_hooks_between_two_batches_are_as_written_down():
    written, hook = defaultdict(list), ""
    for line in protection.__doc__.splitlines():
        if match := re.match(r" {4}(\w*) +([A-Z]\w+) {2,}", line):
            hook = match[1] or hook
            written[hook].append(match[2])
    for name in ("prepare_batch", "training_step", "validation_step", "on_after_backward"):  # of modules alone
        del written[name]
    callbacks = [ProgressLine, EMA, Throughput, LambdaMonitor, DataReport, RunSummary, SameShards]
    callbacks += [Preemption, StepGuard, ModelCheckpoint, LastCheckpoint]
    owners = {callback.__name__: callback for callback in callbacks}
    owners["TrainingModule"] = ClassificationModule
    hooks = [name for name in vars(pl.Callback) if re.match("on_(train_batch|before|after|validation|save)", name)]
    found = defaultdict(list)
    for hook, (name, owner) in product(hooks, owners.items()):
        base = pl.Callback if issubclass(owner, pl.Callback) else pl.LightningModule
        if getattr(owner, hook) is not getattr(base, hook):
            found[hook].append(name)
    assert found == written
