"""Configurations from strangers that ask for more than any memory holds: one sentence, before anything is built."""

import json

import open_clip
import pytest
import timm
import torch

from diffvision.export.finite import open_finite
from diffvision.export.folders import save_folder
from diffvision.models import language
from diffvision.models.bounds import bounded
from diffvision.models.convert import convert
from diffvision.models.language.configuration import LanguageConfig
from diffvision.opening import open_model
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.language import LanguageModule


def edit(file, change):
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("field", "value"),
    [("depth", 30_000_000), ("num_heads", 10**13), ("dim", 10**9), ("vocab_size", 10**12), ("mlp_dim", 1 << 40)],
)
def test_a_language_folder(field, value, tmp_path):
    language.save(language.create("diff-debug"), tmp_path / "text")
    edit(tmp_path / "text" / "config.json", lambda c: c.update({field: value}))
    told = rf"{field} is {value}: it must be a whole number from 1 to [\d,]+"
    for call in (language.load, open_finite, lambda folder: LanguageModule(f"local-dir:{folder}")):
        with pytest.raises(ValueError, match=told):
            call(tmp_path / "text")


def test_a_depth_that_the_weights_have_not(tmp_path, monkeypatch):
    """Told by the names of the weights, before a block is built."""
    language.save(language.create("diff-debug"), tmp_path / "text")
    edit(tmp_path / "text" / "config.json", lambda c: c.update(depth=4000))
    monkeypatch.setattr("diffvision.models.language.LanguageModel", None)
    with pytest.raises(ValueError, match="has weights of depth 2, and"):
        language.load(tmp_path / "text")


def test_a_checkpoint_of_our_training(tmp_path):
    module = LanguageModule("diff-debug")
    content = {"pytorch-lightning_version": "2.6.6", "state_dict": module.state_dict()}
    module.on_save_checkpoint(content)
    content["hyper_parameters"]["config"]["depth"] = 30_000_000
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="depth is 30000000: it must be"):
        language.load(tmp_path / "x.ckpt")


def test_a_folder_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8}
    config = transformers.LlamaConfig(**small, num_hidden_layers=1, num_attention_heads=1)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    open_model(tmp_path / "llama")
    file = tmp_path / "llama" / "config.json"
    edit(file, lambda c: c.update(num_hidden_layers=30_000_000))
    for call in (open_model, lambda folder: convert(folder, str(tmp_path / "out"), to="language")):
        with pytest.raises(ValueError, match=r"30,000,000, above|depth is 30000000"):
            call(str(tmp_path / "llama"))
    edit(file, lambda c: c.update(num_hidden_layers=1, hidden_size=1 << 20))
    with pytest.raises(ValueError, match="describes a model of more than"):
        open_model(tmp_path / "llama")


@pytest.mark.quick(
    "text_cfg-width-1000000000",
    "text_cfg-layers-30000000",
    "text_cfg-context_length-1000000",
    "vision_cfg-image_size-1000000",
)
@pytest.mark.parametrize(
    ("tower", "field", "value"),
    [
        ("text_cfg", "layers", 30_000_000),
        ("text_cfg", "width", 10**9),
        ("text_cfg", "context_length", 10**6),
        ("text_cfg", "layers", 4000),
        ("vision_cfg", "image_size", 10**6),
    ],
)
def test_an_openclip_folder(tower, field, value, tmp_path):
    config = open_clip.get_model_config("CLIP-debug")
    save_folder(open_clip.create_model("CLIP-debug"), tmp_path / "clip", config=config)
    edit(tmp_path / "clip" / "open_clip_config.json", lambda c: c["model_cfg"][tower].update({field: value}))
    told = rf"open_clip_config\.json has model_cfg\.{tower}\.{field} {value:,}, above|describes a model of more than"
    for call in (open_model, ContrastiveModule):
        with pytest.raises(ValueError, match=told):
            call(f"local-dir:{tmp_path / 'clip'}")


@pytest.mark.parametrize(
    ("field", "value"), [("depth", 30_000_000), ("depth", 4000), ("embed_dim", 10**9), ("img_size", 10**6)]
)
def test_a_timm_folder_and_a_checkpoint(field, value, tmp_path):
    save_folder(timm.create_model("diff_vit_debug", num_classes=3), tmp_path / "vit", config={})
    edit(tmp_path / "vit" / "config.json", lambda c: c["model_args"].update({field: value}))
    told = rf"config\.json has model_args\.{field} {value:,}, above|describes a model of more than"
    for call in (open_model, lambda name: ClassificationModule(name, num_classes=3)):
        with pytest.raises(ValueError, match=told):
            call(f"local-dir:{tmp_path / 'vit'}")
    module = ClassificationModule("diff_vit_debug", num_classes=3)
    module.model_args = {field: value}
    content = {"pytorch-lightning_version": "2.6.6", "state_dict": module.state_dict()}
    module.on_save_checkpoint(content)
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=rf"has {field} {value:,}|describes a model"):
        open_model("diff_vit_debug", tmp_path / "x.ckpt")


def test_a_configuration_of_fit():
    with pytest.raises(ValueError, match="model_args has depth 30,000,000"):
        ClassificationModule("diff_vit_debug", num_classes=2, model_args={"depth": 30_000_000})
    with pytest.raises(ValueError, match="depth is 30000000"):
        LanguageModule("diff-debug", model_args={"depth": 30_000_000})


def test_models_as_they_are_fit_in(tmp_path):
    """Half precision, eight bits and models that are known by name are not refused; nothing is left behind."""
    model = timm.create_model("vit_tiny_patch16_224", depth=2).half()
    save_folder(model, tmp_path / "vit", config={"depth": 2})
    open_model(f"local-dir:{tmp_path / 'vit'}")
    with pytest.raises(ValueError, match="is not JSON"), bounded(tmp_path / "vit"):
        raise ValueError("it is not JSON")
    torch.nn.Linear(1 << 13, 1 << 13, device="meta")
    for name in language.model_names():
        LanguageConfig(**vars(language.config(name)))
