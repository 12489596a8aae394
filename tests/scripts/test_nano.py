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


def compare(assert_equal, nano, package, inputs):
    run = (lambda model: [model(inputs)],) * 2
    assert_equal(nano.double(), package.double(), run, renamed)


@pytest.mark.parametrize("attention", nano_diff.ATTENTION)
def test_a_vit_equals_the_packages(attention, assert_equal):
    torch.manual_seed(0)
    package = timm.create_model(VITS[attention], img_size=8, patch_size=2, in_chans=1, num_classes=10)
    compare(assert_equal, nano_diff.ViT(attention), package, torch.randn(3, 1, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("attention", nano_diff.ATTENTION)
def test_a_language_model_equals_the_packages(attention, assert_equal):
    torch.manual_seed(0)
    config = LanguageConfig(vocab_size=256, dim=96, depth=4, head_dim=24, **LANGUAGE[attention])
    compare(assert_equal, nano_diff.LanguageModel(attention), LanguageModel(config), torch.randint(256, (2, 20)))


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
