import pytest
import torch

from diffvision.nn import ATTENTION, build_attention
from diffvision.nn.transformer import DecoderBlock, PolyNorm, PolyNormGLU, SwiGLU


def test_swiglu_by_hand():
    layer = SwiGLU(2, 1)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.tensor([[1.0, 0.0]]))
        layer.up.weight.copy_(torch.tensor([[0.0, 2.0]]))
        layer.down.weight.copy_(torch.tensor([[3.0], [-1.0]]))
    silu = 1 / (1 + torch.tensor(-1.0).exp())
    torch.testing.assert_close(layer(torch.tensor([[1.0, 5.0]])), torch.stack([30 * silu, -10 * silu])[None])
    assert not [name for name, _ in layer.named_parameters() if "bias" in name]


def test_poly_norm_by_hand():
    """At one dimension every power is 1 or -1 after its norm; at two the norms are plain numbers."""
    layer = PolyNorm(eps=0.0)
    assert layer.weight.tolist() == pytest.approx([1 / 3] * 3)
    assert layer.bias.tolist() == [0]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([2.0, 3.0, 5.0]))
        layer.bias.fill_(0.5)
    assert layer(torch.tensor([[7.0], [-7.0]])).squeeze().tolist() == pytest.approx([10.5, -3.5])
    # (1, 3): cubes over sqrt(365), squares over sqrt(41), themselves over sqrt(5).
    expected = [2 * x**3 / 365**0.5 + 3 * x**2 / 41**0.5 + 5 * x / 5**0.5 + 0.5 for x in (1, 3)]
    assert layer(torch.tensor([1.0, 3.0])).tolist() == pytest.approx(expected)


def test_poly_norm_in_half_precision():
    """Sixth powers do not fit float16: the arithmetic is in float32, under autocast too."""
    layer, x = PolyNorm(), torch.randn(4, 64) * 50
    expected = layer(x)
    half = layer(x.half())
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), expected, rtol=2e-3, atol=2e-3)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), expected)
    assert torch.autograd.gradcheck(
        PolyNorm(dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64).requires_grad_()
    )


def test_poly_norm_gates_the_feed_forward():
    layer, x = PolyNormGLU(8, 12), torch.randn(2, 8)
    expected = layer.down(layer.act(layer.gate(x)) * layer.up(x))
    torch.testing.assert_close(layer(x), expected)
    assert [name for name, _ in layer.named_parameters() if "bias" in name] == ["act.bias"]


@pytest.mark.parametrize("variant", ATTENTION)
def test_block_adds_its_two_branches(variant):
    attn = build_attention(variant, 32, 2, proj_bias=False, rotary=1e4)
    block = DecoderBlock(attn, 32, 48, norm_eps=1e-3)
    x = torch.randn(2, 5, 32)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(block.norm1(x), normed)
    middle = x + attn(normed, is_causal=True)
    torch.testing.assert_close(block(x), middle + block.mlp(block.norm2(middle)))
    torch.nn.init.zeros_(attn.proj.weight)
    torch.nn.init.zeros_(block.mlp.down.weight)
    torch.testing.assert_close(block(x), x)


def test_fx_traces_a_feed_forward_for_any_autocast():
    layer = SwiGLU(8, 16)
    traced, x = torch.fx.symbolic_trace(layer), torch.randn(2, 8)
    torch.testing.assert_close(traced(x), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(traced(x), layer(x))
