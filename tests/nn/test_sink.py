"""Attention with a learned sink against its equation, and where its causal mask ends."""

import timm
import torch

from diffvision.analysis import layer_maps
from diffvision.models import language
from diffvision.nn import Attention, SinkAttention


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
        assert (layer.weights.sum(-1) < 1).all()
