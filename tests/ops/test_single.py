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
