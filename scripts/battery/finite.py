"""Group F, numbers that are not finite while training, and A6, such weights in a checkpoint."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import open_clip
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from battery.case import Seen, case, stock
from battery.small import raised
from diffvision.training.clip import ContrastiveModule
from diffvision.training.durable.checkpoints import DurableCheckpointIO, newest_valid
from diffvision.training.durable.content import not_finite
from diffvision.training.durable.finite import FILE, StepGuard
from diffvision.training.durable.resume import compare
from diffvision.training.optim import OptimizerSettings
from tiny_runs import plain_checkpoint

STEPS = 12
INPUTS = {"NaN": math.nan, "infinity": math.inf}


class Line(pl.LightningModule):
    """A line with a batch norm before it, one batch of which is harmed on one rank."""

    def __init__(self, harm: str | None = None, at: range = range(3, 4), rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.harm, self.at, self.rank = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), harm, at, rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,), harmed = batch, batch_idx in self.at and self.global_rank == self.rank
        if harmed and self.harm == "loss":  # infinite, while all gradients are finite
            return self.net(x).square().mean() + math.inf
        if harmed and self.harm == "gradient":
            out = self.net(x)
            out.register_hook(lambda gradient: gradient * math.nan)
            return out.square().mean()
        if harmed and self.harm == "spike":
            return self.net(x).square().mean() * 1e12
        if harmed and self.harm in INPUTS:
            x = x.index_fill(0, torch.tensor([1]), INPUTS[self.harm])
        return self.net(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(module: pl.LightningModule, *, ours: bool, rows: Any = None, size: int = 4, **settings: Any) -> str:
    """Train in the current directory, saving after each step; what became of the run, in words."""
    warnings.simplefilter("ignore")
    rows = rows if rows is not None else [(row,) for row in torch.randn(STEPS * size, 3)]
    saving = ModelCheckpoint("kept", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    guard = [StepGuard()] if isinstance(module, Line) else []  # ContrastiveModule brings its own
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "use_distributed_sampler": False} | settings,
        logger=CSVLogger(".", "log", version=0),
        callbacks=[saving, *(guard if ours else [])],
        plugins=[DurableCheckpointIO()] if ours else [],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, DataLoader(rows, batch_size=size))
    except FloatingPointError as error:
        return f"stopped: {error}"
    return "finished"


def saved() -> tuple[Path, dict[str, Any]]:
    """The last checkpoint of the run, and its weights."""
    last = max(Path("kept").glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    return last, torch.load(last, map_location="cpu", weights_only=True)["state_dict"]


def seen(what: str) -> Seen:
    """AssertionError where the last checkpoint's weights are not finite."""
    path, weights = saved()
    bad = not_finite(weights)
    assert not bad, f"{what}; in {path.name} {bad} are not finite"
    told = len(Path("log/version_0", FILE).read_text().splitlines()) if Path("log/version_0", FILE).exists() else 0
    return Seen(f"{what}; weights finite, {told} steps skipped and written down", lost=0)


def harmed(harm: str, *, ours: bool, skipped: int = 1, **settings: Any) -> Seen:
    result = seen(train(Line(harm, rank=settings.get("devices", 1) - 1), ours=ours, **settings))
    assert not ours or f"{skipped} steps skipped" in result.what, result.what
    return result


SKIPPED = "the step is skipped and written down, the weights stay finite"
two = {"devices": 2, "strategy": "ddp_fork"}
cases: list[tuple[str, str, partial[Seen]]] = [
    ("F1 NaN in a batch", SKIPPED, partial(harmed, "NaN")),
    ("F2 infinity in a batch", SKIPPED, partial(harmed, "infinity")),
    ("F3 NaN gradient of a finite loss", SKIPPED, partial(harmed, "gradient")),
    ("F4 infinite loss with finite gradients", SKIPPED, partial(harmed, "loss")),
    ("F5 NaN in a batch of rank 1 of 2", f"on both ranks {SKIPPED}", partial(harmed, "NaN", **two)),
    ("F6 infinite loss on rank 1 of 2", f"on both ranks {SKIPPED}", partial(harmed, "loss", **two)),
    ("F7 loss spike of 1e12", "not skipped, and finite", partial(harmed, "spike", skipped=0)),
]
for name, expected, run in cases:
    case(name, expected, quick=name.startswith("F1"))(partial(run, ours=True))
    stock(name)(partial(run, ours=False))


@case("F8 NaN from some step on", "stops after 10 in a row; the last checkpoint is whole, finite and can be resumed")
def endless() -> Seen:
    told = train(Line("NaN", at=range(1, STEPS)), ours=True)
    assert told.startswith("stopped: ")
    assert "steps 1 to 11" in told, told
    path, faults = newest_valid([Path("kept")])
    assert path is not None, faults
    assert not faults, faults
    compare(str(path), Line(), world_size=1, ranks="same")
    return seen(f"stopped after step 11; resumable from {path.name}")


@stock("F8 NaN from some step on")
def endless_stock() -> Seen:
    return seen(train(Line("NaN", at=range(1, STEPS)), ours=False))


# --- contrastive ---


class Plain(pl.LightningModule):
    """OpenCLIP's model and loss in a plain module, with OpenCLIP's clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.model = open_clip.create_model("DiffCLIP-debug", output_dict=True)
        self.loss = open_clip.ClipLoss()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(**self.model(batch["image"], batch["text"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, math.log(100))


def contrastive(harm: str, *, ours: bool) -> Seen:
    torch.manual_seed(0)
    settings = OptimizerSettings(lr=1e-3, warmup_steps=0)
    module: Any = ContrastiveModule("DiffCLIP-debug", optimizer=settings) if ours else Plain()
    images, texts = torch.randn(8, 3, 32, 32), torch.randint(1, 400, (8, module.model.context_length))
    if harm == "identical":
        images, texts = images[:1].expand_as(images), texts[:1].expand_as(texts)
    if harm == "zero":
        nn.init.zeros_(module.model.text_projection)
    if harm in ("100", "-100"):
        nn.init.constant_(module.model.logit_scale, float(harm))
    rows = [{"image": image, "text": text} for image, text in zip(images, texts, strict=True)]
    size = 1 if harm == "single" else 4
    what = train(module, ours=ours, rows=rows, size=size, max_steps=len(rows) // size, max_epochs=-1)
    result = seen(what)
    _, weights = saved()
    scale = weights["model.logit_scale"].item()
    assert 0 <= scale <= math.log(100) + 1e-6, f"{what}; the logit scale is {scale}"
    if harm == "zero":
        moments = torch.load(saved()[0], weights_only=True)["optimizer_states"][0]["state"].values()
        most = max(state["exp_avg_sq"].max().item() for state in moments)
        assert most < 1e6, f"{what}; AdamW's second moments reach {most:.1e}: those weights stand still"
    return result


for name, harm in {
    "F9 logit scale of 100": "100",
    "F10 logit scale of -100": "-100",
    "F11 all text embeddings zero": "zero",
    "F12 all embeddings identical": "identical",
    "F13 batches of one pair": "single",
}.items():
    case(name, "training stays finite, the scale in its range")(partial(contrastive, harm, ours=True))
    stock(name)(partial(contrastive, harm, ours=False))


# --- checkpoints ---


def spoilt() -> dict[str, Any]:
    module = Line()
    nn.init.constant_(module.net[1].weight, math.nan)
    return plain_checkpoint(module.state_dict(), 2)


@case("A6 saving weights that are not finite", "refused; the checkpoint that was there stays", quick=True)
def refuse_to_save() -> str:
    io, path = DurableCheckpointIO(), Path("last.ckpt")
    io.save_checkpoint(plain_checkpoint(Line().state_dict(), 1), path)
    before = path.read_bytes()
    told = raised(lambda: io.save_checkpoint(spoilt(), path), "NaN or infinity")
    assert path.read_bytes() == before
    assert newest_valid([Path()])[0] == path
    return told


@stock("A6 saving weights that are not finite")
def saves() -> str:
    module = Line()
    trainer = pl.Trainer(accelerator="cpu", logger=False, max_steps=1, enable_progress_bar=False)
    trainer.fit(module, DataLoader([(row,) for row in torch.randn(8, 3)], batch_size=4))
    nn.init.constant_(module.net[1].weight, math.nan)
    trainer.save_checkpoint("last.ckpt")
    bad = not_finite(torch.load("last.ckpt", weights_only=True)["state_dict"])
    raise AssertionError(f"saved without a word: {bad} are not finite")


@case("A6 resuming from weights that are not finite", "refused before any data is read")
def refuse_to_resume() -> str:
    torch.save(spoilt(), "foreign.ckpt")
    return raised(lambda: compare("foreign.ckpt", Line(), world_size=1, ranks="same"), "it holds NaN or infinity")
