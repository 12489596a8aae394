"""timm's and transformers' models before and after: outputs, gradients, parameters and names."""

import copy

import pytest
import timm
import torch
from timm.models import VisionTransformer
from torch import nn

import diffvision

CLOSE = {"rtol": 0, "atol": 1e-5}


def scattered(model):
    """Random weights of a size that makes every part matter, lambda and norms too."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.1)
    return model


def same(theirs, ours, *inputs):
    """Outputs and the gradients of all parameters."""
    for model in (theirs, ours):
        model.zero_grad()
        out = model(*inputs)
        out = getattr(out, "logits", out)
        out.square().mean().backward()
        model.out = out.detach()
    assert theirs.out.std() > 1e-2
    torch.testing.assert_close(ours.out, theirs.out, **CLOSE)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], **CLOSE)


@pytest.mark.parametrize("name", ["vit_dwee", "vit_dlittle", "vit_dpwee"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_timms_models(name, qk_norm):
    settings = {"img_size": 64, "depth": 3, "num_classes": 7, "qk_norm": qk_norm}
    theirs = scattered(timm.create_model(f"{name}_patch16_reg1_gap_256", **settings)).eval()
    ours = diffvision.replace_attention(copy.deepcopy(theirs))
    assert isinstance(ours, VisionTransformer)
    same(theirs, ours, torch.randn(2, 3, 64, 64))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_parameters_are_the_same_objects_and_names():
    model = timm.create_model("vit_dwee_patch16_reg1_gap_256", img_size=64, depth=2)
    before = dict(model.named_parameters())
    assert diffvision.replace_attention(model) is model
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in after)
    assert diffvision.replace_attention(model) is model  # twice is once
    assert all(isinstance(block.attn, timm.layers.DiffAttention) for block in model.blocks)


@pytest.mark.parametrize("masked", [False, True])
def test_timms_layer_with_masks(masked):
    kinds = {"qkv_bias": True, "scale_norm": True, "dual_lambda": True}
    theirs = scattered(timm.layers.DiffAttention(48, 3, depth=2, **kinds)).eval()
    ours = diffvision.replace_attention(copy.deepcopy(theirs))
    x = torch.randn(2, 9, 48)
    mask = torch.rand(9, 9) > 0.3
    mask.fill_diagonal_(True)
    settings = {"attn_mask": mask} if masked else {"is_causal": True}
    torch.testing.assert_close(ours(x, **settings), theirs(x, **settings), **CLOSE)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kv_heads", [8, 4])
def test_transformers_diffllama(kv_heads, implementation):
    transformers = pytest.importorskip("transformers")
    config = transformers.DiffLlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=kv_heads, attn_implementation=implementation, pad_token_id=0,
    )  # fmt: skip
    theirs = scattered(transformers.DiffLlamaForCausalLM(config)).eval()
    ours = diffvision.replace_attention(copy.deepcopy(theirs))
    tokens = torch.randint(1, 61, (2, 17))
    same(theirs, ours, tokens)
    padded = torch.ones_like(tokens)
    padded[0, :5] = 0  # at the left
    with torch.no_grad():
        own, other = (model(tokens, attention_mask=padded).logits for model in (ours, theirs))
    torch.testing.assert_close(own[padded.bool()], other[padded.bool()], **CLOSE)
    for cache in (None, "static"):
        greedy = [
            model.generate(
                tokens, attention_mask=padded, max_new_tokens=9, do_sample=False, cache_implementation=cache
            ).tolist()
            for model in (ours, theirs)
        ]
        assert greedy[0] == greedy[1]


def test_what_has_none_is_told():
    with pytest.raises(ValueError, match="VisionTransformer has attention"):
        diffvision.replace_attention(timm.create_model("vit_tiny_patch16_224"))
    with pytest.raises(ValueError, match="has attention layers none"):
        diffvision.replace_attention(nn.Linear(2, 2))
