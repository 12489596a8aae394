"""Captured layers: what their parts give is what the layers compute, ours, timm's and transformers' alike."""

import open_clip
import pytest
import timm
import torch

import diffvision
from diffvision.analysis.capture import captured, check_attention
from diffvision.analysis.maps import open_layers
from diffvision.models import language


def _timm(name):
    return timm.create_model(name, img_size=32, depth=2)


def _dex():
    model = diffvision.adapt(timm.create_model("plain_vit_debug", depth=2), method="dex")
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.dex)
        torch.nn.init.constant_(block.attn.dex_lambda, 0.3)
    return model


MODELS = {
    "v1": lambda: timm.create_model("diff_vit_debug", depth=2),
    "v2": lambda: timm.create_model("diffv2_vit_debug", depth=2),
    "standard": lambda: timm.create_model("plain_vit_debug", depth=2),
    "dint": lambda: timm.create_model("dint_vit_debug", depth=2),
    "grouped": lambda: timm.create_model("gda_vit_debug", depth=2),
    "without a head norm": lambda: timm.create_model("diff_vit_debug", depth=2, head_norm=False),
    "timm": lambda: _timm("vit_dwee_patch16_reg1_gap_256"),
    "timm, plain": lambda: _timm("vit_tiny_patch16_224"),
    "timm, rotary": lambda: _timm("vit_small_patch16_rope_224"),
    "timm, parallel": lambda: _timm("vit_dpwee_patch16_reg1_gap_256"),
    "dex": _dex,
    "adapted to v2": lambda: diffvision.adapt(timm.create_model("plain_vit_debug", depth=2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_what_the_output_projection_takes(name):
    model = MODELS[name]()
    image = torch.randn(1, 3, 32, 32)
    model.eval()
    calls, inputs = [], []
    hooks = [block.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for block in model.blocks]
    with torch.no_grad(), captured(model, calls.append):
        model(image)
    for hook in hooks:
        hook.remove()
    layers = list(open_layers(model, {"image": image}))
    assert len(layers) == len(calls) == 2
    for layer, call, given in zip(layers, calls, inputs, strict=True):
        assert not layer.causal
        torch.testing.assert_close(layer.hidden, given[0])
        torch.testing.assert_close(layer.maps.sum(-1), torch.ones(layer.maps.shape[:3]))
        with torch.no_grad():
            given = layer.outputs(layer.weights)[2].transpose(0, 1).flatten(1)
        torch.testing.assert_close(given, call.projected[0, :, : given.shape[1]], atol=1e-5, rtol=1e-4)
    assert not any(module._forward_pre_hooks or "attend" in vars(module) for module in model.modules())


def test_openclips_towers_are_seen_and_can_be_changed():
    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
    text = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text).eval()
    image, tokens = torch.randn(1, 3, 32, 32), torch.randint(1, 64, (1, 12))
    with torch.no_grad():
        expected = model.encode_image(image), model.encode_text(tokens)
        with captured(model, lambda call: call.scores()):
            torch.testing.assert_close(model.encode_image(image), expected[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(model.encode_text(tokens), expected[1], atol=1e-5, rtol=1e-4)
    in_image, in_text = (list(open_layers(model, batch)) for batch in ({"image": image}, {"text": tokens}))
    assert [layer.name for layer in in_image] == [f"visual.transformer.resblocks.{depth}.attn" for depth in range(2)]
    assert [(len(layers), layers[0].maps.shape, layers[0].causal) for layers in (in_image, in_text)] == [
        (2, (2, 1, 17, 17), False), (2, (2, 1, 12, 12), True)
    ]  # fmt: skip
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_could_only_be_read_or_changed_wrongly_is_refused():
    model = timm.create_model("beit_base_patch16_224", img_size=32, depth=1)
    torch.nn.init.ones_(model.blocks[0].attn.relative_position_bias_table)
    with pytest.raises(ValueError, match="float attn_mask"):
        next(open_layers(model, {"image": torch.zeros(1, 3, 32, 32)}))
    model = MODELS["timm"]().eval()
    with pytest.raises(ValueError, match=r"blocks\.0\.attn"), captured(model, lambda call: call.scores()):
        model(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("variant", ["v1", "v1_dint"])
def test_a_language_model_and_its_beginning(variant):
    model = language.create("diff-debug", vocab_size=64, max_length=32, variant=variant)
    tokens = torch.randint(64, (1, 12))
    (whole, _), (short, _) = (list(open_layers(model, {"tokens": t})) for t in (tokens, tokens[:, :7]))
    assert whole.causal
    cut = whole.first(7)
    torch.testing.assert_close(cut.weights, short.weights)
    torch.testing.assert_close(cut.outputs(cut.weights)[2], short.outputs(short.weights)[2])


def test_visual_contrast_attention_has_no_maps_and_says_so():
    model = timm.create_model("vca_vit_debug", depth=2)
    with pytest.raises(ValueError, match="GridTransformer"):
        next(open_layers(model, {"image": torch.zeros(1, 3, 32, 32)}))
    with pytest.raises(ValueError, match="map"):
        check_attention(model)
