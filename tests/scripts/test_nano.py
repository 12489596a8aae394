"""The one-file versions compute what the package computes, and they train."""

import pytest
import timm
import torch

import diffvision  # noqa: F401
import nano_diff
from diffvision.models.language import LanguageConfig, LanguageModel

RENAMED = {"patch_embed.": "patch_embed.proj.", "mlp.0.": "mlp.fc1.", "mlp.2.": "mlp.fc2."}  # nano's name -> timm's
VITS = {"plain": "plain_vit_debug", "v1": "diff_vit_debug", "v2": "diffv2_vit_debug"}
LANGUAGE = {
    "plain": {"variant": "standard", "num_heads": 4, "mlp_dim": 256},
    "v1": {"variant": "v1", "num_heads": 2, "mlp_dim": 256},
    "v2": {"variant": "v2", "num_heads": 4, "mlp_dim": 223},
}


def renamed(name: str) -> str:
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return name


def assert_equal(nano, package, inputs):
    """Give both models random weights, and compare their outputs and their gradients in float64."""
    nano, package = nano.double(), package.double()
    for name, parameter in nano.named_parameters():  # also norms, biases and the class token, which start as constants
        std = 0.2 if "q_proj" in name or "k_proj" in name else 0.1  # maps that are far from uniform
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=std)
    package.load_state_dict({renamed(name): value for name, value in nano.state_dict().items()})
    expected, outputs = package(inputs), nano(inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(expected) / expected.numel() ** 0.5
    (expected * weights).sum().backward()
    (outputs * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in package.named_parameters()}
    for name, parameter in nano.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        expected = gradients[renamed(name)]
        atol = 1e-5 * max(1, expected.abs().max().item())  # small entries are sums that cancel
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("attention", nano_diff.ATTENTION)
def test_a_vit_equals_the_packages(attention):
    torch.manual_seed(0)
    package = timm.create_model(VITS[attention], img_size=8, patch_size=2, in_chans=1, num_classes=10)
    assert_equal(nano_diff.ViT(attention), package, torch.randn(3, 1, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("attention", nano_diff.ATTENTION)
def test_a_language_model_equals_the_packages(attention):
    torch.manual_seed(0)
    config = LanguageConfig(vocab_size=256, dim=96, depth=4, head_dim=24, **LANGUAGE[attention])
    assert_equal(nano_diff.LanguageModel(attention), LanguageModel(config), torch.randint(256, (2, 20)))


@pytest.mark.parametrize("attention", nano_diff.ATTENTION)
@pytest.mark.parametrize("task", nano_diff.TASKS)
def test_three_steps_train(task, attention, monkeypatch):
    model, load, _, rate = nano_diff.TASKS[task]
    few = [tensor[:16] for tensor in load()]
    monkeypatch.setitem(nano_diff.TASKS, task, (model, lambda: few, 4, rate))  # batches of 4
    start, result = nano_diff.train(task, attention, seed=0, steps=0)
    assert result > 0
    trained, _ = nano_diff.train(task, attention, seed=0, steps=3)
    for (name, before), after in zip(start.named_parameters(), trained.parameters(), strict=True):
        assert not torch.equal(before, after), name
