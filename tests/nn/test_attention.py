import copy

import pytest
import torch
from safetensors import safe_open
from timm.layers import Attention as TimmAttention
from torch import nn

from diffvision.models.convert.unilm import from_unilm
from diffvision.nn import (
    ATTENTION,
    Attention,
    DiffAttention,
    DiffAttentionV2,
    GroupedDiffAttention,
    build_attention,
    depth_lambda_init,
)
from diffvision.ops import attention_backend

VARIANTS = list(ATTENTION)


@pytest.fixture(params=["eager", "sdpa", "blocked"])
def backend(request):
    """Each backend in the place of "auto"."""
    with attention_backend(request.param):
        yield request.param


@pytest.mark.parametrize(
    ("name", "layout"), [("unilm_v1_mha", "unilm-v1"), ("unilm_v1_gqa", "unilm-v1"), ("unilm_v2_gqa", "unilm-v2")]
)
def test_equals_the_authors_code(name, layout, backend, assets):
    """Outputs and all gradients of microsoft/unilm's modules, in float64, rotary embedding and causal mask included."""
    with safe_open(assets / f"{name}.safetensors", "pt") as file:
        settings = file.metadata()
        golden = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    heads, kv_heads = int(settings["num_heads"]), int(settings["num_kv_heads"])
    shared = {"rotary": float(settings["rope_theta"]), "proj_bias": False, "dtype": torch.float64}
    if layout == "unilm-v1":
        layer = DiffAttention(int(settings["embed_dim"]), heads, kv_heads, depth=int(settings["depth"]), **shared)
    else:
        layer = DiffAttentionV2(int(settings["d_model"]), heads, kv_heads, **shared)
    weights = {key.removeprefix("param."): value for key, value in golden.items() if key.startswith("param.")}
    gradients = {key.removeprefix("grad."): value for key, value in golden.items() if key.startswith("grad.")}
    layer.load_state_dict(from_unilm(weights, layout))
    gradients = from_unilm(gradients, layout)

    x = golden["input"].requires_grad_()
    out = layer(x, is_causal=True)
    out.backward(golden["grad_output"])
    # Both round V1's lambda to float32, at different places: gradients of its vectors differ by up to 5e-8 of the
    # largest, so where that is above 20 they would differ by more than this. Theirs are 1.5e-7 from float64.
    close = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(out, golden["output"], **close)
    torch.testing.assert_close(x.grad, golden["grad_input"], **close)
    for own, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[own], **close)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_a_gradient_with_every_setting(variant):
    layer = build_attention(variant, 32, 4, 2, qk_norm=True, qkv_bias=True, attn_drop=0.1, proj_drop=0.1, rotary=1e4)
    layer(torch.randn(4, 10, 32)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # A key bias cancels in the softmax; DEX's lambda stands before a projection that starts from zero.
        assert parameter.grad.any() or name in ("k_proj.bias", "dex_lambda"), name


def test_lambda_is_in_float32_and_begins_by_depth():
    layer = DiffAttention(32, 2).half()
    assert torch.equal(layer.compute_lambda(), copy.deepcopy(layer).float().compute_lambda())
    assert depth_lambda_init(0) == pytest.approx(0.2)
    assert DiffAttention(32, 2, depth=5).lambda_init == pytest.approx(0.6661219039109422)
    assert DiffAttention(32, 2, depth=5, lambda_init=0.8).lambda_init == 0.8
    with pytest.raises(ValueError, match="'deep'"):
        DiffAttention(32, 2, lambda_init="deep")


@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_of_hosts(variant):
    """Boolean and 0/-inf masks mean the same, and padding changes no other token."""
    layer = build_attention(variant, 32, 2)
    x = torch.randn(2, 6, 32)
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    keep[1, ..., 4:] = False
    as_float = torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))
    out = layer(x, attn_mask=keep, is_causal=True)
    torch.testing.assert_close(layer(x, attn_mask=as_float, is_causal=True), out)
    torch.testing.assert_close(layer(x[1:, :4], is_causal=True), out[1:, :4])
    with pytest.raises(ValueError, match="0 and -inf only"):
        layer(x, attn_mask=torch.randn(6, 6))


def test_head_norm_is_optional_and_ablates():
    x = torch.randn(2, 6, 32)
    normed, bare = DiffAttention(32, 2, lambda_init=0.5), DiffAttention(32, 2, lambda_init=0.5, head_norm=False)
    bare.load_state_dict(normed.state_dict(), strict=False)
    assert "head_norm.weight" not in bare.state_dict()
    assert not torch.allclose(normed(x), bare(x))
    assert Attention(32, 2, head_norm=True).head_norm.weight.shape == (16,)
    normed.head_norm.weight.data.zero_()
    torch.testing.assert_close(normed(x), normed.proj.bias.expand(2, 6, 32))


@pytest.mark.parametrize("variant", ["v1_head", "v1_token", "v1_token_head"])
def test_other_lambdas_are_v1_to_begin_with(variant):
    torch.manual_seed(3)
    layer, v1 = build_attention(variant, 32, 4), DiffAttention(32, 4)
    assert v1.load_state_dict(layer.state_dict(), strict=False).missing_keys == []
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(layer(x), v1(x))


def test_a_ratio_of_one_is_v1_and_others_must_fit():
    layer, v1 = GroupedDiffAttention(32, 4, signal_ratio=1), DiffAttention(32, 4)
    v1.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(layer(x, is_causal=True), v1(x, is_causal=True))
    with pytest.raises(ValueError, match=r"num_heads \(4\) must be a positive"):
        GroupedDiffAttention(32, 4, signal_ratio=3)
    with pytest.raises(ValueError, match=r"num_kv_heads \(4\) must divide"):
        GroupedDiffAttention(32, 4, 4)


def test_the_table_hands_each_class_what_it_takes():
    for variant, layer in ATTENTION.items():
        made = build_attention(variant, 64, 4, 2, head_dim=8, depth=3, lambda_init=0.7, qk_norm=True)
        assert type(made) is layer
        assert made.variant == variant
        assert made.head_dim == 8
    with pytest.raises(TypeError, match="lambda_int"):
        build_attention("standard", 64, 4, lambda_int=0.7)
    with pytest.raises(ValueError, match="unknown attention variant 'v9'"):
        build_attention("v9", 64, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 30, "num_heads": 4}, r"dim \(30\) must be a multiple of 8"),
        ({"dim": 32, "num_heads": 4, "num_kv_heads": 3}, r"num_heads \(4\).*num_kv_heads \(3\)"),
        ({"dim": 48, "num_heads": 4, "context_dim": 0}, "context_dim .*0"),
        ({"dim": 48, "num_heads": 4, "context_dim": 2.5}, r"context_dim .*2\.5"),
        ({"dim": 24, "num_heads": 4, "rotary": 1e4}, "even head_dim, got 3"),
        ({"dim": 32, "num_heads": 4, "rotary": True}, "rotary .*True"),
        ({"dim": 32, "num_heads": 4, "rotary": 0.0}, "rotary .*0.0"),
    ],
)
def test_sizes_that_do_not_divide_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        DiffAttention(**settings)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow
def test_exports_with_any_batch_and_length(variant):
    """Each variant's training step is compiled in `tests/training/test_cuda_graphs.py`."""
    layer = build_attention(variant, 32, 2, rotary=1e4, qk_norm=True).eval()
    x = torch.randn(2, 6, 32)
    shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=4096)}}
    exported = torch.export.export(layer, (x,), dynamic_shapes=shapes).module()
    x = torch.randn(5, 300, 32)
    torch.testing.assert_close(exported(x), layer(x))


def test_plain_weights_get_a_hint():
    plain = {f"{n}.{name}": weight for n in range(2) for name, weight in TimmAttention(32).state_dict().items()}
    model = nn.Sequential(*(build_attention("v2", 32, 2) for _ in range(2)))
    with (
        pytest.warns(UserWarning, match=r"diffvision\.adapt") as raised,
        pytest.raises(RuntimeError, match="Missing key"),
    ):
        model.load_state_dict(plain)
    assert len(raised) == 1
    with pytest.warns(UserWarning, match=r"0\.qkv\.weight is of plain"):
        model.load_state_dict(plain, strict=False)


def test_a_part_of_the_weights_loads_without_a_word():
    """Such as those of a LoRA: torch tells a layer that loading is strict even where it is not."""
    layer = build_attention("v1", 32, 2)
    weight = torch.ones_like(layer.q_proj.weight)
    assert layer.load_state_dict({"q_proj.weight": weight}, strict=False).unexpected_keys == []
    torch.testing.assert_close(layer.q_proj.weight.detach(), weight)
