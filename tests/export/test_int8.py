"""Eight bits: what is quantised, the file that loads again, and the commands that read it."""

import sys

import open_clip
import pytest
import timm
import torch

from diffvision.export.command import export
from diffvision.models import int8, language
from diffvision.models.convert import convert
from diffvision.models.language.generation import generate
from diffvision.opening import open_model
from diffvision.training.clip import ContrastiveModule
from diffvision.training.language import LanguageModule


def test_every_linear_layer_is_in_eight_bits_and_the_outputs_are_near():
    model = timm.create_model("diffv2_vit_debug").eval()
    image = torch.randn(2, *model.pretrained_cfg["input_size"])
    before, size = model(image), sum(value.nbytes for value in model.state_dict().values())
    assert int8.quantise(model) is model
    state = int8.split(model.state_dict())
    linear = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    assert {name for name, value in state.items() if value.dtype == torch.int8} == {f"{n}.weight" for n in linear}
    assert (model(image) - before).abs().max() < 0.05 * before.abs().max()
    assert sum(value.nbytes for value in state.values()) < 0.4 * size
    with pytest.raises(ValueError, match="VisionTransformer is in eight bits"):
        int8.quantise(model)


def test_each_weight_is_within_half_a_step_of_what_it_was():
    layer = torch.nn.Sequential(torch.nn.Linear(16, 8))
    weight = layer[0].weight.detach().clone()
    state = int8.split(int8.quantise(layer).state_dict())
    found, scale = state["0.weight"].float() * state["0.weight_scale"], state["0.weight_scale"]
    assert ((found - weight).abs() <= 0.51 * scale).all()
    torch.testing.assert_close(layer(weight), weight @ found.T + layer[0].bias)


def test_torchs_fused_attention_keeps_its_weights():
    model = open_clip.create_model("ViT-B-32-quickgelu", vision_cfg={"layers": 1, "width": 64}, text_cfg={
        "layers": 1, "width": 64, "heads": 1, "context_length": 8, "vocab_size": 40}).eval()  # fmt: skip
    tokens = torch.randint(1, 40, (2, 8))
    before = model.encode_text(tokens)
    int8.quantise(model)
    torch.testing.assert_close(model.encode_text(tokens), before, atol=0.2, rtol=0.1)
    assert model.transformer.resblocks[0].attn.out_proj.weight.dtype == torch.float32


def test_an_exported_clip_in_eight_bits_is_loaded_by_its_models_name(tmp_path):
    made = open_clip.create_model("DiffCLIP-debug").eval()
    torch.save(made.state_dict(), tmp_path / "float.pt")
    export("DiffCLIP-debug", str(tmp_path / "int8.safetensors"), "int8", checkpoint=str(tmp_path / "float.pt"))
    found = open_model(tmp_path / "int8.safetensors").module
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(found.encode_image(image), int8.quantise(made).encode_image(image))
    assert (tmp_path / "int8.safetensors").stat().st_size < (tmp_path / "float.pt").stat().st_size
    with pytest.raises(ValueError, match=r"int8.safetensors is of the model"):
        open_model("CLIP-debug", tmp_path / "int8.safetensors")
    with pytest.raises(ValueError, match="is in eight bits, which cannot be"):
        export(str(tmp_path / "int8.safetensors"), str(tmp_path / "onnx"), "onnx")
    with pytest.raises(ValueError, match="is in eight bits, which cannot be"):
        convert(str(tmp_path / "int8.safetensors"), str(tmp_path / "timm.pt"), to="timm")
    with pytest.raises(ValueError, match=r"int8.safetensors are in eight bits"):
        ContrastiveModule("DiffCLIP-debug", pretrained=str(tmp_path / "int8.safetensors"))
    assert len(list(tmp_path.iterdir())) == 2


def test_an_exported_vit_in_eight_bits_is_loaded_with_its_own_number_of_classes(tmp_path):
    made = timm.create_model("diff_vit_debug", num_classes=7).eval()
    torch.save(made.state_dict(), tmp_path / "float.pt")
    export("diff_vit_debug", str(tmp_path / "int8.safetensors"), "int8", checkpoint=str(tmp_path / "float.pt"))
    found = open_model("diff_vit_debug", tmp_path / "int8.safetensors").module
    image = torch.randn(2, *made.pretrained_cfg["input_size"])
    torch.testing.assert_close(found(image), int8.quantise(made)(image))
    torch.testing.assert_close(open_model(tmp_path / "int8.safetensors").module(image), found(image))


def test_a_language_model_in_eight_bits_is_saved_loaded_and_generates(tmp_path, text_model):
    language.save(text_model, tmp_path / "float")
    export(str(tmp_path / "float"), str(tmp_path / "int8"), "int8")
    model = language.load(tmp_path / "int8")
    tokens = torch.randint(128, (2, 9))
    assert (model(tokens) - text_model(tokens)).abs().max() < 0.05 * text_model(tokens).abs().max()
    assert model.head is None  # tied: the embedding stays as it is
    assert model.embed.weight.dtype == torch.float32
    assert len(generate(model, tokens, max_new_tokens=4)[0]) == 4
    with pytest.raises(ValueError, match="is in eight bits, which cannot be"):
        convert(str(tmp_path / "int8"), str(tmp_path / "theirs"), to="huggingface")
    own = {"vocab_size": 128, "max_length": 64, "num_kv_heads": 1, "depth": 1}
    with pytest.raises(ValueError, match="is in eight bits, which cannot be"):
        LanguageModule("diff-debug", model_args=own, pretrained=str(tmp_path / "int8"))


def test_decoding_a_few_rows_on_many_threads_takes_quantised_weights():
    layer = torch.nn.Sequential(language.create("diff-debug").blocks[0].mlp.gate.__class__(512, 1024, bias=False))
    int8.quantise(layer)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            assert layer(torch.randn(1, 512)).shape == (1, 1024)
    finally:
        torch.set_num_threads(threads)


def test_bad_input_is_one_clear_error(tmp_path, monkeypatch):
    torch.save(timm.create_model("diff_vit_debug").state_dict(), tmp_path / "float.pt")
    with pytest.raises(ValueError, match="destination vit must be a file"):
        export("diff_vit_debug", str(tmp_path / "vit"), "int8", checkpoint=str(tmp_path / "float.pt"))
    with pytest.raises(ValueError, match="ReLU has no linear layer"):
        int8.quantise(torch.nn.ReLU())
    weight = torch.zeros(4, 2, dtype=torch.int8)
    for scale in (torch.ones(2, 1), torch.full((4, 1), torch.nan)):
        with pytest.raises(ValueError, match=r"x\.weight is \[4, 2\] in eight bits"):
            int8.joined({"x.weight": weight, "x.weight_scale": scale})
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"need torchao .*: pip install"):
        int8.joined({"x.weight": weight, "x.weight_scale": torch.ones(4, 1)})
    assert [path.name for path in tmp_path.iterdir()] == ["float.pt"]
