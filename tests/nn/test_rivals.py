"""DnA and CoDA against outputs of their authors' code (`tests/assets/rivals.safetensors`), and their equations."""

import pytest
import torch
from safetensors.torch import load_file

from diffvision.nn import Attention, CodaAttention, DenoisingAttention

EVERYONE = torch.ones(6, 6).bool()
PADDED = torch.tensor([[1, 1, 0, 1, 0, 1]]).bool().expand(6, 6)
BLIND = EVERYONE.clone()
BLIND[2] = False  # a token that may attend to nothing
MASKS = [(None, False, EVERYONE), (None, True, EVERYONE.tril()), (PADDED, True, PADDED.tril()), (BLIND, False, BLIND)]


def theirs(prefix, assets):
    """The weights, and the input and outputs, of one of the two."""
    stored = load_file(assets / "rivals.safetensors")
    return {k.removeprefix(f"{prefix}."): v for k, v in stored.items() if k.startswith(f"{prefix}.")}, stored


def interleave(first, second, heads=4):
    """Rows of two projections, those of a head adjacent."""
    return torch.stack([part.unflatten(0, (heads, -1)) for part in (first, second)], dim=1).flatten(0, 2)


def test_coda_is_its_authors(assets):
    weights, stored = theirs("coda", assets)
    weights["proj.weight"] = weights.pop("o_proj.weight")
    weights["lambda_offset"] = weights.pop("lambda_proj.bias")
    layer = CodaAttention(32, 4, 2, rotary=1e4, proj_bias=False)
    layer.load_state_dict(weights)
    for causal, name in ((True, "coda_causal"), (False, "coda_all")):
        torch.testing.assert_close(layer(stored["x"], is_causal=causal), stored[name])


def test_dna_is_its_authors(assets):
    weights, stored = theirs("dna", assets)
    layer = DenoisingAttention(32, 4, qkv_bias=True)
    for kind in ("weight", "bias"):
        q, k, v = weights.pop(f"qkv.{kind}").chunk(3)
        weights[f"q_proj.{kind}"] = interleave(q, weights.pop(f"q_neg.{kind}"))
        weights[f"v_proj.{kind}"] = interleave(v, weights.pop(f"v_neg.{kind}"))
        weights[f"k_proj.{kind}"] = k
    weights["negative_scale"] = weights.pop("neg_scalers")
    layer.load_state_dict(weights)
    torch.testing.assert_close(layer(stored["x"]), stored["dna_all"])


def weigh(logits, allowed):
    """The softmax over the tokens that each may attend to, zero where there is none."""
    weights = logits.exp() * allowed
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def dna(layer, x, allowed):
    """The equation of DnA for one sequence [N, dim]."""
    q = (x @ layer.q_proj.weight.T).reshape(len(x), layer.num_heads, 2, layer.head_dim) / layer.head_dim**0.5
    k = (x @ layer.k_proj.weight.T).reshape(len(x), layer.num_kv_heads, layer.head_dim)
    v = (x @ layer.v_proj.weight.T).reshape(len(x), layer.num_kv_heads, 2, layer.head_dim)
    heads = []
    for head in range(layer.num_heads):
        kv = head * layer.num_kv_heads // layer.num_heads
        positive = weigh(q[:, head, 0] @ k[:, kv].T, allowed) @ v[:, kv, 0]
        negative = weigh(-q[:, head, 1] @ k[:, kv].T, allowed) @ v[:, kv, 1]
        heads.append(positive + layer.negative_scale[head] * negative)
    return torch.cat(heads, -1) @ layer.proj.weight.T + layer.proj.bias


def coda(layer, x, allowed):
    """The equation of CoDA for one sequence [N, dim], without rotary embedding."""
    q = (x @ layer.q_proj.weight.T).reshape(len(x), layer.num_heads, layer.head_dim) / layer.head_dim**0.5
    k = (x @ layer.k_proj.weight.T).reshape(len(x), layer.num_kv_heads, layer.head_dim)
    v = (x @ layer.v_proj.weight.T).reshape(len(x), layer.num_kv_heads, layer.head_dim)
    lam = (x @ layer.lambda_proj.weight.T + layer.lambda_offset).sigmoid()
    heads = []
    for head in range(layer.num_heads):
        kv = head * layer.num_kv_heads // layer.num_heads
        turned = torch.view_as_complex(q[:, head].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(turned * torch.exp(1j * layer.theta[head])).flatten(-2)
        one, two = (weigh(part @ k[:, kv].T, allowed) for part in (q[:, head], turned))
        out = (one - lam[:, head, None] * two) @ v[:, kv]
        heads.append(out * (out.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.head_norm.weight)
    return torch.cat(heads, -1) @ layer.proj.weight.T + layer.proj.bias


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize(("mask", "causal", "allowed"), MASKS, ids=["all", "causal", "padding", "blind"])
@pytest.mark.parametrize(("kind", "equation"), [(DenoisingAttention, dna), (CodaAttention, coda)])
def test_equals_the_equation_with_gradients(kind, equation, mask, causal, allowed, kv_heads):
    layer = kind(32, 4, kv_heads, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([equation(layer, sample, allowed) for sample in x])
    out = layer(x, attn_mask=mask, is_causal=causal)
    torch.testing.assert_close(out, expected)
    if not layer.no_maps:
        torch.testing.assert_close(layer(x, mask, causal, maps=[]), expected, rtol=0, atol=1e-6)
    weights, inputs = torch.randn_like(out), [x, *layer.parameters()]
    for ours, other in zip(
        *(torch.autograd.grad((one * weights).sum(), inputs) for one in (out, expected)), strict=True
    ):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("kind", [DenoisingAttention, CodaAttention])
def test_a_context(kind):
    layer, x, context = kind(32, 4, context_dim=8), torch.randn(2, 6, 32), torch.randn(2, 5, 8)
    alone = layer(x[:1], context=context[:1, :3])
    keep = torch.tensor([1, 1, 1, 0, 0]).bool()
    torch.testing.assert_close(layer(x, keep, context=context)[:1], alone)
    same = kind(32, 4)
    torch.testing.assert_close(same(x, context=x), same(x))


def test_coda_begins_as_nearly_plain_attention():
    layer = CodaAttention(32, 4, head_norm=False)
    plain, x = Attention(32, 4), torch.randn(2, 6, 32)
    plain.load_state_dict(layer.state_dict(), strict=False)
    assert 0 < (layer(x) - plain(x)).abs().max() < 0.02
    with pytest.raises(ValueError, match="head_dim"):
        CodaAttention(12, 4, 4)
