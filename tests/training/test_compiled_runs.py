"""Runs with torch.compile against eager ones: weights, how many graphs they make, gradients that share memory."""

import copy
from functools import partial

import pytest
import timm
import torch
import training_fits
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch._dynamo.utils import counters
from training_fits import LANGUAGE, EachStep, Rows, compile_with, same

import command_line
from diffvision.training.callbacks import LambdaMonitor
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.compilation import compile_in_place
from diffvision.training.ema import EMA
from diffvision.training.fault_tolerance import protect
from diffvision.training.fit import fit
from diffvision.training.language import LanguageModule
from diffvision.training.optim import OptimizerSettings
from ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:resumed from")  # an ordinary loader does not save its position
# eps: biases of keys have a gradient of rounding errors alone, which AdamW would scale up to whole steps.
SETTINGS = OptimizerSettings(lr=1e-3, warmup_steps=0, clip_norm=1.0, eps=1e-4)


class Samples(Rows):
    """16 samples; validation ends with a batch of 3."""

    validated = 11

    def __init__(self, kind, size=8):
        generator = torch.Generator().manual_seed(0)
        image = torch.randn(16, 3, 32, 32, generator=generator)
        text = torch.randint(1, 98, (16, 24), generator=generator)
        text[:, 20] = 99  # OpenCLIP pools at the largest token, the end
        label = torch.randint(0, 10, (16,), generator=generator)
        tokens = torch.randint(0, 50, (16, 13), generator=generator)
        documents = torch.randint(0, 2, (16, 13), generator=generator).cumsum(1)
        learned = torch.arange(13) < torch.randint(3, 14, (16, 1), generator=generator)
        rows = {"vit": {"image": image, "label": label}, "clip": {"image": image, "text": text}}
        rows["packed"] = {"tokens": tokens, "documents": documents, "learned": learned}
        columns = rows.get(kind, {"tokens": tokens})
        super().__init__([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
        self.batch_size = size


def make(kind, **settings):
    torch.manual_seed(0)
    settings = {"optimizer": SETTINGS} | settings
    if kind == "vit":
        return ClassificationModule("diff_vit_debug", num_classes=10, **settings)
    if kind in ("language", "packed"):
        return LanguageModule("diff-debug", model_args=LANGUAGE, **settings)
    module = ContrastiveModule("DiffCLIP-debug-0.2", **settings)
    module.model.token_embedding = nn.Embedding(100, 64)  # AdamW on 49,408 unused rows would be most of the time
    return module


def train(kind, directory, *callbacks, ckpt_path=None, model=None, size=8, **settings):
    """Train for two epochs with an average of the weights; return it, the weights and the number of graphs."""
    torch.compiler.reset()
    counters.clear()
    module, average = make(kind, **model or {}), EMA(decay=0.5)
    settings = {"max_epochs": 2, "max_steps": -1, "check_val_every_n_epoch": 1, "log_every_n_steps": 1} | settings
    trainer = training_fits.trainer(LambdaMonitor(), average, *callbacks, default_root_dir=directory, **settings)
    with protect(trainer, module, ckpt_path=ckpt_path) as path:
        trainer.fit(module, datamodule=Samples(kind, size), ckpt_path=path, weights_only=True)
    return module.model.state_dict(), trainer.callback_metrics, counters["stats"]["unique_graphs"]


@pytest.fixture(
    params=[pytest.param("aot_eager", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.nightly)]
)
def backend(request, monkeypatch):
    if request.param != "inductor":
        compile_with(monkeypatch, request.param)
    yield request.param
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("kind", "model", "trainer", "graphs"),
    [
        ("vit", {"grad_checkpointing": True}, {"val_check_interval": 1}, 2),
        # Chunks of 3 and 2 pairs; validation.
        pytest.param("clip", {"accum_freq": 3}, {"val_check_interval": 1}, 3, marks=pytest.mark.nightly),
        ("clip", {"accum_freq": 8}, {}, 2),  # chunks of one pair; validation
        # Training, and validation of 4 and of 3 sequences.
        ("language", {}, {"accumulate_grad_batches": 2, "val_check_interval": 1}, 3),
        # One sequence of documents a batch, of which some tokens are not learned; three batches a step.
        pytest.param("packed", {}, {"accumulate_grad_batches": 3, "size": 1}, 3, marks=pytest.mark.nightly),
    ],
)
def test_a_compiled_run_is_the_eager_one(backend, kind, model, trainer, graphs, tmp_path):
    """With validation between steps, EMA and LambdaMonitor at every step."""
    expected, metrics, none = train(kind, tmp_path / "eager", model=model, **trainer)
    assert none == 0
    found, measured, made = train(kind, tmp_path / "compiled", model=model | {"compile": True}, **trainer)
    assert made == graphs
    assert not counters["graph_break"]
    same(found, expected, rtol=1e-4, atol=1e-5)
    assert measured.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(measured[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    "kind", ["vit", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("clip", "language"))]
)
def test_a_compiled_run_resumes_exactly_across_an_epochs_end(backend, kind, tmp_path):
    """In another process, which makes the same graphs again."""
    model = {"compile": True} | ({"accum_freq": 3} if kind == "clip" else {})
    whole, _, graphs = train(kind, tmp_path, ModelCheckpoint(tmp_path), EachStep(1), model=model, max_epochs=3)
    for step in (2, 4):  # where the second epoch and the third begin
        path, directory = tmp_path / f"exact={step}.ckpt", tmp_path / f"from_{step}"
        resumed, _, again = train(
            kind, directory, ModelCheckpoint(directory), EachStep(1), model=model, max_epochs=3, ckpt_path=str(path)
        )
        assert again == graphs
        same(resumed, whole, rtol=0, atol=0)


def two_processes(kind, model, trainer, directory):
    settings = {"devices": 2, "strategy": "ddp", "limit_val_batches": 0} | trainer
    weights, _, graphs = train(kind, directory / "two", model=model, **settings)
    return weights, graphs


@pytest.mark.forks
@pytest.mark.parametrize(
    ("kind", "trainer"),
    [
        ("clip", {}),
        pytest.param("language", {}, marks=pytest.mark.nightly),
        ("vit", {"size": 2, "accumulate_grad_batches": 3}),  # a batch of one on each rank
        pytest.param("packed", {"size": 2, "accumulate_grad_batches": 3}, marks=pytest.mark.nightly),
    ],
)
def test_two_compiled_processes_are_one(backend, kind, trainer, tmp_path):
    model = {"compile": True, "grad_checkpointing": kind == "clip"}
    expected, _, _ = train(kind, tmp_path / "one", model=model | {"compile": False}, limit_val_batches=0, **trainer)
    for weights, graphs in on_ranks(partial(two_processes, kind, model, trainer, tmp_path), 2):
        assert graphs == 1
        same(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("2.12.1", {"triton.mix_order_reduction": False}),
        ("2.13.0", {"triton.mix_order_reduction": False, "align_random_eager": True}),
        ("2.15.0+cu132", None),
    ],
)
def test_torch_that_computes_wrong_gradients_is_told_not_to(version, options, monkeypatch):
    given = {}
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **settings: given.update(settings))
    compile_in_place(nn.Linear(2, 2))
    assert given == {"fullgraph": True, "dynamic": False, "options": options}


def test_a_run_that_cannot_be_compiled_ends_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command_line.write_data(count=1)
    compile_with(monkeypatch, "eager")
    monkeypatch.setattr(timm.layers.Mlp, "forward", lambda self, x: torch._dynamo.graph_break() or x)
    torch.compiler.reset()
    with pytest.raises(ValueError, match=r"model\.compile") as caught:
        fit(command_line.fit("--model.compile=true"))
    assert "\n" not in str(caught.value)
    assert not [*command_line.KEPT.glob("*.ckpt")]
    torch.compiler.reset()


# --- gradients, of which torch returns some as views of others ---


class Tokens(nn.Module):
    """What a ViT does first: a class token and positions, each the same for all samples."""

    def __init__(self):
        super().__init__()
        self.token, self.positions = (nn.Parameter(torch.randn(1, n, 4)) for n in (1, 3))
        self.shift = nn.Parameter(torch.randn(1, 3, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        return self.linear(x + self.positions + self.shift)


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_a_compiled_module_add_up(batch, monkeypatch):
    compile_with(monkeypatch)
    eager = Tokens()
    module = copy.deepcopy(eager)
    compile_in_place(module)
    for steps in range(4):
        x = torch.randn(batch, 2, 4)
        for one in (eager, module):
            if steps == 2:
                one.zero_grad()
            one(x).square().sum().backward()
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 1.0) for one in (eager, module)]
        torch.testing.assert_close(*norms)
        for (name, expected), got in zip(eager.named_parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, msg=name)
    addresses = {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert len(addresses) == len(list(module.parameters()))
    assert all(parameter.grad.stride() == parameter.stride() for parameter in module.parameters())
