"""Groups and schedule against hand-computed values."""

import math

import lightning.pytorch as pl
import pytest
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


@pytest.mark.parametrize(
    ("settings", "setting", "remedy"),
    [
        ({"name": "lionn"}, "optimizer.name", "did you mean lion?"),
        ({"name": "AdamW"}, "optimizer.name", "did you mean adamw?"),
        ({"name": "adahessian"}, "optimizer.name", "second derivatives"),
        ({"name": "fusedadam"}, "optimizer.name", "CUDA"),
        ({"name": "lion", "eps": 1e-8}, "optimizer.eps", "null"),
        ({"name": "sgd", "betas": (0.9, 0.99)}, "optimizer.betas", "null"),
        ({"name": "lion", "args": {"cautoin": True}}, "optimizer.args.cautoin", "did you mean caution?"),
        ({"args": {"amsgard": True}}, "optimizer.args.amsgard", "did you mean amsgrad?"),
        ({"name": "lion", "args": {"lr": 1}}, "optimizer.args", "optimizer.lr"),
        ({"name": "muon", "args": {"adjust_lr_fn": "x"}}, "muon", "adjust_lr_fn"),
        ({"name": "lion", "betas": (2.0, 3.0)}, "lion", "beta"),
        ({"betas": (0.9,)}, "optimizer.betas", "two numbers"),
        ({"betas": (0.9, 1.5)}, "optimizer.betas", "below 1"),
        ({"name": "lion", "weight_decay": -0.1}, "optimizer.weight_decay", "0 or more"),
    ],
)
def test_optimizers_and_arguments_that_cannot_work_are_refused(settings, setting, remedy):
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=setting) as refused:
        OptimizerSettings(**settings)
    assert remedy in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) <= 120
    assert torch.equal(state, torch.get_rng_state())


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
    module = ContrastiveModule("DiffCLIP-V2-debug", optimizer=OptimizerSettings(name="muon", lr=1e-3))
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
        param_groups(nn.Linear(8, 8), 0.1, is_muon=True)


def test_each_tower_has_its_own_layer_decay():
    module = ContrastiveModule("DiffCLIP-debug-0.2", image_layer_decay=0.5, text_layer_decay=0.1)
    scales = {id(p): group["lr_scale"] for group in module.parameter_groups() for p in group["params"]}
    scale = {name: scales[id(p)] for name, p in module.model.named_parameters()}
    assert (
        scale["logit_scale"]
        == scale["text_projection"]
        == scale["ln_final.weight"]
        == scale["visual.head.proj.weight"]
        == 1
    )
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
    (group,) = param_groups(model, 0.5, undecayed={"0.weight"})
    assert group["weight_decay"] == 0.0
    with pytest.raises(ValueError, match="locked"):
        param_groups(model.requires_grad_(False), 0.5)


def test_schedule_is_linear_then_cosine_between_the_given_rates():
    settings = OptimizerSettings(lr=1.0, start_lr=0.2, end_lr=0.1, warmup_steps=4)
    optimizer = create_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], settings)
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
    optimizer = create_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], settings)
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
    optimizer = create_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], OptimizerSettings())
    scheduler = schedule(optimizer, OptimizerSettings(), trainer(**settings))
    assert (scheduler.warmup, scheduler.total) == (warmup, total)


def test_a_default_in_steps_shrinks_as_an_epoch_does_and_one_that_is_set_counts_in_a_dry_run_only():
    optimizer = create_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], OptimizerSettings())
    default = OptimizerSettings(default_warmup_steps=1000)
    for steps, warmup in ((10_000, 1000), (2000, 1000), (1999, 199), (3, 0)):
        assert schedule(optimizer, default, trainer(max_epochs=-1, max_steps=steps)).warmup == warmup
    assert schedule(optimizer, OptimizerSettings(warmup_epochs=1), trainer(fast_dev_run=True)).warmup == 0


def test_lengths_that_cannot_be_known_or_do_not_fit_are_refused():
    optimizer = create_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], OptimizerSettings())
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
        optimizer = create_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], settings)
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
        optimizer = create_optimizer(param_groups(nn.Linear(2, 2), chosen.weight_decay), chosen)
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
    optimizer = create_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], settings)
    scheduler = WarmupDecay(optimizer, settings, 5, None)
    optimizer.step()
    with pytest.raises(RuntimeError, match="on_train_start"):
        scheduler.step()


def test_layer_scale_multiplies_the_rate():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = create_optimizer([{"params": [parameter], "lr_scale": 0.25}], OptimizerSettings(lr=2.0))
    schedule(optimizer, OptimizerSettings(lr=2.0, warmup_steps=4), trainer())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * 0.25 / 4)
