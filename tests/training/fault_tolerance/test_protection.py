"""`protect` around the fit of a script: what it adds to a trainer, and that a stopped run resumes."""

import re
from collections import defaultdict

import lightning.pytorch as pl
import pytest
import torch
import training_fits
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import Profiler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diffvision.training import (
    EMA,
    ClassificationModule,
    DataReport,
    LambdaMonitor,
    LastCheckpoint,
    Throughput,
)
from diffvision.training.fault_tolerance import protect, protection
from diffvision.training.fault_tolerance.checkpoints import DurableCheckpointIO, read_step
from diffvision.training.progress import ProgressLine
from diffvision.training.summary import RunSummary

pytestmark = pytest.mark.filterwarnings("ignore:resumed from:UserWarning")


class Tiny(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.steps = nn.Linear(3, 3), []

    def training_step(self, batch, batch_idx):
        self.steps.append(self.trainer.global_step)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def trainer_of(root, steps, **settings):
    saving = ModelCheckpoint(root / "kept", "{step}", every_n_train_steps=1, save_top_k=-1), LastCheckpoint(1)
    return training_fits.trainer(*saving, logger=CSVLogger(root, "fit", 0), **{"max_steps": steps} | settings)


def train(root, steps, resume):
    module, trainer = Tiny(), trainer_of(root, steps)
    with protect(trainer, module, resume=resume) as checkpoint:
        trainer.fit(module, DataLoader(torch.ones(8, 3)), ckpt_path=checkpoint)
    return module, trainer, checkpoint


def test_a_script_resumes_from_whole_checkpoints(tmp_path):
    _, _, checkpoint = train(tmp_path, 2, "never")
    assert checkpoint is None
    assert read_step(tmp_path / "kept" / "final.ckpt") == 2
    again, _, checkpoint = train(tmp_path, 4, "auto")
    assert checkpoint == str(tmp_path / "kept" / "last.ckpt")
    assert again.steps == [1, 2, 3]
    assert {path.name for path in (tmp_path / "kept").glob("step*")} == {
        *(f"step={number}.ckpt" for number in range(1, 5)),
        "step=2.ckpt.replaced",
    }
    with pytest.raises(ValueError, match="already holds checkpoints"):
        train(tmp_path, 4, "never")


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


class Validated(Tiny):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.layer(batch).square().mean())


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
    assert torch.equal(weights["layer.weight"], module.layer.weight)


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


class Recorder(Profiler):
    """Notes the hooks that Lightning calls, in their order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def start(self, action_name):
        self.calls.append(action_name)

    def stop(self, action_name):
        pass


def hooks_between_two_batches(trainer, module, calls) -> dict[str, list[str]]:
    """By hook, the classes of the callbacks and the module that have it, in the order of their calls."""
    first, second = [place for place, call in enumerate(calls) if call.endswith("train_dataloader_next")][1:3]
    callbacks = {type(callback).__name__: type(callback) for callback in trainer.callbacks}
    order = defaultdict(list)
    for call in calls[first:second]:
        match = re.match(r"\[(Callback|LightningModule)\](\w+).*\.(on_\w+)$", call, re.S)
        if match is None:
            continue
        owner, name, hook = match.groups()
        cls = callbacks[name] if owner == "Callback" else type(module)
        plain = getattr(pl.Callback if owner == "Callback" else pl.LightningModule, hook)
        name = "TrainingModule" if owner == "LightningModule" else name
        if getattr(cls, hook) is not plain and name not in order[hook]:
            order[hook].append(name)
    return {hook: names for hook, names in order.items() if names}


def test_what_happens_between_two_batches_is_as_written_down(tmp_path):
    module, recorder = ClassificationModule("diff_vit_debug", num_classes=3), Recorder()
    loader = DataLoader(TensorDataset(torch.randn(6, 3, 32, 32), torch.tensor([0, 1, 2, 0, 1, 2])), batch_size=2)
    saver = LastCheckpoint(every_n_train_steps=1)
    best = ModelCheckpoint(tmp_path / "kept", "best", monitor="val/acc1", save_on_train_epoch_end=False)
    callbacks = [ProgressLine(), best, saver, EMA(), Throughput(), LambdaMonitor(), DataReport(), RunSummary()]
    settings = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "val_check_interval": 2, "max_epochs": 1}
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=callbacks, profiler=recorder, **settings)
    with protect(trainer, module):
        trainer.fit(module, loader, loader)
    written, hook = defaultdict(list), ""
    for line in protection.__doc__.splitlines():
        if match := re.match(r" {4}(\w*) +([A-Z]\w+) {2,}", line):
            hook = match[1] or hook
            written[hook].append(match[2])
    del written["prepare_batch"], written["training_step"], written["validation_step"], written["on_after_backward"]
    assert hooks_between_two_batches(trainer, module, recorder.calls) == written
