"""DINT against its equations written out token by token, and what its means are taken over."""

import pytest
import torch

from diffvision.models import language
from diffvision.models.language.kv_cache import KVCache
from diffvision.nn import DiffAttention, DintAttention, Inputs


def transcribed(layer, x, allowed):
    """The equations for one sequence [N, dim]; allowed [N, N] says which tokens each may attend to."""
    heads, size, count = layer.num_heads, layer.head_dim, len(x)
    q = (x @ layer.q_proj.weight.T).reshape(count, heads, 2, size)
    k = (x @ layer.k_proj.weight.T).reshape(count, layer.num_kv_heads, 2, size)
    v = (x @ layer.v_proj.weight.T).reshape(count, layer.num_kv_heads, 2 * size)
    lam = torch.exp(layer.lambda_q1 @ layer.lambda_k1) - torch.exp(layer.lambda_q2 @ layer.lambda_k2)
    lam = lam + layer.lambda_init
    rows, outputs = [], []
    for head in range(heads):
        kv = head * layer.num_kv_heads // heads
        maps = torch.zeros(2, count, count, dtype=x.dtype)
        for m in range(2):
            for i in range(count):
                seen = allowed[i].nonzero()[:, 0]
                maps[m, i, seen] = (k[seen, kv, m] @ q[i, head, m] / size**0.5).softmax(0)
        integral = torch.stack([maps[0, allowed[i]].mean(0) for i in range(count)])
        applied = maps[0] - lam * maps[1] + lam * integral
        rows.append(applied.sum(-1))
        output = applied @ v[:, kv]
        output = output / (output.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.head_norm.weight
        outputs.append(output * (1 - layer.lambda_init))
    torch.testing.assert_close(torch.stack(rows), torch.ones(heads, count, dtype=x.dtype))
    return torch.cat(outputs, -1) @ layer.proj.weight.T + layer.proj.bias


def scattered(**settings):
    layer = DintAttention(32, 4, depth=3, dtype=torch.float64, **settings)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


ALL = torch.ones(7, 7, dtype=torch.bool)
DOCUMENTS = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).bool()
WINDOW = ALL.tril() & ~ALL.tril(-3)


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize(
    ("mask", "causal", "allowed"),
    [
        (None, False, ALL),
        (None, True, ALL.tril()),
        (DOCUMENTS, True, DOCUMENTS.tril()),
        (WINDOW, False, WINDOW),
    ],
    ids=["all", "causal", "documents", "window"],
)
def test_equals_the_equations(mask, causal, allowed, kv_heads):
    layer, x = scattered(num_kv_heads=kv_heads), torch.randn(2, 7, 32, dtype=torch.float64)
    expected = torch.stack([transcribed(layer, sample, allowed) for sample in x])
    torch.testing.assert_close(layer(x, attn_mask=mask, is_causal=causal), expected)
    maps = []
    torch.testing.assert_close(layer(x, attn_mask=mask, is_causal=causal, maps=maps), expected)
    torch.testing.assert_close(maps[0].sum(-1), torch.ones_like(maps[0][..., 0]))


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
