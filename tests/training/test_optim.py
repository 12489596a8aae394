"""Groups and schedule against hand-computed values."""

import math
import re
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import timm
import torch
from torch import nn

from diffvision import nn as layers
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.optim import OptimizerSettings, create_optimizer, param_groups
from diffvision.training.schedule import WarmupDecay


def trainer(batches: float = 10, **settings) -> pl.Trainer:
    """A trainer whose epochs have this many batches."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    made = pl.Trainer(**quiet | {"max_epochs": 4} | settings)
    made.fit_loop.max_batches = batches
    return made


def schedule(trainer: pl.Trainer, optimizer=None, **settings) -> WarmupDecay:
    """A schedule that has begun."""
    chosen = OptimizerSettings(**settings)
    optimizer = optimizer or create_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], chosen)
    made = WarmupDecay(optimizer, chosen)
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
    rest, decayed = param_groups(model, OptimizerSettings(weight_decay=0.5))
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        *(f"attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "proj")),
        "fc.weight",
        "positional_embedding",
    }
    assert len(rest["params"]) + len(decayed["params"]) == len(names) - 1
    assert (rest["weight_decay"], decayed["weight_decay"]) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "AdamW"}, "did you mean adamw?"),
        ({"name": "adahessian"}, "optimizer.name"),
        ({"name": "fusedadam"}, "fusedadam"),
        ({"name": "lion", "eps": 1e-8}, "eps"),
        ({"name": "lion", "args": {"cautoin": True}}, "cautoin"),
        ({"name": "lion", "betas": (2.0, 3.0)}, "beta"),
        ({"betas": (0.9,)}, "optimizer.betas"),
        ({"betas": (0.9, 1.5)}, "optimizer.betas"),
        ({"name": "lion", "weight_decay": -0.1}, "optimizer.weight_decay"),
        ({"clip_norm": -1.0}, "optimizer.clip_norm"),
        ({"max_skipped": -1}, "optimizer.max_skipped"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps"),
        ({"warmup_epochs": -1}, "optimizer.warmup_epochs"),
        ({"default_warmup_steps": -1}, "optimizer.default_warmup_steps"),
        ({"decay": "step"}, "optimizer.decay"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, named):
    with pytest.raises(ValueError, match=re.escape(named)) as refused:
        OptimizerSettings(**settings)
    assert "\n" not in str(refused.value)


def test_arguments_reach_the_optimizer_and_defaults_are_its_own():
    def make(**settings):
        groups = [{"params": [nn.Parameter(torch.zeros(4, 4))], "weight_decay": 0.25}]
        (group,) = create_optimizer(groups, OptimizerSettings(**settings)).param_groups
        return group

    group = make(name="lion", args={"caution": True})
    assert (group["caution"], group["betas"], group["weight_decay"]) == (True, (0.9, 0.99), 0.25)
    assert make(name="lion", betas=[0.95, 0.98])["betas"] == (0.95, 0.98)
    assert make(args={"amsgrad": True})["amsgrad"]
    for module, adamw in ((ContrastiveModule, ((0.9, 0.98), 1e-6)), (ClassificationModule, ((0.9, 0.999), 1e-8))):
        args = {"num_classes": 2} if module is ClassificationModule else {}
        name = "diff_vit_debug" if args else "DiffCLIP-debug-0.2"
        made = module(name, optimizer={"lr": 1e-3}, **args)
        assert (made.settings.betas, made.settings.eps) == adamw
        assert module(name, optimizer=OptimizerSettings(name="lion"), **args).settings.betas is None


def test_muon_updates_matrices_of_blocks_and_adamw_the_rest():
    settings = OptimizerSettings(name="muon", lr=1e-3)
    module = ContrastiveModule("DiffCLIP-V2-debug", optimizer=settings)
    groups = module.parameter_groups()
    names = {id(p): name for name, p in module.model.named_parameters()}
    muon = {names[id(p)] for group in groups if "use_fallback" not in group for p in group["params"]}
    assert all(("blocks." in name or "resblocks." in name) and name.endswith("weight") for name in muon)
    assert not any("lambda" in name or "norm" in name or "ln_" in name or "embed" in name for name in muon)
    assert {"visual.trunk.blocks.0.attn.q_proj.weight", "transformer.resblocks.1.mlp.c_fc.weight"} <= muon
    assert sum(len(group["params"]) for group in groups) == len(names)
    optimizer = create_optimizer(groups, module.settings)
    for parameter in module.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    by_muon = {names[id(p)] for p, state in optimizer.state.items() if state["use_muon"]}
    assert by_muon == {n for n in muon if min(dict(module.model.named_parameters())[n].shape) >= 4}
    with pytest.raises(ValueError, match="Muon"):
        param_groups(nn.Linear(8, 8), settings)


@pytest.mark.parametrize(
    ("name", "fused"), [("vit_tiny_patch16_224", True), ("diff_vit_debug", False), ("plain_vit_debug", False)]
)
def test_muon_warns_of_a_fused_projection(name, fused):
    with pytest.warns(match="qkv") if fused else nullcontext():
        param_groups(timm.create_model(name), OptimizerSettings(name="muon"))


def test_each_tower_has_its_own_layer_decay():
    module = ContrastiveModule("DiffCLIP-debug-0.2", image_layer_decay=0.5, text_layer_decay=0.1)
    scales = {id(p): group["lr_scale"] for group in module.parameter_groups() for p in group["params"]}
    scale = {name: scales[id(p)] for name, p in module.model.named_parameters()}
    for name in ("logit_scale", "text_projection", "ln_final.weight", "visual.head.proj.weight"):
        assert scale[name] == 1, name
    blocks = len(module.model.visual.trunk.blocks), len(module.model.transformer.resblocks)
    for name, decay, count in (("visual.trunk.blocks", 0.5, blocks[0]), ("transformer.resblocks", 0.1, blocks[1])):
        for block in range(count):
            values = {value for key, value in scale.items() if key.startswith(f"{name}.{block}.")}
            assert values == {decay ** (count - block)}, (name, block)
    for name in ("visual.trunk.cls_token", "visual.trunk.patch_embed.proj.weight"):
        assert scale[name] == 0.5 ** (blocks[0] + 1)
    for name in ("token_embedding.weight", "positional_embedding"):
        assert scale[name] == 0.1 ** (blocks[1] + 1)
    module = ContrastiveModule("DiffCLIP-debug-0.2", image_layer_decay=0.5)
    scales = {id(p): group["lr_scale"] for group in module.parameter_groups() for p in group["params"]}
    assert scales[id(module.model.token_embedding.weight)] == 1
    with pytest.raises(ValueError, match="text_layer_decay"):
        ContrastiveModule("DiffCLIP-debug-0.2", text_layer_decay=1.5)


def test_undecayed_names_and_a_locked_model():
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    (group,) = param_groups(model, OptimizerSettings(weight_decay=0.5), undecayed={"0.weight"})
    assert group["weight_decay"] == 0.0
    with pytest.raises(ValueError, match="locked"):
        param_groups(model.requires_grad_(False), OptimizerSettings())


COSINE = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done / 8)) for done in range(8)]


@pytest.mark.parametrize(
    ("settings", "steps", "rates"),
    [
        ({"start_lr": 0.2, "end_lr": 0.1, "warmup_steps": 4}, 12, [0.4, 0.6, 0.8, 1.0, *COSINE, 0.1, 0.1]),
        ({"end_lr": 0.2, "warmup_steps": 2, "decay": "linear"}, 6, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
    ],
)
def test_the_rate_of_each_step(settings, steps, rates):
    made = schedule(trainer(max_steps=steps), lr=1.0, **settings)
    measured = []
    for _ in rates:
        measured.append(made.optimizer.param_groups[0]["lr"])
        made.optimizer.step()
        made.step()
    assert measured == pytest.approx(rates)


@pytest.mark.parametrize(
    ("settings", "run", "warmup", "total"),
    [
        ({}, {"max_epochs": 4, "accumulate_grad_batches": 4}, 3, 12),
        ({}, {"max_epochs": 4, "max_steps": 25}, 10, 25),
        ({}, {"max_epochs": -1, "max_steps": 25}, 10, 25),
        ({}, {"max_epochs": 2}, 10, 20),
        ({}, {"max_epochs": 1}, 1, 10),  # not longer than half of the run: a tenth of it
        ({}, {"max_epochs": 1, "max_steps": 3}, 0, 3),
        ({}, {"batches": math.inf, "max_epochs": -1, "max_steps": 50}, 5, 50),
        ({}, {"batches": 1, "fast_dev_run": True}, 0, 1),
        ({"warmup_epochs": 1.5}, {"max_epochs": 4}, 15, 40),
        ({"warmup_epochs": 1}, {"max_epochs": 1}, 1, 10),  # one that is set may be up to the run's length
        ({"warmup_epochs": 1}, {"max_epochs": 4, "max_steps": 11}, 10, 11),
        ({"warmup_steps": 3, "warmup_epochs": 1}, {"max_epochs": 4}, 3, 40),
        ({"default_warmup_steps": 1000}, {"max_epochs": -1, "max_steps": 2000}, 1000, 2000),
        ({"default_warmup_steps": 1000}, {"max_epochs": -1, "max_steps": 1999}, 199, 1999),
    ],
)
def test_lengths_come_from_the_configuration(settings, run, warmup, total):
    made = schedule(trainer(**run), **settings)
    assert (made.warmup, made.total) == (warmup, total)


def test_lengths_that_cannot_be_known_are_refused():
    with pytest.raises(ValueError, match="max_steps"):
        schedule(trainer(batches=math.inf))
    with pytest.raises(ValueError, match="warmup_steps"):
        schedule(trainer(batches=math.inf, max_steps=5), warmup_epochs=1)
    optimizer = create_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], OptimizerSettings())
    made = WarmupDecay(optimizer, OptimizerSettings())
    optimizer.step()
    with pytest.raises(RuntimeError, match="on_train_start"):
        made.step()


def test_resuming_keeps_the_step_and_takes_everything_else_from_the_configuration():
    def make(**settings) -> WarmupDecay:
        chosen = OptimizerSettings(warmup_steps=2, **settings)
        return WarmupDecay(create_optimizer(param_groups(nn.Linear(2, 2), chosen), chosen), chosen)

    old, new = make(lr=1.0, weight_decay=0.1), make(lr=0.5, weight_decay=0.3, betas=(0.8, 0.9))
    old.begin(trainer())
    for _ in range(5):
        old.optimizer.step()
        old.step()
    new.optimizer.load_state_dict(old.optimizer.state_dict())
    new.load_state_dict(old.state_dict())
    new.begin(trainer())
    (rest, decayed), (_, before) = new.optimizer.param_groups, old.optimizer.param_groups
    assert decayed["lr"] == pytest.approx(before["lr"] / 2)
    assert (decayed["weight_decay"], rest["weight_decay"], decayed["betas"]) == (0.3, 0.0, (0.8, 0.9))
