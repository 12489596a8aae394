"""CLIP and DiffCLIP in one file compute what the package's models compute, and they train."""

import json

import open_clip
import pytest
import torch

import diffvision  # noqa: F401
import nano_clip

PACKAGE = {"plain": "CLIP-debug", "diff": "DiffCLIP-debug"}
RENAMED = {  # nano's name -> OpenCLIP's
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


def renamed(name: str) -> str:
    prefix = next((prefix for prefix in RENAMED if name.startswith(prefix)), "")
    name = RENAMED.get(prefix, "") + name.removeprefix(prefix)
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
def test_outputs_and_gradients_equal_the_packages(attention, package, assert_equal):
    torch.manual_seed(0)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    tokens = nano_clip.tokenize([7, 0, 3], [("red", "white"), ("dark blue", "light green"), ("white", "dark blue")])
    run = (
        lambda model: (model.image(images), model.text(tokens), model(images, tokens)),
        lambda model: (model.encode_image(images), model.encode_text(tokens), model.get_logits(images, tokens)[0]),
    )
    assert_equal(nano_clip.CLIP(attention).double(), package.double(), run, renamed, as_package)


@pytest.mark.parametrize("attention", PACKAGE)
def test_three_steps_train(attention):
    digits, test_digits = nano_clip.load_digits()
    start = nano_clip.train(attention, seed=0, steps=0, digits=digits)
    trained = nano_clip.train(attention, seed=0, steps=3, digits=digits, batch_size=4)
    for (name, before), after in zip(start.named_parameters(), trained.parameters(), strict=True):
        assert not torch.equal(before, after), name
    results = nano_clip.evaluate(trained, test_digits)
    assert results.shape == (3,)
    assert ((results >= 0) & (results <= 100)).all()
