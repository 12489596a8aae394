"""The one-file versions compute what the package computes, and they train."""

import json

import open_clip
import pytest
import timm
import torch

import diffvision  # noqa: F401
import nano_clip
import nano_diff
from diffvision.models.language import LanguageConfig, LanguageModel


def assert_equal(nano, package, run, renamed, as_package=lambda name, tensor: tensor):
    """Give both models random weights, and compare their outputs and their gradients in float64.

    Args:
        run: a pair of functions, of the one-file model and of the package's -> tensors.
        renamed: a name in the one-file model -> the package's.
        as_package: a name and a tensor of the one-file model -> the tensor in the package's layout.
    """
    for name, parameter in nano.named_parameters():  # also norms, biases and the class token, which start as constants
        std = 0.2 if "q_proj" in name or "k_proj" in name else 0.1  # maps that are far from uniform
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name or "scale" in name else 0.0, std=std)
    package.load_state_dict({renamed(name): as_package(name, value) for name, value in nano.state_dict().items()})
    for ours, theirs in zip(run[0](nano), run[1](package), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        weights = torch.randn_like(theirs) / theirs.numel() ** 0.5
        (ours * weights).sum().backward(retain_graph=True)
        (theirs * weights).sum().backward(retain_graph=True)
    gradients = {name: parameter.grad for name, parameter in package.named_parameters()}
    for name, parameter in nano.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        theirs = gradients[renamed(name)]
        atol = 1e-5 * max(1, theirs.abs().max().item())  # small entries are sums that cancel
        torch.testing.assert_close(as_package(name, parameter.grad), theirs, rtol=1e-5, atol=atol)


TO_TIMM = {"patch_embed.": "patch_embed.proj.", "mlp.0.": "mlp.fc1.", "mlp.2.": "mlp.fc2."}  # nano's name -> timm's
VITS = {"plain": "plain_vit_debug", "v1": "diff_vit_debug", "v2": "diffv2_vit_debug"}
LANGUAGE = {
    "plain": {"variant": "standard", "num_heads": 4, "mlp_dim": 256},
    "v1": {"variant": "v1", "num_heads": 2, "mlp_dim": 256},
    "v2": {"variant": "v2", "num_heads": 4, "mlp_dim": 223},
}


def to_timm(name: str) -> str:
    for ours, theirs in TO_TIMM.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("attention", nano_diff.ATTENTION)
def test_models_equal_the_packages(attention):
    vit = timm.create_model(VITS[attention], img_size=8, patch_size=2, in_chans=1, num_classes=10)
    config = LanguageConfig(vocab_size=256, dim=96, depth=4, head_dim=24, **LANGUAGE[attention])
    for nano, package, inputs in (
        (nano_diff.ViT(attention), vit, torch.randn(3, 1, 8, 8, dtype=torch.float64)),
        (nano_diff.LanguageModel(attention), LanguageModel(config), torch.randint(256, (2, 20))),
    ):
        run = (lambda model, inputs=inputs: [model(inputs)],) * 2
        assert_equal(nano.double(), package.double(), run, to_timm)


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


PACKAGE = {"plain": "CLIP-debug", "diff": "DiffCLIP-debug"}
TO_OPENCLIP = {  # nano's name -> OpenCLIP's
    "image.proj.": "visual.head.proj.",
    "image.patch_embed.": "visual.trunk.patch_embed.proj.",
    "image.blocks.": "visual.trunk.blocks.",
    "image.": "visual.trunk.",
    "text.embed": "token_embedding.weight",
    "text.pos_embed": "positional_embedding",
    "text.proj.weight": "text_projection",
    "text.norm.": "ln_final.",
    "text.blocks.": "transformer.resblocks.",
}
IN_BLOCKS = {
    "visual": {".fc1.": ".mlp.fc1.", ".fc2.": ".mlp.fc2."},
    "transformer": {".fc1.": ".mlp.c_fc.", ".fc2.": ".mlp.c_proj.", ".norm1.": ".ln_1.", ".norm2.": ".ln_2."},
}


def to_openclip(name: str) -> str:
    prefix = next((prefix for prefix in TO_OPENCLIP if name.startswith(prefix)), "")
    name = TO_OPENCLIP.get(prefix, "") + name.removeprefix(prefix)
    for ours, theirs in IN_BLOCKS.get(name.partition(".")[0], {}).items():
        name = name.replace(ours, theirs)
    return name


def as_package(name, tensor):
    """Return a nano tensor in OpenCLIP's layout, whose text projection is transposed."""
    return tensor.T if name == "text.proj.weight" else tensor


@pytest.fixture
def package(request, tmp_path):
    """The package's debug model with the vocabulary and the caption length of the nano model."""
    config = open_clip.get_model_config(PACKAGE[request.param])
    config["text_cfg"] |= {"vocab_size": len(nano_clip.WORDS), "context_length": nano_clip.LENGTH}
    (tmp_path / "nano-clip-test.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path)
    yield open_clip.create_model("nano-clip-test")
    open_clip.factory._MODEL_CONFIG_PATHS.remove(tmp_path)
    open_clip.factory._MODEL_CONFIGS.pop("nano-clip-test")


@pytest.mark.parametrize(("attention", "package"), [(name, name) for name in PACKAGE], indirect=["package"])
def test_a_clip_equals_the_packages(attention, package):
    torch.manual_seed(0)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    tokens = nano_clip.tokenize([7, 0, 3], [("red", "white"), ("dark blue", "light green"), ("white", "dark blue")])
    run = (
        lambda model: (model.image(images), model.text(tokens), model(images, tokens)),
        lambda model: (model.encode_image(images), model.encode_text(tokens), model.get_logits(images, tokens)[0]),
    )
    assert_equal(nano_clip.CLIP(attention).double(), package.double(), run, to_openclip, as_package)


@pytest.mark.parametrize("attention", PACKAGE)
def test_three_steps_train_a_clip(attention):
    digits, test_digits = nano_clip.load_digits()
    start = nano_clip.train(attention, seed=0, steps=0, digits=digits)
    trained = nano_clip.train(attention, seed=0, steps=3, digits=digits, batch_size=4)
    for (name, before), after in zip(start.named_parameters(), trained.parameters(), strict=True):
        assert not torch.equal(before, after), name
    results = nano_clip.evaluate(trained, test_digits)
    assert results.shape == (3,)
    assert ((results >= 0) & (results <= 100)).all()
