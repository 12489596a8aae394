"""Groups and schedule against hand-computed values."""

import math

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from diffvision import nn as layers
from diffvision.training.optim import OptimizerSettings, adamw, param_groups
from diffvision.training.schedule import WarmupDecay


def trainer(batches: float = 10, **settings) -> pl.Trainer:
    """A trainer whose epochs have this many batches."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    made = pl.Trainer(**quiet | {"max_epochs": 4} | settings)
    made.fit_loop.max_batches = batches
    return made


def schedule(optimizer, settings: OptimizerSettings, trainer: pl.Trainer, state: dict | None = None) -> WarmupDecay:
    """A schedule that has begun, after the state of another one was loaded."""
    made = WarmupDecay(optimizer, settings, trainer.max_steps, trainer.max_epochs)
    if state is not None:
        made.load_state_dict(state)
    made.begin(trainer)
    return made


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_matrices_decay_and_norms_biases_lambdas_and_scales_do_not(variant):
    model = nn.ModuleDict(
        {"attn": layers.build_attention(variant, 16, 2, qk_norm=True), "ln": nn.LayerNorm(16), "fc": nn.Linear(16, 4)}
    )
    model.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.0)))
    model.register_parameter("positional_embedding", nn.Parameter(torch.zeros(5, 16)))
    model.register_parameter("frozen", nn.Parameter(torch.zeros(5, 16), requires_grad=False))
    rest, decayed = param_groups(model, 0.5)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        *(f"attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "proj")),
        "fc.weight",
        "positional_embedding",
    }
    assert len(rest["params"]) + len(decayed["params"]) == len(names) - 1
    assert (rest["weight_decay"], decayed["weight_decay"]) == (0.0, 0.5)


def test_undecayed_names_and_a_locked_model():
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    (group,) = param_groups(model, 0.5, undecayed={"0.weight"})
    assert group["weight_decay"] == 0.0
    with pytest.raises(ValueError, match="locked"):
        param_groups(model.requires_grad_(False), 0.5)


def test_schedule_is_linear_then_cosine_between_the_given_rates():
    settings = OptimizerSettings(lr=1.0, start_lr=0.2, end_lr=0.1, warmup_steps=4)
    optimizer = adamw([{"params": [nn.Parameter(torch.zeros(1))]}], settings)
    scheduler = schedule(optimizer, settings, trainer(max_steps=12))
    rates = []
    for _ in range(14):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == pytest.approx([0.4, 0.6, 0.8, 1.0])
    assert rates[4] == pytest.approx(1.0)
    assert rates[8] == pytest.approx(0.55)  # half of the cosine
    assert rates[12:] == pytest.approx([0.1, 0.1])  # and it stays at the end
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_a_linear_decay_is_a_line():
    settings = OptimizerSettings(lr=1.0, end_lr=0.2, warmup_steps=2, decay="linear")
    optimizer = adamw([{"params": [nn.Parameter(torch.zeros(1))]}], settings)
    scheduler = schedule(optimizer, settings, trainer(max_steps=6))
    assert [scheduler.factor(step) for step in range(8)] == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize(
    ("settings", "warmup", "total"),
    [
        ({"max_epochs": 4}, 10, 40),
        ({"max_epochs": 4, "accumulate_grad_batches": 4}, 3, 12),
        ({"max_epochs": 4, "max_steps": 25}, 10, 25),
        ({"max_epochs": -1, "max_steps": 25}, 10, 25),
        ({"max_epochs": 2}, 10, 20),
        ({"max_epochs": 1}, 1, 10),  # not longer than half of the run: a tenth of it
        ({"max_epochs": 1, "max_steps": 3}, 0, 3),
        ({"batches": math.inf, "max_epochs": -1, "max_steps": 50}, 5, 50),
        ({"batches": 1, "fast_dev_run": True}, 0, 1),
    ],
)
def test_lengths_come_from_the_configuration(settings, warmup, total):
    optimizer = adamw([{"params": [nn.Parameter(torch.zeros(1))]}], OptimizerSettings())
    scheduler = schedule(optimizer, OptimizerSettings(), trainer(**settings))
    assert (scheduler.warmup, scheduler.total) == (warmup, total)


def test_a_default_in_steps_shrinks_as_an_epoch_does_and_one_that_is_set_counts_in_a_dry_run_only():
    optimizer = adamw([{"params": [nn.Parameter(torch.zeros(1))]}], OptimizerSettings())
    default = OptimizerSettings(default_warmup_steps=1000)
    for steps, warmup in ((10_000, 1000), (2000, 1000), (1999, 199), (3, 0)):
        assert schedule(optimizer, default, trainer(max_epochs=-1, max_steps=steps)).warmup == warmup
    assert schedule(optimizer, OptimizerSettings(warmup_epochs=1), trainer(fast_dev_run=True)).warmup == 0


def test_lengths_that_cannot_be_known_or_do_not_fit_are_refused():
    optimizer = adamw([{"params": [nn.Parameter(torch.zeros(1))]}], OptimizerSettings())
    with pytest.raises(ValueError, match="max_steps"):
        schedule(optimizer, OptimizerSettings(), trainer(batches=math.inf))
    with pytest.raises(ValueError, match="warmup_steps"):
        schedule(optimizer, OptimizerSettings(warmup_epochs=1), trainer(batches=math.inf, max_steps=5))
    with pytest.raises(ValueError, match="clip_norm is -1"):
        OptimizerSettings(clip_norm=-1.0)
    with pytest.raises(ValueError, match="max_skipped is -1"):
        OptimizerSettings(max_skipped=-1)
    for name in ("warmup_steps", "warmup_epochs", "default_warmup_steps"):
        with pytest.raises(ValueError, match=f"{name} is -1; it must be 0 or more"):
            OptimizerSettings(**{name: -1})
    with pytest.raises(ValueError, match="decay is 'step'; it must be one"):
        OptimizerSettings(decay="step")


@pytest.mark.parametrize("setting", [{"warmup_epochs": 1}, {"warmup_steps": 10}, {}, {"default_warmup_steps": 9}])
def test_a_warmup_shortened_for_a_run_stays_when_the_run_is_extended(setting, caplog):
    def make(epochs: int, state: dict | None = None, **more) -> WarmupDecay:
        settings = OptimizerSettings(**setting | more)
        optimizer = adamw([{"params": [nn.Parameter(torch.zeros(1))]}], settings)
        return schedule(optimizer, settings, trainer(max_epochs=epochs), state)

    with caplog.at_level("INFO"):
        short = make(1)
    assert short.warmup == 1
    is_set = "default_warmup_steps" not in setting and setting != {}
    assert any("warm-up shortened to 1" in line for line in caplog.messages) == is_set
    extended = make(4)
    assert extended.warmup == (9 if "default_warmup_steps" in setting else 10)
    assert make(4, short.state_dict()).warmup == 1
    assert make(4, short.state_dict(), warmup_steps=3).warmup == 3
    changed = make(4, {"last_epoch": 2}, warmup_steps=3)  # of an earlier version
    assert (changed.warmup, changed.last_epoch) == (3, 2)


def test_resuming_keeps_the_step_and_takes_everything_else_from_the_configuration():
    def make(**settings) -> tuple[torch.optim.Optimizer, WarmupDecay]:
        chosen = OptimizerSettings(warmup_steps=2, **settings)
        optimizer = adamw(param_groups(nn.Linear(2, 2), chosen.weight_decay), chosen)
        return optimizer, WarmupDecay(optimizer, chosen, -1, 4)

    old, old_schedule = make(lr=1.0, weight_decay=0.1)
    old_schedule.begin(trainer())
    for _ in range(5):
        old.step()
        old_schedule.step()
    new, new_schedule = make(lr=0.5, weight_decay=0.3, betas=(0.8, 0.9))
    new.load_state_dict(old.state_dict())
    new_schedule.load_state_dict(old_schedule.state_dict())
    new_schedule.begin(trainer())
    assert new.param_groups[1]["lr"] == pytest.approx(old.param_groups[1]["lr"] / 2)
    assert new.param_groups[1]["weight_decay"] == 0.3
    assert new.param_groups[0]["weight_decay"] == 0.0
    assert new.param_groups[1]["betas"] == (0.8, 0.9)


def test_a_schedule_that_has_not_begun_is_one_error():
    settings = OptimizerSettings()
    optimizer = adamw([{"params": [nn.Parameter(torch.zeros(1))]}], settings)
    scheduler = WarmupDecay(optimizer, settings, 5, None)
    optimizer.step()
    with pytest.raises(RuntimeError, match="on_train_start"):
        scheduler.step()


def test_layer_scale_multiplies_the_rate():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = adamw([{"params": [parameter], "lr_scale": 0.25}], OptimizerSettings(lr=2.0))
    schedule(optimizer, OptimizerSettings(lr=2.0, warmup_steps=4), trainer())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * 0.25 / 4)
