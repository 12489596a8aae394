"""What a layer does besides its products: functions of ours that it enters, copies, and its joined projections."""

from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import code_paths
from diffvision.nn import ATTENTION, Attention, DiffAttention, DiffAttentionV2
from diffvision.nn import linear as linear_module
from diffvision.ops import attention_backend, rotary_tables
from diffvision.ops.attention import kernels, sdpa

# The most functions of ours that a warm layer enters: on a CPU, with rotary embedding and norms of queries and keys; on
# an H100, likewise, where torch's attention takes five more to be prepared, the difference of two outputs three, and a
# norm one.
FEW = dict.fromkeys(("standard", "v1", "v2"), (12, 14, 20, 22))
MOST = (21, 22, 28, 29)  # of the other variants: DINT's, whose third map plain attention computes


def enters(layer, x, **given):
    """Count the functions and calls of a warm layer: the most with gradients and autocast, and without."""
    functions = calls = 0
    for on in (True, False):
        with torch.set_grad_enabled(on), autocast(x.device.type, on):
            layer(x, **given)
            counter = code_paths.Counter()
            with counter.counting():
                layer(x, **given)
        functions, calls = max(functions, len(counter.functions)), max(calls, counter.calls)
    return functions, calls


@contextmanager
def autocast(device, half):
    """Autocast to bfloat16, on a GPU that torch does not see too."""
    if device == "cpu":
        with torch.autocast(device, torch.bfloat16, enabled=half):
            yield
        return
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_enabled(device, half)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")  # of torch.autocast("cuda", enabled=False)
@pytest.mark.quick("standard", "v1", "v2", "v1_dint")
@pytest.mark.parametrize("variant", ATTENTION)
def test_a_warm_layer_enters_few_functions(variant, monkeypatch):
    """On a CPU, and on fake tensors as on a GPU; rotary embedding takes the tables that a model computes once."""
    monkeypatch.setattr(kernels, "_compute_capability", lambda index: 90)
    monkeypatch.setattr(linear_module, "PLAIN", (*linear_module.PLAIN, FakeTensor))
    found = []
    for device, mode in (("cpu", nullcontext()), ("cuda", FakeTensorMode())):
        for settings in ({}, {"rotary": 10_000.0, "qk_norm": True}):
            with mode, torch.device(device):
                layer = ATTENTION[variant](64, 4, qkv_bias=True, **settings)
                found.append(
                    enters(layer, torch.randn(1, 2, 64), rotation=rotary_tables(torch.arange(2), layer.head_dim))
                )
    for (functions, _), most in zip(found, FEW.get(variant, MOST), strict=True):
        assert functions <= most
    if variant in FEW:
        assert found[0][1] <= 12  # calls


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
    monkeypatch.setattr(sdpa, "_for_others", sdpa._for_cuda)
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


def test_a_projection_that_is_watched_or_of_another_kind_is_called():
    layer, x = Attention(64, 4), torch.randn(2, 9, 64, requires_grad=True)
    plain, seen = layer(x), []
    handle = layer.k_proj.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(x), plain)
    assert seen
    handle.remove()
    layer.v_proj.register_full_backward_hook(lambda *_: seen.append(2))
    layer(x).sum().backward()
    assert seen == [1, 2]
    biased = Attention(64, 4)
    biased.q_proj = nn.Linear(64, 64)
    assert linear_module.join(x, biased.q_proj, biased.k_proj, biased.v_proj) is None
    biased(x)
