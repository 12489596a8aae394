import torch

from diffvision.nn import build_attention
from diffvision.nn.transformer import DecoderBlock, SwiGLU


def test_swiglu_by_hand():
    layer = SwiGLU(2, 1)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.tensor([[1.0, 0.0]]))
        layer.up.weight.copy_(torch.tensor([[0.0, 2.0]]))
        layer.down.weight.copy_(torch.tensor([[3.0], [-1.0]]))
    silu = 1 / (1 + torch.tensor(-1.0).exp())
    torch.testing.assert_close(layer(torch.tensor([[1.0, 5.0]])), torch.stack([30 * silu, -10 * silu])[None])
    assert not [name for name, _ in layer.named_parameters() if "bias" in name]


def test_a_block_adds_its_two_branches():
    attn = build_attention("v1", 32, 2, proj_bias=False, rotary=1e4)
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
