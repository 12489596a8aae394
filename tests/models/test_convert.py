"""Layouts of others, there and back, and what the two sides compute; and the command over files of them."""

import functools
import json

import open_clip
import pytest
import torch
from golden_tower import TOWER
from safetensors.torch import load_file, save_file
from timm.layers import DiffAttention as TimmDiffAttention

from diffvision import cli
from diffvision.models import language
from diffvision.models.checkpoint import read_state
from diffvision.models.convert import convert, recognise
from diffvision.models.convert import timm as timm_layout
from diffvision.models.convert.diffclip import from_diffclip
from diffvision.models.convert.unilm import from_unilm
from diffvision.models.language import hugging_face
from diffvision.models.language.configuration import LanguageConfig
from diffvision.nn import DiffAttention

# ---- DiffCLIP ------------------------------------------------------------------------------------------------------


def test_a_released_checkpoint_becomes_an_openclip_folder(assets, tmp_path, capsys):
    """With a Namespace, a path and a numpy scalar beside the weights; the original's own embeddings come out."""
    command = ["convert", str(assets / "diffclip_checkpoint.pt"), str(tmp_path / "model"), "--to", "openclip"]
    assert cli.main([*command, "--tower", TOWER]) == 0
    assert "diffclip_checkpoint.pt is diffclip" in capsys.readouterr().out
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'model'}")
    golden = load_file(assets / "diffclip_io.safetensors")
    model.eval().double()
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(golden["image"]), golden["image_embed"], atol=1e-6, rtol=0)
        torch.testing.assert_close(model.encode_text(golden["text"]), golden["text_embed"], atol=1e-6, rtol=0)
        model.float()
        image = model.encode_image(golden["image"].float())
    torch.testing.assert_close(image.double(), golden["image_embed"], atol=1e-4, rtol=0)
    assert list(transform.transforms[-1].mean) == [0.485, 0.456, 0.406]
    assert open_clip.get_tokenizer(f"local-dir:{tmp_path / 'model'}").context_length == 12


@pytest.mark.parametrize(("lambda_init", "name"), [(0.8, "DiffCLIP-ViT-B-16"), ("depth", "DiffCLIP-ViT-B-16-dynamic")])
@pytest.mark.slow
def test_the_published_size_by_names_and_shapes(lambda_init, name):
    """Its configuration is that of our model; the names are those of the authors' checkpoint above."""
    model = open_clip.create_model(name, device="meta")
    renamed = (("visual.trunk.", "visual."), ("attn.proj.", "attn.out_proj."), ("attn.head_norm.", "attn.diff_norm."))
    state = {name: value for name, value in model.state_dict().items() if name != "visual.head.proj.weight"}
    weights = {functools.reduce(lambda name, pair: name.replace(*pair), renamed, name): v for name, v in state.items()}
    weights["image_projection"] = model.visual.head.proj.weight.T
    config, state = from_diffclip(weights, lambda_init=lambda_init)
    assert config == open_clip.get_model_config(name)
    assert {n: v.shape for n, v in state.items()} == {n: v.shape for n, v in model.state_dict().items()}


def test_a_size_that_is_none_of_ours_wants_a_tower(assets, tmp_path, capsys):
    command = ["convert", str(assets / "diffclip_checkpoint.pt"), str(tmp_path / "model"), "--to", "openclip"]
    assert cli.main(command) == 1
    assert "has width 64, 2 layers, 2 heads, patch 8 and image 32" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    weights = read_state(assets / "diffclip_checkpoint.pt")
    del weights["visual.blocks.1.attn.lambda_q1"], weights["visual.pos_embed"]
    with pytest.raises(ValueError, match="the DiffCLIP state_dict lacks"):
        from_diffclip(weights, tower=TOWER)


# ---- unilm and timm ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["unilm-v1", "unilm-v2"])
def test_unilms_layers(layout, assets, tmp_path):
    """The authors' weights through a file; `tests/nn/test_attention.py` has what layers of ours compute with them."""
    golden = load_file(assets / f"{layout.replace('-', '_')}_gqa.safetensors")
    theirs = {key.removeprefix("param."): value for key, value in golden.items() if key.startswith("param.")}
    save_file(theirs, tmp_path / "theirs.safetensors")
    assert recognise(tmp_path / "theirs.safetensors").layout == layout
    convert(str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours.safetensors"), to="diffvision")
    ours = load_file(tmp_path / "ours.safetensors")
    torch.testing.assert_close(ours, from_unilm(theirs, layout), rtol=0, atol=0)


def test_names_within_a_model_are_mapped_too():
    weights = {"layers.3.self_attn.subln.weight": 1, "layers.3.self_attn.out_proj.weight": 2, "norm.weight": 3}
    ours = from_unilm(weights, "unilm-v1")
    assert ours == {
        "layers.3.self_attn.head_norm.weight": 1, "layers.3.self_attn.proj.weight": 2, "norm.weight": 3
    }  # fmt: skip


def test_timms_layer(tmp_path):
    theirs = TimmDiffAttention(48, 3, qkv_bias=True, qk_norm=True, depth=2)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    convert(str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours.safetensors"), to="diffvision")
    ours = DiffAttention(48, 3, qkv_bias=True, qk_norm=True, depth=2)
    ours.load_state_dict(load_file(tmp_path / "ours.safetensors"))
    x = torch.randn(2, 11, 48)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="which V1 does not"):
        timm_layout.from_timm(TimmDiffAttention(32, 2, dual_lambda=True).state_dict())


# ---- what cannot be ------------------------------------------------------------------------------------------------


LAYER = TimmDiffAttention(32, 2).state_dict()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"blocks.0.attn.qkv.weight": torch.zeros(3, 1), "head.bias": torch.zeros(1)}, "2 tensors (blocks.0.attn.qkv."),
        (LAYER | {"proj.weight": torch.full((32, 32), torch.inf).half()}, "not finite, first proj.weight"),
        (LAYER, "to must be diffvision"),
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({}, "config.json"),
    ],
    ids=["foreign", "infinite", "another layout", "another model", "no configuration"],
)
def test_one_error_and_nothing_left(content, words, tmp_path, capsys):
    source = tmp_path / "model"
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        source = tmp_path / "x.safetensors"
        save_file(content, source)
    else:
        source.mkdir()
        (source / "config.json").write_text(json.dumps(content))
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--to", "openclip"]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "tower", "words"),
    [
        ({"visual.blocks.1.mlp.fc1.bias": None}, TOWER, "visual.trunk.blocks.1.mlp.fc1.bias is missing"),
        ({"visual.extra": torch.zeros(1)}, TOWER, "visual.trunk.extra is unknown"),
        ({"ln_final.bias": torch.zeros(3)}, TOWER, "ln_final.bias is [3], expected [48]"),
        ({}, "vit_tiny_patch16_224", "visual.trunk.blocks.0.attn.qkv.weight is missing; "),
        ({}, "nonsense", "'nonsense'"),
    ],
)
def test_half_a_diffclip_is_not_converted(change, tower, words, assets, tmp_path, capsys):
    weights = read_state(assets / "diffclip_checkpoint.pt") | change
    save_file({name: value for name, value in weights.items() if value is not None}, tmp_path / "x.safetensors")
    command = ["convert", str(tmp_path / "x.safetensors"), str(tmp_path / "model"), "--to", "openclip"]
    assert cli.main([*command, "--tower", tower]) == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "lacks model.layers.1.mlp.up_proj.weight"),
        ("model.layers.1.mlp.up_proj.weight", torch.zeros(7, 48), "blocks.1.mlp.up.weight is [7, 48], expected"),
        ("model.layers.1.self_attn.q_proj.weight", torch.zeros(3, 3), "sizes are not those of its config.json"),
        ("model.layers.1.extra", torch.zeros(1), "1 unknown weights (model.layers.1.extra)"),
        ("model.norm.weight", torch.full((48,), torch.inf).half(), "are not finite, first model.norm.weight"),
    ],
)
def test_half_a_diffllama_is_not_converted(name, value, words, tmp_path, capsys):
    sizes = {"vocab_size": 97, "dim": 48, "depth": 2, "num_heads": 4, "head_dim": 12, "mlp_dim": 80, "max_length": 64}
    language.save(language.LanguageModel(LanguageConfig(**sizes, variant="v1")), tmp_path / "ours")
    hugging_face.write(hugging_face.as_transformers(language.load(tmp_path / "ours")), tmp_path / "theirs", None)
    file = tmp_path / "theirs" / "model.safetensors"
    weights = load_file(file) | {name: value}
    save_file({name: value for name, value in weights.items() if value is not None}, file)
    assert cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "again"), "--to", "language"]) == 1
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_destinations(tmp_path):
    save_file(TimmDiffAttention(32, 2).state_dict(), tmp_path / "x.safetensors")
    for target, to, named in (
        ("x.safetensors", "diffvision", "x"),
        ("y.bin", "diffvision", "y"),
        ("y.pt", "onnx", "to"),
    ):
        with pytest.raises(ValueError, match=named):
            convert(str(tmp_path / "x.safetensors"), str(tmp_path / target), to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
