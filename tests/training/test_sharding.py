"""FSDP2 against one process: steps, validation, checkpoints and resumed runs of language models."""

from dataclasses import replace
from functools import partial

import lightning.pytorch as pl
import pytest
import timm
import torch
import training_fits
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from training_fits import LANGUAGE, EachStep, Rows, compile_with, same

from diffvision.training.callbacks import LambdaMonitor
from diffvision.training.clip import ContrastiveModule
from diffvision.training.ema import EMA
from diffvision.training.fault_tolerance import protect
from diffvision.training.language import LanguageModule
from diffvision.training.optim import OptimizerSettings
from diffvision.training.sharding import find_blocks
from ranks import on_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:resumed from"),  # an ordinary loader does not save its position
]
STEPS = 4
# eps: biases of keys have a gradient of rounding errors alone, which AdamW would scale up to whole steps.
SETTINGS = OptimizerSettings(lr=1e-3, warmup_steps=0, clip_norm=1.0, eps=1e-4)
SPOILED = 49  # the first token of a sample whose loss is NaN


class Samples(Rows):
    """Two batches of 8; a rank trains on its half of each, and validates unequal parts."""

    split = 12

    def __init__(self, spoiled: int | None = None):
        tokens = torch.randint(0, SPOILED, (16, 13), generator=torch.Generator().manual_seed(0))
        if spoiled is not None:
            tokens[spoiled, 0] = SPOILED
        super().__init__([{"tokens": row} for row in tokens])


class Module(LanguageModule):
    def training_step(self, batch, batch_idx):
        is_spoiled = (batch["tokens"][:, 0] == SPOILED).any()
        return super().training_step(batch, batch_idx) * torch.where(is_spoiled, torch.nan, 1.0)


def make(name="diff-debug", **settings):
    torch.manual_seed(0)
    return Module(name, model_args=LANGUAGE | {"depth": 2}, **{"optimizer": SETTINGS} | settings)


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("train/")})


def fit(module, directory, *callbacks, data=None, ckpt_path=None, **settings):
    """Train, and save a checkpoint after each epoch of two steps; return the trainer and what each step logged."""
    losses, saver = Losses(), ModelCheckpoint(directory, filename="{step}", save_top_k=-1)
    settings = {"max_steps": STEPS, "max_epochs": -1, "log_every_n_steps": 1, "limit_val_batches": 1.0} | settings
    trainer = training_fits.trainer(losses, saver, EachStep(1), *callbacks, default_root_dir=directory, **settings)
    with protect(trainer, module, ckpt_path=ckpt_path, ranks="any") as path:
        trainer.fit(module, datamodule=data or Samples(), ckpt_path=path, weights_only=True)
    return trainer, losses.seen


def sharded():
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
    return {"devices": 2, "strategy": strategy, "precision": "32-true"}


def whole_and_resumed(directory, name, settings):
    """A run of all steps; one of half of them, and one that goes on from its checkpoint."""
    trainer, losses = fit(make(name, **settings), directory / "whole", LambdaMonitor(), **sharded())
    fit(make(name, **settings), directory / "resumed", ckpt_path=str(directory / "whole" / "exact=2.ckpt"), **sharded())
    return losses, {k: float(v) for k, v in trainer.callback_metrics.items()}


def states(path):
    stored = torch.load(path, weights_only=True)
    moments = stored["optimizer_states"][0]["state"]
    return stored["state_dict"], {f"{i}.{k}": torch.as_tensor(v) for i, m in moments.items() for k, v in m.items()}


@pytest.mark.forks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("diff-debug", {"grad_checkpointing": True}),
        pytest.param("diffv2-debug", {}, marks=pytest.mark.nightly),
        pytest.param(
            "diff-debug",
            {"optimizer": replace(SETTINGS, name="lion", eps=None, betas=(0.9, 0.99))},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_sharded_runs_are_those_of_one_process(name, settings, tmp_path):
    # Lion takes the sign of rounding errors, too.
    near, atol = (1e-2, 1e-2) if "optimizer" in settings else (1e-5, 1e-6)
    module = make(name, **settings)
    trainer, losses = fit(module, tmp_path / "one", LambdaMonitor())
    (_, metrics), (logged, _) = on_ranks(partial(whole_and_resumed, tmp_path, name, settings), 2)
    for step, expected in enumerate(losses):
        for key, value in expected.items():
            assert logged[step][key] == pytest.approx(value, rel=near), key
    for key in ("val/loss", "val/tokens", *(["lambda"] if name == "diff-debug" else [])):
        # V2's lambda is a mean over the samples that a rank sees.
        assert metrics[key] == pytest.approx(float(trainer.callback_metrics[key]), rel=near), key
    last = "step=4.ckpt"
    (weights, _), (sharded, moments) = states(tmp_path / "one" / last), states(tmp_path / "whole" / last)
    same(sharded, weights, rtol=1e-5, atol=atol)
    for a, b in zip((sharded, moments), states(tmp_path / "resumed" / last), strict=True):
        same(a, b, rtol=0, atol=0)
    # What was sharded goes on whole, too.
    half = tmp_path / "whole" / "exact=2.ckpt"
    fit(make(name, **settings), tmp_path / "back", ckpt_path=str(half))
    same(states(tmp_path / "back" / last)[0], weights, rtol=1e-5, atol=atol)


def mixed_and_refused(directory):
    """Runs in bf16 with graphs, with a spoiled sample, and what is refused."""
    _, in_bf16 = fit(make(compile=True), directory / "bf16", **sharded() | {"precision": "bf16-mixed"})
    # Sample 12 is in the second batch, on the second rank. Only the first rank warns.
    _, spoiled = fit(make(), directory / "spoiled", data=Samples(spoiled=12), **sharded())
    with pytest.raises(ValueError, match="EMA"):
        fit(make(), directory / "ema", EMA(), **sharded())
    with pytest.raises(ValueError, match="with the strategy"):
        fit(make(), directory / "refused", ckpt_path=str(directory / "one" / "exact=2.ckpt"), **sharded())
    return [step["train/loss"] for step in in_bf16], spoiled[-1]["train/skipped_steps"]


@pytest.mark.forks
@pytest.mark.nightly  # without sharding, `test_finite.py` has a step that no rank makes
def test_sharded_runs_in_bf16_skip_what_is_not_finite(tmp_path, monkeypatch):
    """Compiled in bfloat16 the losses stay near; a step of which one rank's loss is NaN is skipped on both."""
    compile_with(monkeypatch)
    _, losses = fit(make(), tmp_path / "one_bf16", precision="bf16-mixed")
    fit(make(), tmp_path / "one")
    with pytest.warns(UserWarning, match="is skipped"):
        _, skipped = fit(make(), tmp_path / "spoiled_one", data=Samples(spoiled=12))
    assert skipped[-1]["train/skipped_steps"] == 2
    (first, one_skipped), (second, two_skipped) = on_ranks(partial(mixed_and_refused, tmp_path), 2)
    assert one_skipped == two_skipped == 2
    means = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert means == pytest.approx([step["train/loss"] for step in losses], rel=1e-2)
    one, two = (states(tmp_path / name / "step=4.ckpt")[0] for name in ("spoiled_one", "spoiled"))
    same(two, one, rtol=1e-5, atol=1e-6)


def test_blocks_are_found_in_any_model():
    for name in ("diff_vit_debug", "resnet10t", "convnext_atto"):
        assert len(list(find_blocks(timm.create_model(name)))) == 4, name
    assert len(list(find_blocks(ContrastiveModule("CLIP-debug").model))) == 6
