"""What a layer does besides its products: functions of ours that it enters, copies, and its joined projections."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import code_paths
from diffvision.nn import Attention, DiffAttention, DiffAttentionV2
from diffvision.nn import linear as linear_module
from diffvision.ops import attention_backend, norm
from diffvision.ops.attention import sdpa


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", [Attention, DiffAttention, DiffAttentionV2])
def test_a_warm_layer_enters_few_functions(make, grad, half):
    layer, x = make(64, 4, qkv_bias=True), torch.randn(1, 2, 64)

    def run():
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=half):
            layer(x)

    run()
    counter = code_paths.Counter()
    with counter.counting():
        run()
    assert len(counter.functions) <= counter.calls <= 12


class Kernel(torch.autograd.Function):
    """Stands for a kernel of attention on CUDA: its results lie in memory as a projection's do."""

    @staticmethod
    def forward(q, k, v):
        return like_a_projection(q, v.shape[3])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return tuple(like_a_projection(t, t.shape[3]) for t in ctx.saved_tensors)


def like_a_projection(t, size):
    return t.new_empty(t.shape[0], t.shape[2], t.shape[1], size).transpose(1, 2)


class Norm(torch.autograd.Function):
    """Stands for CUDA's kernel of the norm, which copies what is not contiguous."""

    @staticmethod
    def forward(x, weight):
        return torch.empty(x.contiguous().shape, dtype=x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return torch.empty(grad.contiguous().shape, dtype=x.dtype), torch.empty_like(weight)


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counted[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


COPIES = ("_to_copy", "copy_", "clone", "cat", "stack", "add", "constant_pad_nd")
FILLS = ("zeros", "new_zeros", "zeros_like", "zero_", "fill_", "select_backward", "slice_backward")


@pytest.mark.parametrize(
    ("make", "settings", "most"),
    [
        (DiffAttention, {}, 18),  # 9 of them casts of weights and of their gradients, 2 the sums of lambda
        (DiffAttention, {"qk_norm": True}, 24),
        (DiffAttentionV2, {}, 22),
        (Attention, {}, 10),
    ],
)
def test_a_layer_copies_little_and_fills_nothing_with_zeros(make, settings, most, monkeypatch):
    """Forward and backward under autocast, as on a card where torch takes cuDNN's kernel."""
    monkeypatch.setattr(sdpa, "_prepare", sdpa._for_cuda)
    monkeypatch.setattr(sdpa, "compute_capability", lambda index: 90)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: Kernel.apply(q, k, v))
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: Norm.apply(x, weight))
    layer, x = make(64, 2, **settings), torch.randn(2, 9, 64, requires_grad=True)
    with Operations() as operations:
        with torch.autocast("cpu", torch.bfloat16), attention_backend("sdpa"):
            out = layer(x)
        out.backward(torch.empty_like(out))
    assert sum(operations.counted[name] for name in COPIES) <= most
    assert not [name for name in FILLS if operations.counted[name]]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("make", [Attention, DiffAttention, DiffAttentionV2])
def test_projections_in_one_product_are_the_three(make, half, bias, heads, monkeypatch):
    layer, x = make(64, *heads, qkv_bias=bias), torch.randn(2, 9, 64, requires_grad=True)
    results = []
    for small in (linear_module.SMALL, 0):
        monkeypatch.setattr(linear_module, "SMALL", small)
        assert (linear_module.join(x, layer.q_proj, layer.k_proj) is None) == (small == 0)
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            out = layer(x)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (x, *layer.parameters()))])
    for one, three in zip(*results, strict=True):
        torch.testing.assert_close(one, three, rtol=0.05 if half else 1e-4, atol=0.05 if half else 1e-5)


def test_a_projection_that_is_watched_wrapped_or_of_another_kind_is_called():
    class Wrapped(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x) + 1

    layer, x = Attention(64, 4), torch.randn(2, 9, 64, requires_grad=True)
    plain, seen = layer(x), []
    handle = layer.k_proj.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(x), plain)
    assert seen
    handle.remove()
    layer.v_proj.register_full_backward_hook(lambda *_: seen.append(2))
    layer(x).sum().backward()
    assert seen == [1, 2]
    layer.v_proj = Wrapped(layer.v_proj)
    assert not torch.allclose(layer(x), plain)
    biased = Attention(64, 4)
    biased.q_proj = nn.Linear(64, 64)
    assert linear_module.join(x, biased.q_proj, biased.k_proj, biased.v_proj) is None
    biased(x)


def test_the_norm_of_heads_takes_them_as_they_lie_in_memory(monkeypatch):
    taken = []
    monkeypatch.setattr(F, "rms_norm", lambda x, *_: taken.append(x.is_contiguous()) or x)
    heads = torch.randn(2, 9, 4, 8).transpose(1, 2)
    assert norm.rms_norm(heads.bfloat16(), torch.ones(8), 1e-5).stride() == heads.stride()
    assert taken == [True]
