"""Gated attention against its equations, timm's, and what adapts to it."""

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import Attention as TimmAttention
from timm.models import VisionTransformer

import diffvision
from diffvision.models import language
from diffvision.models.convert import convert


def test_a_vit_of_timm_with_gates_is_loaded_by_name_and_adapted(tmp_path):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 5}
    theirs = VisionTransformer(**sizes)
    for block in theirs.blocks:
        block.attn = TimmAttention(64, 4, qkv_bias=True, gated=True)
    theirs = theirs.double().eval()
    for name, parameter in theirs.named_parameters():
        if ".attn." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    convert(str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours.safetensors"), to="diffvision")
    ours = timm.create_model("gated_vit_debug", depth=2, num_classes=5, mlp_ratio=4).double().eval()
    ours.load_state_dict(load_file(tmp_path / "ours.safetensors"))
    image = torch.randn(2, 3, 32, 32).double()
    torch.testing.assert_close(ours(image), theirs(image))
    expected = theirs(image)
    for model in (ours, theirs):
        adapted = diffvision.adapt(model, "v2")
        assert adapted.blocks[0].attn.variant == "v2_gated"
        torch.testing.assert_close(adapted(image), expected)
        with pytest.raises(ValueError, match="v2_gated"):
            diffvision.adapt(adapted, "dex")


@pytest.mark.parametrize("method", ["gated", "v2_gated"])
@pytest.mark.parametrize("gate", ["element", "head"])
def test_plain_models_adapt_to_gates_without_a_change(method, gate):
    plain = timm.create_model("plain_vit_debug").eval()
    image = torch.randn(2, 3, 32, 32)
    expected = plain(image)
    torch.testing.assert_close(diffvision.adapt(plain, method)(image), expected)
    model = language.create("gated-nano", gate=gate).eval()
    tokens = torch.randint(9, (2, 7))
    expected = model(tokens)
    with pytest.raises(ValueError, match="gates, which method 'dex'"):
        diffvision.adapt(model, "dex")
    assert diffvision.adapt(model, "v2").config.variant == "v2_gated"
    torch.testing.assert_close(model(tokens), expected)


def test_v1_pairs_heads_of_gates_by_channel_only():
    model = diffvision.adapt(language.create("gated-nano"), "v1")
    assert model.blocks[0].attn.variant == "v1_gated"
    with pytest.raises(ValueError, match="each has a gate"):
        diffvision.adapt(language.create("gated-nano", gate="head"), "v1")


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_twins_of_models_have_equal_parameters():
    with torch.device("meta"):
        twins = count(timm.create_model("gated_vit_tiny", variant="standard")), count(language.create("transformer-3m"))
        for variant in ("v1", "v2", "gated", "v1_gated", "v2_gated"):
            mixed = {"variant_by_layer": "6*standard"} if variant == "v2_gated" else {}
            model = timm.create_model("gated_vit_tiny", variant=variant, **mixed)
            assert count(model) == pytest.approx(twins[0], rel=0.004), variant
            for gate in ("element", "head") if "gated" in variant else ("element",):
                model = language.create("diff-3m", variant=variant, gate=gate)
                assert count(model) == pytest.approx(twins[1], rel=0.001), (variant, gate)


def test_a_gate_where_there_is_none_is_one_sentence():
    with pytest.raises(TypeError, match=r"'v1_dint' .* gate='head'"):
        timm.create_model("dint_vit_debug", gate="head")
    with pytest.raises(TypeError, match=r"'vca' .* variant"):
        timm.create_model("vca_vit_debug", variant="gated")
    with pytest.raises(TypeError, match="takes no gate"):
        timm.create_model("vca_vit_debug", gate="head")
    with pytest.raises(ValueError, match="variant is 'v1_dint_gated'"):
        timm.create_model("dint_vit_debug", variant="v1_dint_gated")
    with pytest.raises(ValueError, match=r"gate .*'heads'"):
        timm.create_model("gated_vit_debug", gate="heads")
    with pytest.raises(ValueError, match="variant 'v1_dint' has none"):
        language.create("diff-nano", variant="v1_dint", gate="head")
