"""Integral attention against its equation: one softmax of the mean of two logits."""

import pytest
import torch

from diffvision.models import language
from diffvision.nn import Attention, IntegralAttention

EVERYONE = torch.ones(6, 6).bool()
MASK = torch.tensor([[1, 1, 0, 1, 0, 1]]).bool()


def transcribed(layer, x, allowed):
    """The equation for one sequence [N, dim]; allowed [N, N] says which tokens each may attend to."""
    q = (x @ layer.q_proj.weight.T).reshape(len(x), layer.num_heads, 2, layer.head_dim)
    k = (x @ layer.k_proj.weight.T).reshape(len(x), layer.num_kv_heads, 2, layer.head_dim)
    v = (x @ layer.v_proj.weight.T).reshape(len(x), layer.num_kv_heads, 2 * layer.head_dim)
    heads = []
    for head in range(layer.num_heads):
        kv = head * layer.num_kv_heads // layer.num_heads
        logits = sum(q[:, head, one] @ k[:, kv, one].T / layer.head_dim**0.5 for one in (0, 1)) / 2
        weights = logits.exp() * allowed
        heads.append(weights @ v[:, kv] / weights.sum(-1, keepdim=True).clamp(min=1e-300))
    return torch.cat(heads, -1) @ layer.proj.weight.T + layer.proj.bias


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize(
    ("mask", "causal", "allowed"),
    [
        (None, False, EVERYONE),
        (None, True, EVERYONE.tril()),
        (MASK, False, MASK.expand(6, 6)),
        (MASK, True, MASK.expand(6, 6).tril()),
        (MASK.T, False, MASK.T.expand(6, 6)),
    ],
    ids=["all", "causal", "padding", "both", "rows"],
)
def test_equals_the_equation_with_gradients(mask, causal, allowed, kv_heads):
    layer = IntegralAttention(32, 4, kv_heads, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)
    expected, maps = torch.stack([transcribed(layer, sample, allowed) for sample in x]), []
    out = layer(x, attn_mask=mask, is_causal=causal)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer(x, attn_mask=mask, is_causal=causal, maps=maps), expected)
    weights, inputs = torch.randn_like(out), [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad((one * weights).sum(), inputs) for one in (out, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_it_is_plain_attention_with_wider_heads_and_a_smaller_scale():
    layer, plain = IntegralAttention(32, 2), Attention(32, 2)
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        plain.q_proj.weight *= 2**-0.5  # D**-0.5 / 2, and the plain layer's is (2 D)**-0.5
    x = torch.randn(2, 6, 32)
    torch.testing.assert_close(layer(x, is_causal=True), plain(x, is_causal=True))


def test_a_cache_and_documents():
    model = language.create("integral-nano", num_heads=2, head_dim=16, num_kv_heads=1).eval()
    tokens, cache = torch.randint(9, (2, 8)), model.new_cache(2, 8)
    with torch.no_grad():
        whole = model.hidden(tokens)
        parts = [model.hidden(tokens[:, start:end], cache=cache) for start, end in ((0, 3), (3, 4), (4, 8))]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)
        documents = torch.tensor([[0] * 5 + [1] * 3]).expand(2, -1)
        torch.testing.assert_close(model.hidden(tokens, documents=documents)[:, 5:], model.hidden(tokens[:, 5:]))
