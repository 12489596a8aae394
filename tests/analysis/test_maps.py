"""Maps by layer: that they are what the layers compute with, and where they lie on the image."""

import open_clip
import pytest
import timm
import torch

import diffvision  # noqa: F401  (registers the models)
from diffvision.analysis import layer_maps, patch_maps


def test_towers_of_open_clip():
    model, image = open_clip.create_model("DiffCLIP-V2-debug").train(), torch.randn(3, 32, 32)
    text = open_clip.get_tokenizer("DiffCLIP-V2-debug")(["a red seven"])
    image_maps = layer_maps(model, image=image)
    depth = len(model.visual.trunk.blocks)
    assert [layer.name for layer in image_maps] == [f"visual.trunk.blocks.{i}.attn" for i in range(depth)]
    text_maps = layer_maps(model, text=text[0])
    depth = len(model.transformer.resblocks)
    assert [layer.name for layer in text_maps] == [f"transformer.resblocks.{i}.attn" for i in range(depth)]
    assert text_maps[0].maps.triu(1).count_nonzero() == 0  # causal
    assert model.training
    assert layer_maps(model.visual, image)[0].name == "trunk.blocks.0.attn"
    assert not any(module._forward_pre_hooks or "attend" in vars(module) for module in model.modules())


def test_patch_maps_follow_a_bright_patch():
    """With keys that read brightness alone, the class token looks at the bright patch, whatever the prefix."""
    model = timm.create_model("plain_vit_debug", depth=1, reg_tokens=3, patch_size=8, qkv_bias=True).eval()
    attn = model.blocks[0].attn
    image = torch.zeros(3, 32, 32)
    image[:, 8:16, 24:32] = 1.0  # row 1, column 3
    with torch.no_grad():
        model.pos_embed.zero_()
        model.cls_token.zero_()
        model.reg_token.zero_()
        model.patch_embed.proj.weight.zero_()
        model.patch_embed.proj.weight[0] = 1.0
        model.patch_embed.proj.bias.zero_()
        attn.q_proj.weight.zero_()
        attn.q_proj.bias.fill_(1.0)
        attn.k_proj.weight.zero_()
        attn.k_proj.weight[:, 0] = 3.0
    maps = patch_maps(model, image)["blocks.0.attn"]
    assert maps.shape == (4, 1, 4, 4)
    assert (maps[:, 0].flatten(1).argmax(1) == 1 * 4 + 3).all()
    assert (maps[:, 0, 1, 3] > 0.9).all()


@pytest.mark.parametrize(
    "settings", [{"class_token": False, "global_pool": "avg"}, {"reg_tokens": 2}, {"dynamic_img_size": True}], ids=str
)
def test_the_grid_of_patches_and_the_difference(settings):
    model = timm.create_model("diff_vit_debug", patch_size=4, **settings)
    image = torch.randn(3, *((16, 40) if "dynamic_img_size" in settings else (32, 32)))
    for layer, maps in zip(layer_maps(model, image), patch_maps(model, image).values(), strict=True):
        assert maps.shape == (2, 3, image.shape[1] // 4, image.shape[2] // 4)
        torch.testing.assert_close(maps[:, 2], maps[:, 0] - layer.lam[:, :1] * maps[:, 1])
