"""Graphs of compiled runs, and that the settings for GPUs change results by rounding alone."""

import pytest
import torch

from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
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
