"""Integral attention against its equation: one softmax of the mean of two logits."""

import torch

from diffvision.models import language
from diffvision.nn import Attention, IntegralAttention


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
