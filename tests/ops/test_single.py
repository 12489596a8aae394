"""The backend for one query, as in decoding, against the formula in float64."""

import pytest
import torch

from diffvision.ops import diff_attention, supported_backends
from diffvision.ops.attention.problem import Problem


def _tensors(keys, b=2, h=4, hk=2, maps=2, dtype=torch.float32):
    made = (b, h, 2, 1, 16), (b, hk, maps, keys, 16), (b, hk, keys, 32)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in made]


def _exact(q, k, v, lam, **settings):
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v, lam)]
    out = diff_attention(*inputs, backend="eager", **settings)
    return out, torch.autograd.grad(out.square().sum(), inputs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("maps", [1, 2])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("keys", [1, 7, 300])
def test_equals_the_formula(keys, heads, maps, masked):
    q, k, v = _tensors(keys, h=heads[0], hk=heads[1], maps=maps)
    mask = torch.rand(2, 1, 1, keys) < 0.7 if masked else None
    if masked:
        mask[0] = False  # no key at all: zeros
    for shape in ((1,), (heads[0], 1, 1), (2, heads[0], 1, 1)):
        lam = torch.rand(shape, requires_grad=True)
        out = diff_attention(q, k, v, lam, causal=True, mask=mask, backend="single")
        expected, gradients = _exact(q, k, v, lam, causal=True, mask=mask)
        torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)
        if masked:
            assert not out[0].any()
        own = torch.autograd.grad(out.square().sum(), (q, k, v, lam))
        torch.testing.assert_close(own, tuple(g.float() for g in gradients), rtol=1e-4, atol=1e-5)


def test_mask_of_each_head_and_a_scale():
    q, k, v = _tensors(9)
    lam, mask = torch.tensor([0.4], requires_grad=True), torch.rand(1, 4, 1, 9) < 0.6
    mask[..., 0] = True
    out = diff_attention(q, k, v, lam, mask=mask, scale=0.7, backend="single")
    torch.testing.assert_close(out, _exact(q, k, v, lam, mask=mask, scale=0.7)[0].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype):
    q, k, v = _tensors(40, dtype=dtype)
    lam = torch.tensor([0.4])
    out = diff_attention(q, k, v, lam, backend="single")
    assert out.dtype == dtype
    torch.testing.assert_close(out, _exact(q, k, v, lam.requires_grad_())[0].to(dtype), rtol=1e-2, atol=1e-3)


def test_taken_for_one_query_on_a_cpu():
    problem = Problem(batch=1, heads=4, kv_heads=4, queries=1, keys=500, head_dim=16, value_dim=32)
    assert supported_backends(problem)["single"].startswith("chosen")
    assert supported_backends(problem._replace(queries=2))["single"] == "cannot: it takes one query per head, not 2"
    q, k, v = _tensors(5)
    with pytest.raises(ValueError, match="'single' cannot take this call"):
        diff_attention(q, k, v, 0.5, dropout=0.1, backend="single")
