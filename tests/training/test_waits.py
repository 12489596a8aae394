"""No training step waits for the device, nor holds a tensor on the CPU that meets one on the device.

The meta device computes nothing: `.item()`, `bool()` and most operations with a tensor of another device raise there.
`scripts/benchmarks/waits.py` counts the waits of a CUDA device.
"""

import sys
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import training_fits
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader
from training_fits import LANGUAGE

from diffvision.analysis.curves import read_metrics
from diffvision.training import optim
from diffvision.training.callbacks import Throughput
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.ema import EMA
from diffvision.training.fault_tolerance.preemption import Preemption
from diffvision.training.fault_tolerance.ranks import SameShards
from diffvision.training.language import LanguageModule
from diffvision.training.progress import ProgressLine
from ranks import on_ranks

OPTIMIZER = {"lr": 1e-3, "warmup_steps": 0, "clip_norm": 1.0}
IMAGE = torch.zeros(3, 32, 32)


def contrastive(**settings):
    module = ContrastiveModule("DiffCLIP-debug", optimizer=OPTIMIZER, **settings)
    text = torch.ones(module.model.context_length, dtype=torch.int64)
    return module, {"image": IMAGE, "text": text}


def classification(model):
    row = {"image": IMAGE, "label": torch.tensor(1)}
    return ClassificationModule(model, num_classes=10, optimizer=OPTIMIZER, model_args={"img_size": 32}), row


def language(model, **row):
    tokens = torch.ones(13, dtype=torch.int64)
    return LanguageModule(model, model_args=LANGUAGE | {"depth": 2}, optimizer=OPTIMIZER, z_loss=1e-4), {
        "tokens": tokens
    } | row


def vision_language():
    pytest.importorskip("transformers")
    from diffvision.training.vision_language import VisionLanguageModule

    tokens = torch.ones(24, dtype=torch.int64)
    tokens[1:17] = 50  # the image
    sizes = {"vocab_size": 50, "max_length": 64}
    row = {"tokens": tokens, "learned": torch.arange(24) > 18, "image": IMAGE}
    return VisionLanguageModule("vlm-debug", language_args=sizes, optimizer=OPTIMIZER), row


CASES = {
    "contrastive": contrastive,
    "contrastive, siglip": lambda: contrastive(loss="siglip"),
    "contrastive, chunks": lambda: contrastive(accum_freq=2),
    "classification": lambda: classification("diff_vit_debug"),
    "language": lambda: language("diff-3m"),
    "language, documents": lambda: language("diff-3m", documents=torch.arange(13) // 4),
    "language, answers": lambda: language("diffv2-3m", learned=torch.arange(13) > 4),
    "vision and language": vision_language,
}


class Meta(CPUAccelerator):
    def setup_device(self, device):
        """Accept any device."""


def autocast_of_meta(device, *args, autocast=torch.autocast, **settings):
    """A CPU's in place of the meta device's, which has none."""
    return autocast("cpu" if device == "meta" else device, *args, **settings)


class Enough(Exception):
    """Ends a fit before it reads at its end."""


class Stop(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == 2:
            raise Enough


@pytest.mark.quick("contrastive", "classification", "language", "language, documents")
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_the_meta_device_reads_nothing(case, monkeypatch, tmp_path):
    """Forward, loss, backward, clipping, fused optimizer, averages, guard, logging and the progress line."""
    monkeypatch.setattr(optim, "FUSED", ("meta",))
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices", lambda: ["meta"])
    monkeypatch.setattr(fit_loop, "has_len_all_ranks", lambda *args: True)  # before the first step it reads a number
    monkeypatch.setattr(torch, "autocast", autocast_of_meta)
    if case == "vision and language":
        # the one number of a step that transformers reads: whether positions are packed
        monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)
    module, row = CASES[case]()
    trainer = pl.Trainer(
        strategy=SingleDeviceStrategy(torch.device("meta"), Meta()),
        max_steps=9,
        log_every_n_steps=100,
        logger=CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[EMA(), Throughput(), ProgressLine(), Stop()],
    )
    monkeypatch.setattr(trainer, "_teardown", lambda: None)  # it moves what has no values to the CPU
    with pytest.raises(Enough):
        trainer.fit(module, DataLoader([row] * 36, batch_size=4))
    assert all(parameter.is_meta for parameter in module.parameters())
    (group,) = {group["fused"] for group in trainer.optimizers[0].param_groups}
    assert group


# --- collectives ---


class Collectives(pl.Callback):
    """Counts the collectives of all groups in two steps, by name."""

    def on_train_batch_start(self, trainer, pl_module, *args):
        if trainer.global_step == 3:
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profiler.start()

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == 5:
            self.profiler.stop()


def counted(profiler):
    return sum((event.count for event in profiler.key_averages() if event.key.startswith("gloo:")), 0)


def collectives_of(case, root):
    """Return the collectives that a step makes on one of two ranks, and what OpenCLIP's step of the same model does."""
    module, row = CASES[case]()
    count = Collectives()
    callbacks = EMA(), Throughput(), SameShards(), Preemption(None), count
    settings = {"devices": 2, "strategy": "ddp", "max_steps": 6, "log_every_n_steps": 100, "logger": CSVLogger(root)}
    trainer = training_fits.trainer(*callbacks, use_distributed_sampler=True, **settings)
    counts = []
    module.on_train_end = lambda: counts.extend(
        [counted(count.profiler) / 2, collectives_of_open_clip(module, row) if case == "contrastive" else None]
    )
    trainer.fit(module, DataLoader([row] * 48, batch_size=4))
    return counts


def collectives_of_open_clip(module, row):
    """Return the collectives of a step as open_clip_train makes it, with its model and loss."""
    model = nn.parallel.DistributedDataParallel(module.model)
    batch = {name: torch.stack([value] * 4) for name, value in row.items()}
    for _ in range(3):  # DDP's first steps differ
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            module.loss(**model(batch["image"], batch["text"])).backward()
    return counted(profiler)


@pytest.mark.slow
@pytest.mark.forks
@pytest.mark.parametrize(
    ("case", "most"), [("contrastive", None), ("classification", 1), ("language", 1), ("language, documents", 2)]
)
def test_a_step_makes_at_most_one_collective_more_than_open_clip(case, most, tmp_path):
    """Besides those of DDP, and one where predictions are counted, ranks ask each other for signals now and then."""
    for ours, theirs in on_ranks(partial(collectives_of, case, tmp_path), 2):
        print(f"{case}: {ours} collectives a step" + (f", OpenCLIP {theirs}" if theirs else ""))
        assert 0 < ours <= (theirs or most) + 1


class Losses(pl.Callback):
    """Notes a rank's own loss after each step, and the one that is logged."""

    def __init__(self):
        self.own, self.logged = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.own.append(float(outputs["loss"]))
        self.logged.append(float(trainer.callback_metrics["train/loss"]))


def losses_of(case, root, monitor=None):
    """Return one rank's own losses and the logged ones, of seven steps of which every third is logged."""
    module, row = CASES[case]()
    losses = Losses()
    savers = [ModelCheckpoint(root, monitor=monitor, every_n_train_steps=1)] if monitor else []
    settings = {"devices": 2, "strategy": "ddp", "max_steps": 7, "log_every_n_steps": 3}
    trainer = training_fits.trainer(losses, *savers, logger=CSVLogger(root, version=0), **settings)
    draws = torch.Generator().manual_seed(trainer.global_rank)
    row |= {"label": torch.tensor(trainer.global_rank)}
    rows = [row | {"image": torch.rand(row["image"].shape, generator=draws)} for _ in range(20)]
    trainer.fit(module, DataLoader(rows, batch_size=4))
    return losses.own, losses.logged


@pytest.mark.slow
@pytest.mark.forks
@pytest.mark.parametrize(
    ("case", "monitor"),
    [("contrastive, chunks", None), ("classification", None), ("classification", "train/loss")],
)
def test_losses_that_are_read_are_those_of_all_ranks(case, monitor, tmp_path):
    """Logged are the third step, the last of an epoch of five, the sixth and the last; a monitor reads them all."""
    (one, logged), (other, _) = on_ranks(partial(losses_of, case, tmp_path, monitor), 2)
    read = range(7) if monitor else (2, 4, 5, 6)
    assert min(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-4
    assert [logged[step] for step in read] == pytest.approx([(one[step] + other[step]) / 2 for step in read], rel=1e-6)
    rows = read_metrics(tmp_path / "lightning_logs" / "version_0")["train/loss"]
    assert list(rows.values) == pytest.approx([logged[2], logged[5]])
