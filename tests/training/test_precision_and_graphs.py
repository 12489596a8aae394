"""Graphs of compiled runs, and that the settings for GPUs change results by rounding alone."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule, create_loss
from diffvision.training.module import mark_batch_dynamic
from diffvision.training.optim import OptimizerSettings, create_optimizer, param_groups


def make(kind, **settings):
    torch.manual_seed(0)
    if kind == "vit":
        return ClassificationModule("diff_vit_debug", num_classes=10, **settings)
    return ContrastiveModule("DiffCLIP-debug-0.2", **settings)


def inputs(kind, size):
    image = torch.randn(size, 3, 32, 32)
    if kind == "vit":
        return (image,)
    text = torch.randint(1, 98, (size, 24))
    text[:, 20] = 99
    return image, text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "vit"])
def test_a_compiled_model_is_one_graph_for_training_and_one_for_evaluation(kind, monkeypatch):
    """The batches of training have one size, and the last one of an evaluation any."""
    compiled = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **given: compiled(self, backend="eager", **given | {"options": None})
    )
    torch.compiler.reset()
    counters.clear()
    model = make(kind, compile=True).model
    for _ in range(3):
        out = model(*inputs(kind, 8))
        (out if kind == "vit" else out["image_features"] + out["text_features"]).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    model.eval()
    with torch.inference_mode():
        for size in (8, 8, 3, 5, 2):
            model(*map(mark_batch_dynamic, inputs(kind, size)))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "vit"])
def test_model_and_loss_of_a_step_are_one_graph_for_batches_of_any_size(kind):
    torch.compiler.reset()
    counters.clear()
    module = make(kind)
    if kind == "clip":
        module.loss = create_loss(module.loss_name, rank=0, world_size=1)

    def step(*batch):
        if kind == "clip":
            return module.loss_of(module.model(*batch))
        return nn.functional.cross_entropy(module.model(batch[0]), batch[1])

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for size in (8, 8, 3, 5, 2):
        batch = inputs(kind, size) if kind == "clip" else (*inputs(kind, size), torch.arange(size))
        loss = compiled(*map(mark_batch_dynamic, batch))
        loss.backward()
        torch.testing.assert_close(loss, step(*batch), rtol=1e-6, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_fused_adamw_is_the_formula():
    steps = {}
    for fused in (True, False):
        model = make("vit").model
        optimizer = create_optimizer(param_groups(model, 0.2), OptimizerSettings())
        assert optimizer.defaults["fused"]
        if not fused:
            for group in optimizer.param_groups:
                group["fused"], group["foreach"] = False, False
        torch.manual_seed(1)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        steps[fused] = model.state_dict()
    for name, value in steps[True].items():
        torch.testing.assert_close(value, steps[False][name], rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("kind", ["clip", "vit"])
def test_channels_last_changes_rounding_alone(kind):
    """Outputs and gradients, of weights and images in the other memory format."""
    found = {}
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = make(kind).model.to(memory_format=memory_format)
        torch.manual_seed(1)
        image, *text = inputs(kind, 4)
        out = model(image.to(memory_format=memory_format), *text)
        out = out if kind == "vit" else out["image_features"]
        out.square().sum().backward() if kind == "vit" else out[:, 0].sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found[memory_format] = {"out": out.detach()} | gradients
    for name, value in found[torch.channels_last].items():
        expected = found[torch.contiguous_format][name]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_bfloat16_weights_lose_small_steps_and_float32_weights_keep_them():
    """Why the recipes train in bf16-mixed: a step of 0.1% of a weight is less than half of bfloat16's spacing."""
    weights = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.ones(1000, dtype=dtype))
        optimizer = create_optimizer([{"params": [weight], "weight_decay": 0.0}], OptimizerSettings(lr=1e-3))
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        weights[dtype] = weight.float().mean().item()
    assert weights[torch.float32] == pytest.approx(0.9, abs=1e-3)
    assert weights[torch.bfloat16] == 1.0
