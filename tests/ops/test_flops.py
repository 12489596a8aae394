"""What torch's counter says of operators into which it cannot look, against the formula's own products."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diffvision.ops import diff_attention


def count(backend, maps, heads, kv_heads, queries, keys, value_dim, grad, **settings):
    q = torch.randn(2, heads, 2, queries, 16, requires_grad=grad)
    k = torch.randn(2, kv_heads, maps, keys, 16, requires_grad=grad)
    v = torch.randn(2, kv_heads, keys, value_dim, requires_grad=grad)
    with FlopCounterMode(display=False) as counter:
        out = diff_attention(q, k, v, 0.3, backend=backend, **settings)
        if grad:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"causal": True}, {"mask": torch.ones(1, 1, 17, 33, dtype=torch.bool).tril(16)}]
)
@pytest.mark.parametrize(("maps", "heads", "kv_heads", "value_dim"), [(2, 4, 4, 32), (1, 4, 4, 16), (2, 4, 2, 32)])
def test_as_many_as_the_formula(maps, heads, kv_heads, value_dim, settings, grad):
    sizes = (maps, heads, kv_heads, 17, 33, value_dim, grad)
    assert count("blocked", *sizes, **settings) == count("eager", *sizes, **settings) > 0


@pytest.mark.parametrize("backend", ["single", "blocked"])
def test_one_query_against_a_long_cache(backend):
    sizes = (2, 4, 2, 1, 600, 32, False)
    assert count(backend, *sizes) == count("eager", *sizes)
