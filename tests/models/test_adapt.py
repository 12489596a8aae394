"""Pretrained models made differential: the same outputs, gradients for all that is new, and no other model accepted."""

import copy

import open_clip
import pytest
import timm
import torch
from torch import nn

import diffvision
from diffvision.models.adapt import freeze_but_new, merge_dex, set_dex_schedule
from diffvision.models.language import LanguageConfig, LanguageModel
from diffvision.nn import Attention, DexAttention, DiffAttention, DiffAttentionV2

KINDS = {"v2": DiffAttentionV2, "dex": DexAttention, "v1": DiffAttention}
LANGUAGE = {"vocab_size": 61, "dim": 64, "depth": 3, "num_heads": 8, "head_dim": 8, "mlp_dim": 96, "max_length": 64}


def scattered(model):
    """Weights of a size that makes every part matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ln_" not in name and parameter.ndim:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


def timm_vit(**settings):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4, "num_classes": 5}
    return scattered(timm.create_model("vit_tiny_patch16_224", **{**sizes, **settings}))


def open_clip_model():
    """OpenCLIP's own towers, both of them."""
    vision = {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2, "head_width": 16}
    text = {"context_length": 12, "vocab_size": 60, "width": 32, "heads": 2, "layers": 2}
    return scattered(open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text))


def custom_text_model():
    """A CLIP with its text tower as a module of its own, and timm's image tower."""
    vision = {"timm_model_name": "plain_vit_debug_clip", "image_size": 32, "timm_pool": "", "timm_proj": "linear"}
    text = {"context_length": 12, "vocab_size": 60, "width": 32, "heads": 2, "layers": 2}
    return scattered(open_clip.CustomTextCLIP(embed_dim=16, vision_cfg=vision, text_cfg=text))


def language_model(kv_heads=8):
    return scattered(LanguageModel(LanguageConfig(**LANGUAGE, num_kv_heads=kv_heads, variant="standard")))


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TEXTS = torch.randint(1, 59, (2, 12), generator=torch.Generator().manual_seed(1))
TEXTS[:, -1] = 59  # the end of the text, which OpenCLIP's tower reads: at the start its queries would have no gradient
MODELS = {
    "timm": (timm_vit, lambda model: model(IMAGES)),
    "timm with norms of queries and keys": (lambda: timm_vit(qk_norm=True), lambda model: model(IMAGES)),
    "timm without biases": (lambda: timm_vit(qkv_bias=False, proj_bias=False), lambda model: model(IMAGES)),
    "our plain ViT": (lambda: scattered(timm.create_model("plain_vit_debug")), lambda model: model(IMAGES)),
    "OpenCLIP": (open_clip_model, lambda model: torch.cat(model(IMAGES, TEXTS)[:2])),
    "OpenCLIP with timm's tower": (custom_text_model, lambda model: torch.cat(model(IMAGES, TEXTS)[:2])),
    "language": (language_model, lambda model: model(TEXTS)),
    "language, grouped": (lambda: language_model(4), lambda model: model(TEXTS)),
}


def layers(model, method):
    return [module for module in model.modules() if type(module) is KINDS[method]]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["v2", "dex"])
def test_outputs_are_those_of_the_pretrained_model(name, method):
    make, run = MODELS[name]
    before = make()
    after = diffvision.adapt(copy.deepcopy(before), method)
    assert not [m for m in after.modules() if type(m) in (Attention, timm.layers.Attention, nn.MultiheadAttention)]
    with torch.no_grad():
        expected, own = run(before), run(after)
    assert expected.std() > 1e-2
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-6 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["v2", "dex", "v1"])
def test_every_new_parameter_has_a_gradient_from_the_first_step(name, method):
    make, run = MODELS[name]
    model = diffvision.adapt(make(), method)
    set_dex_schedule(model, 0.01, 1.0)
    run(model).square().sum().backward()
    found = layers(model, method)
    assert found
    for layer in found:
        for part, parameter in layer.named_parameters():
            assert parameter.grad is not None, part
            # A key's bias is a constant in every logit; what DEX's lambda learns stands before a projection of zero.
            assert parameter.grad.abs().max() > 0 or part in ("k_proj.bias", "dex_lambda"), part


def test_selected_heads_alone_change():
    before = timm_vit()
    model = diffvision.adapt(copy.deepcopy(before), "dex", heads={f"blocks.{n}": [n, 3] for n in range(3)})
    found = layers(model, "dex")
    assert [layer.dex_heads.nonzero().flatten().tolist() for layer in found] == [[0, 3], [1, 3], [2, 3]]
    first = found[0]
    nn.init.normal_(first.dex, std=0.3)
    nn.init.constant_(first.dex_lambda, 0.1)
    x = torch.randn(2, 9, 64)
    heads = []
    first.proj.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0].unflatten(-1, (4, 16))))
    for schedule in ((1.5, 2.0), (0.0, 0.0)):
        set_dex_schedule(model, *schedule)
        first(x)
    changed = heads[1].clone()
    for number in (0, 3):  # lambda_init is 0.2 in the first layer
        changed[:, :, number] -= (1.5 * 0.2 + 2.0 * 0.1) * changed[:, :, number] @ first.dex
    torch.testing.assert_close(heads[0], changed)
    for wrong, named in (([4], r"heads .*4"), ({"blocks.7": [0]}, r"heads names 'blocks\.7'")):
        with pytest.raises(ValueError, match=named):
            diffvision.adapt(timm_vit(), "dex", heads=wrong)


@pytest.mark.parametrize("name", ["timm", "OpenCLIP", "language"])
def test_dex_merges_into_a_standard_model(name):
    make, run = MODELS[name]
    model = diffvision.adapt(make(), "dex", heads=[0])
    for layer in layers(model, "dex"):
        nn.init.normal_(layer.dex, std=0.2)
    with torch.no_grad():
        expected = run(model)
        own = run(merge_dex(model))
    assert not layers(model, "dex")
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["v2", "dex", "v1"])
def test_only_what_is_new_is_trained_if_asked(method):
    model = diffvision.adapt(timm_vit(), method, only_new=True)
    trained = {name.split(".", 3)[-1] for name, parameter in model.named_parameters() if parameter.requires_grad}
    new = {
        "v2": {"lambda_proj.weight", "q_proj.weight", "q_proj.bias"},
        "dex": {"dex", "dex_lambda"},
        "v1": {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "head_norm.weight"},
    }
    assert trained == new[method]
    freeze_but_new(model, also=["k_proj", "v_proj", "proj"])  # what DEX's paper trains
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "blocks.0.attn.v_proj.weight" in trained
    assert not any("mlp" in name or "head." in name for name in trained)
    with pytest.raises(ValueError, match="also has 'w_k'"):
        freeze_but_new(model, also=["w_k"])
    with pytest.raises(ValueError, match="VisionTransformer"):
        freeze_but_new(timm_vit())


def test_a_language_model_says_what_it_has_become(tmp_path):
    from diffvision.models import language

    for method, heads, kv_heads in (("v2", 8, 4), ("v1", 4, 2), ("dex", 8, 4)):
        model = diffvision.adapt(language_model(4), method)
        assert (model.config.variant, model.config.num_heads, model.config.num_kv_heads) == (method, heads, kv_heads)
        language.save(model, tmp_path / method)
        again = language.load(tmp_path / method)
        torch.testing.assert_close(again(TEXTS), model(TEXTS))


def test_a_tower_with_a_class_token_takes_a_batch_after_v1():
    """OpenCLIP repeats a caption's mask for the heads that the tower counts, of which V1's layers have half."""
    text = {"context_length": 12, "vocab_size": 60, "width": 32, "heads": 2, "layers": 1}
    text |= {"embed_cls": True, "pad_id": 0}
    vision = {"image_size": 32, "patch_size": 8, "width": 64, "layers": 1, "head_width": 16}
    model = diffvision.adapt(open_clip.CustomTextCLIP(16, vision, text), "v1").eval()
    tokens = torch.randint(1, 60, (3, 12))
    tokens[1, 5:] = 0
    alone = torch.cat([model.encode_text(row[None]) for row in tokens])
    torch.testing.assert_close(model.encode_text(tokens), alone)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="method is 'v3'"):
        diffvision.adapt(timm_vit(), "v3")
    with pytest.raises(ValueError, match="ResNet"):
        diffvision.adapt(timm.create_model("resnet18"))
    with pytest.raises(ValueError, match="heads is for method 'dex'"):
        diffvision.adapt(timm_vit(), "v2", heads=[0])
    odd = timm_vit(num_heads=1)
    names = list(odd.state_dict())
    with pytest.raises(ValueError, match="'v1'"):
        diffvision.adapt(odd, "v1")
    assert list(odd.state_dict()) == names  # and nothing has changed
    for method, why in (("sink", "changes every row"), ("integral", "one map weights")):
        with pytest.raises(ValueError, match=f"method is '{method}', but .* {why}.*: choose one of v1"):
            diffvision.adapt(timm_vit(), method)
    with pytest.raises(ValueError, match="sink"):
        diffvision.adapt(timm.create_model("sink_vit_debug"))
    with pytest.raises(ValueError, match="norm"):
        diffvision.adapt(timm_vit(scale_attn_norm=True))


@pytest.mark.parametrize("method", ["v2", "dex", "v1"])
def test_timm_builds_it_again(method, tmp_path):
    model = scattered(diffvision.adapt(timm_vit(), method))
    set_dex_schedule(model, 0.5, 0.7)  # which is in the weights too
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(again(IMAGES), model(IMAGES), rtol=0, atol=0)
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=3, in_chans=1)
    assert other(IMAGES[:, :1]).shape == (2, 3)
    features = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, features_only=True).eval()
    torch.testing.assert_close(features(IMAGES)[-1], model.forward_intermediates(IMAGES)[1][-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["v2", "dex"])
def test_half_precision_stays_the_same_function(method, dtype):
    before = timm_vit().to(dtype)
    after = diffvision.adapt(copy.deepcopy(before), method)
    assert {parameter.dtype for parameter in after.parameters()} == {dtype}
    with torch.no_grad():
        off = (after(IMAGES.to(dtype)).float() - before(IMAGES.to(dtype)).float()).abs().max()
    assert off <= (0 if method == "dex" else 4 * torch.finfo(dtype).eps * before(IMAGES.to(dtype)).float().abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["v2", "dex"])
def test_it_compiles_whole(method):
    model = diffvision.adapt(timm_vit(depth=1), method)
    expected = model(IMAGES)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IMAGES), expected, rtol=1e-5, atol=1e-5)
    set_dex_schedule(model, 0.5, 0.5)  # a step of the schedule compiles nothing anew
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(IMAGES)
