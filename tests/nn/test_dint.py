"""DINT against its equations written out token by token, and what its means are taken over."""

import pytest
import torch

from diffvision.models import language
from diffvision.models.language.kv_cache import KVCache
from diffvision.nn import DiffAttention, DintAttention, Inputs


def scattered(**settings):
    layer = DintAttention(32, 4, depth=3, dtype=torch.float64, **settings)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def test_the_mean_is_over_real_tokens_and_padding_rows_are_finite():
    layer, x = scattered(), torch.randn(2, 6, 32, dtype=torch.float64)
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])[:, None, None]
    padded = layer(x, attn_mask=real)
    torch.testing.assert_close(padded[1, :4], layer(x[1:, :4])[0])
    nothing = torch.zeros(6, 6, dtype=torch.bool)
    torch.testing.assert_close(layer(x, attn_mask=nothing), layer.proj.bias.expand(2, 6, 32))


def test_without_lambda_it_is_v1_and_a_common_part_of_the_values_stays():
    """V1 weakens what all values share to 1 - lambda of it; here it stays whole."""
    v1 = DiffAttention(32, 4, lambda_init=0.8, head_norm=False, proj_bias=False)
    layer = DintAttention(32, 4, lambda_init=0.8, head_norm=False, proj_bias=False)
    layer.load_state_dict(v1.state_dict())
    x = torch.randn(1, 9, 32)
    values = torch.randn(4, 16)[None, :, None].expand(1, 4, 9, 16)
    q, k, _ = layer._project(x, x)
    lam, inputs = v1.compute_lambda(), Inputs(x, q, k, values, None, False, 0.0, False)
    torch.testing.assert_close(v1.attend(inputs), (1 - lam) * values)
    torch.testing.assert_close(layer.attend(inputs), values)
    for each in (v1, layer):
        torch.nn.init.zeros_(each.lambda_q1)
        torch.nn.init.zeros_(each.lambda_q2)
        each.lambda_init = 0.0
    torch.testing.assert_close(layer(x), v1(x))


def test_a_cache_is_refused_before_work_is_done():
    layer = DintAttention(32, 2)
    with pytest.raises(ValueError, match="variant 'v1_dint' cannot use a cache"):
        KVCache([layer], 1, 8)
    model = language.create("diff-debug", variant="v1_dint", lambda_init=0.5).eval()
    assert model.blocks[1].attn.lambda_init == 0.5
    tokens = torch.randint(4096, (1, 12))
    torch.testing.assert_close(model(tokens)[:, :7], model(tokens[:, :7]), rtol=0, atol=1e-5)
