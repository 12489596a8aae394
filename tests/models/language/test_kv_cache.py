"""Attention with a cache equals attention without, however the tokens come."""

import pytest
import torch

from diffvision import ops
from diffvision.models.language.kv_cache import KVCache, LayerCache
from diffvision.nn import ATTENTION, build_attention
from diffvision.ops import attention_backend

CACHEABLE = [variant for variant, layer in ATTENTION.items() if layer.cacheable]
CLOSE = {"rtol": 0, "atol": 1e-5}
PATTERNS = {"prefill": [20], "chunks": [7, 1, 5, 7], "prefill and tokens": [15, 1, 1, 1, 1, 1], "tokens": [1] * 20}


def _layer(variant, **settings):
    return build_attention(variant, 32, 4, 2, rotary=1e4, qk_norm=True, **settings).eval()


@pytest.mark.parametrize(
    ("pattern", "backend"),
    [*((pattern, "eager") for pattern in PATTERNS), ("prefill and tokens", "sdpa"), ("prefill and tokens", "blocked")],
)
@pytest.mark.parametrize("variant", CACHEABLE)
def test_cached_equals_whole(variant, pattern, backend):
    layer, x = _layer(variant), torch.randn(2, 20, 32)
    cache = LayerCache(layer, 2, 24)
    with attention_backend(backend):
        whole = layer(x, is_causal=True)
        parts = [layer(part, is_causal=True, cache=cache) for part in x.split(PATTERNS[pattern], dim=1)]
    assert cache.length == 20
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **CLOSE)


@pytest.mark.parametrize("variant", ATTENTION)
def test_a_rotation_that_is_given_is_the_layers_own(variant):
    """Angles given once for all layers, with positions of each row's own (left padding)."""
    layer, x = _layer(variant), torch.randn(2, 9, 32)
    cos, sin = ops.rotary_tables(torch.arange(9), layer.head_dim, 1e4)
    torch.testing.assert_close(layer(x, is_causal=True, rotation=(cos, sin)), layer(x, is_causal=True))
    positions = (torch.arange(9) - torch.tensor([0, 4])[:, None]).clamp(min=0)
    cos, sin = ops.rotary_tables(positions[:, None, None], layer.head_dim, 1e4)
    real = (torch.arange(9) >= torch.tensor([0, 4])[:, None])[:, None, None]
    padded = layer(x, real, True, rotation=(cos, sin))
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[1, 4:], layer(x[1:, 4:], is_causal=True)[0], **CLOSE)


def test_a_cache_of_each_variant_holds_as_much():
    """V1 keeps its values once; V2 keeps one key for both maps."""
    kept = {}
    for variant, heads in (("standard", 8), ("v1", 4), ("v2", 8)):
        cache = LayerCache(build_attention(variant, 64, heads), 3, 10)
        kept[variant] = cache.keys.numel() + cache.values.numel()
        assert cache.capacity == 10
    assert kept == dict.fromkeys(kept, 3 * 10 * 2 * 64)
    cache = LayerCache(build_attention("v1", 64, 4, dtype=torch.bfloat16), 1, 2)
    assert cache.keys.dtype == cache.values.dtype == torch.bfloat16


def test_bad_input_is_named():
    layer = _layer("v1")
    cache = LayerCache(layer, 2, 10)
    layer(torch.randn(2, 8, 32), is_causal=True, cache=cache)
    with pytest.raises(ValueError, match="11"):
        layer(torch.randn(2, 3, 32), is_causal=True, cache=cache)
    assert cache.length == 8
    with pytest.raises(ValueError, match="batch"):
        layer(torch.randn(1, 1, 32), is_causal=True, cache=cache)
    with pytest.raises(ValueError, match="got 0"):
        KVCache([layer], 0, 5)
    with pytest.raises(ValueError, match="'v1_dint'"):
        KVCache([_layer("v1_dint")], 1, 8)


@pytest.mark.parametrize("variant", CACHEABLE)
def test_kept_tokens_are_gathered_and_the_next_position_is_unchanged(variant):
    """Other tokens in each head: what follows attends to them where they were."""
    layer, x = _layer(variant), torch.randn(2, 20, 32)
    cache, whole = LayerCache(layer, 2, 20), LayerCache(layer, 2, 20)
    for one in (cache, whole):
        layer(x[:, :16], is_causal=True, cache=one)
    index = torch.stack([torch.randperm(16)[:5].sort().values for _ in range(4)]).view(2, 2, 5)
    keys = cache.keys.clone()
    cache.keep(index, 9)
    assert (cache.length, cache.position, cache.capacity) == (5, 16, 9)
    assert torch.equal(cache.keys[1, 0, :, :5], keys[1, 0][:, index[1, 0]])
    mask = torch.zeros(2, layer.num_kv_heads, 4, 20, dtype=torch.bool)
    mask[..., 16:] = True
    mask.scatter_(3, index[:, :, None].expand(-1, -1, 4, -1), True)
    mask = mask.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)
    expected = layer(x[:, 16:], mask, is_causal=True, cache=whole)
    torch.testing.assert_close(layer(x[:, 16:], is_causal=True, cache=cache), expected, **CLOSE)
    with pytest.raises(ValueError, match="capacity"):
        cache.keep(index, 3)
