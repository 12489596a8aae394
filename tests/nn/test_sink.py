"""Attention with a learned sink against its equation, and where its causal mask ends."""

import pytest
import timm
import torch

from diffvision.analysis import layer_maps
from diffvision.models import language
from diffvision.nn import Attention, SinkAttention

EVERYONE = torch.ones(6, 6).bool()
MASK = torch.tensor([[1, 1, 0, 1, 0, 1]]).bool()


def transcribed(layer, x, allowed):
    """The equation for one sequence [N, dim]; allowed [N, N] says which tokens each may attend to."""
    q = (x @ layer.q_proj.weight.T).reshape(len(x), layer.num_heads, layer.head_dim)
    k = (x @ layer.k_proj.weight.T).reshape(len(x), layer.num_kv_heads, layer.head_dim)
    v = (x @ layer.v_proj.weight.T).reshape(len(x), layer.num_kv_heads, layer.head_dim)
    heads = []
    for head in range(layer.num_heads):
        kv = head * layer.num_kv_heads // layer.num_heads
        weights = (q[:, head] @ k[:, kv].T / layer.head_dim**0.5).exp() * allowed
        heads.append(weights @ v[:, kv] / (layer.sink[head].exp() + weights.sum(-1, keepdim=True)))
    return torch.cat(heads, -1) @ layer.proj.weight.T + layer.proj.bias


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize(
    ("mask", "causal", "allowed"),
    [
        (None, False, EVERYONE),
        (None, True, EVERYONE.tril()),
        (MASK, False, MASK.expand(6, 6)),
        (MASK, True, MASK.expand(6, 6).tril()),
        (MASK.T, False, MASK.T.expand(6, 6)),  # rows without any key
    ],
    ids=["all", "causal", "padding", "both", "rows"],
)
def test_equals_the_equation_with_gradients(mask, causal, allowed, kv_heads):
    layer = SinkAttention(32, 4, kv_heads, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)
    expected, maps = torch.stack([transcribed(layer, sample, allowed) for sample in x]), []
    out = layer(x, attn_mask=mask, is_causal=causal)
    close = {"rtol": 1e-5, "atol": 1e-6}  # the sink is scaled in float32
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(layer(x, attn_mask=mask, is_causal=causal, maps=maps), expected, **close)
    weights, inputs = torch.randn_like(out), [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad((one * weights).sum(), inputs) for one in (out, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **close)


def test_a_sink_of_minus_infinity_is_plain_attention_and_of_zero_off_by_one():
    layer, plain = SinkAttention(32, 4), Attention(32, 4)
    x = torch.randn(2, 6, 32)
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "sink"})
    logits = plain._project(x, x)[0].squeeze(2) @ plain._project(x, x)[1].squeeze(2).mT / 8**0.5
    maps = []
    layer(x, maps=maps)
    torch.testing.assert_close(maps[0], logits.exp() / (1 + logits.exp().sum(-1, keepdim=True)))
    torch.nn.init.constant_(layer.sink, -100.0)
    torch.testing.assert_close(layer(x, is_causal=True), plain(x, is_causal=True))


def test_a_cache_and_documents():
    model = language.create("transformer-nano", variant="sink", num_kv_heads=1).eval()
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.sink)
    tokens, cache = torch.randint(9, (2, 8)), model.new_cache(2, 8)
    with torch.no_grad():
        whole = model.hidden(tokens)
        parts = [model.hidden(tokens[:, start:end], cache=cache) for start, end in ((0, 3), (3, 4), (4, 8))]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)
        documents = torch.tensor([[0] * 5 + [1] * 3]).expand(2, -1)
        packed = model.hidden(tokens, documents=documents)
        torch.testing.assert_close(packed[:, 5:], model.hidden(tokens[:, 5:]))


def test_maps_of_a_vit_sum_to_less_than_one():
    model = timm.create_model("diff_vit_debug", variant="sink").eval()
    assert model.blocks[0].attn.num_heads == 4
    for layer in layer_maps(model, torch.randn(3, 32, 32)):
        assert (layer.applied.sum(-1) < 1).all()
