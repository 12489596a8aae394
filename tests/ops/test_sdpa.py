"""What calls of torch's attention get on CUDA: sizes, heads and kernels. Those marked gpu run its kernels."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffvision.ops import diff_attention, softmax_attention
from diffvision.ops.attention import sdpa
from diffvision.ops.attention.kernels import without_cudnn

CARDS = (75, 80, 86, 89, 90, 100, 103, 120)
SELF = {
    **{"half": True, "head_dim": 64, "value_dim": 64, "grouped": False, "masked": False, "queries": 197, "keys": 197},
    **{"grad": True, "dropout": False},
}


def plan(capability=90, version=(2, 15), **differing):
    return sdpa.plan_cuda(capability=capability, version=version, **SELF | differing)


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("differing", [{}, {"masked": True}, {"value_dim": 32}, {"half": False}])
def test_heads_are_repeated_where_no_kernel_surely_takes_groups(capability, differing):
    assert not plan(capability, (2, 15), grouped=True, **differing).repeat_heads
    assert not plan(capability, (2, 10), **differing).repeat_heads
    flash_takes_them = not differing and capability >= 80
    assert plan(capability, (2, 14), grouped=True, **differing).repeat_heads != flash_takes_them


@pytest.mark.parametrize("capability", CARDS)
def test_wide_values_go_to_the_flash_kernel_where_cudnn_is_not_first_and_it_takes_them(capability):
    flash = capability not in (75, 90, 100)
    assert plan(capability, value_dim=128).widen == flash
    assert plan(capability, value_dim=128, queries=64).widen == flash
    assert plan(capability, value_dim=128, grouped=True, version=(2, 10)).repeat_heads != flash
    for differing in ({"half": False}, {"masked": True}, {"queries": 1}, {"value_dim": 264}, {"value_dim": 64}):
        assert not plan(capability, **{"value_dim": 128} | differing).widen
    limited = capability in (86, 89, 120)  # what their shared memory leaves of the backward kernel
    for size, dropout, taken in ((192, True, True), (200, False, False), (256, False, True), (256, True, False)):
        assert plan(capability, value_dim=size, dropout=dropout).widen == (flash and (taken or not limited))
        assert plan(capability, value_dim=size, dropout=dropout, grad=False).widen == flash
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert not plan(capability, value_dim=128).widen


def test_cudnn_is_avoided_where_its_gradients_may_be_nan_and_for_changing_lengths():
    for capability, half in itertools.product((90, 100, 120, 130), (True, False)):
        assert not plan(capability, half=half).avoid_cudnn
        assert plan(capability, (2, 11), half=half, masked=True).avoid_cudnn
        assert plan(capability, (3, 0), half=half, masked=True).avoid_cudnn  # no release is known to be right
        assert not plan(capability, (2, 10), half=half, masked=True).avoid_cudnn
        assert not plan(capability, half=half, masked=True, grad=False).avoid_cudnn
        assert plan(capability, half=half, queries=1, grad=False).avoid_cudnn
    assert not plan(89, masked=True).avoid_cudnn  # there it is not among the first


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of torch's attention, and whether cuDNN was allowed in them."""
    seen = []

    def record(q, k, v, **settings):
        seen.append((q.shape, k.shape, v.shape, settings, torch.backends.cuda.cudnn_sdp_enabled()))
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    monkeypatch.setattr(sdpa, "compute_capability", lambda index: 90)
    with FakeTensorMode():
        yield seen


def heads(count, length, size):
    return torch.empty(2, count, length, size, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(("capability", "version"), [(90, (2, 14)), (90, (2, 15)), (89, (2, 15))])
@pytest.mark.parametrize("masked", [False, True])
def test_calls_on_cuda_are_aligned_and_repeated_and_keep_their_scale(calls, monkeypatch, capability, version, masked):
    monkeypatch.setattr(sdpa, "compute_capability", lambda index: capability)
    monkeypatch.setattr(sdpa, "_VERSION", version)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool, device="cuda") if masked else None
    q, k = (torch.stack([heads(count, 9, 12)] * 2, dim=2) for count in (4, 2))
    assert diff_attention(q, k, heads(2, 9, 20), 0.5, mask=mask, backend="sdpa").shape == (2, 4, 9, 20)
    assert softmax_attention(heads(4, 9, 12), heads(2, 9, 12), heads(2, 9, 20), mask=mask).shape == (2, 4, 9, 20)
    count = 4 if version == (2, 14) else 2
    size = 24 if capability == 89 and not masked else 16  # the values', for the flash kernel
    assert len(calls) == 3
    for of_q, of_k, of_v, settings, _ in calls:
        assert (of_q, of_k, of_v) == ((2, 4, 9, size), (2, count, 9, size), (2, count, 9, 24))
        assert settings["enable_gqa"] == (count == 2)
        assert settings["scale"] == 12**-0.5


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("key_maps", [1, 2])
def test_calls_prepared_for_a_card_are_the_formula_s(monkeypatch, capability, key_maps):
    monkeypatch.setattr(sdpa, "compute_capability", lambda index: capability)
    monkeypatch.setattr(sdpa, "_for_others", sdpa._for_cuda)  # for a CPU too
    monkeypatch.setattr(sdpa, "_VERSION", (2, 14))
    shapes = (2, 4, 2, 9, 12), (2, 2, key_maps, 9, 12), (2, 2, 9, 24)
    q, k, v = (torch.randn(shape).bfloat16().requires_grad_() for shape in shapes)
    lam = torch.rand(1, requires_grad=True)
    for causal, mask in ((False, None), (True, None), (False, torch.rand(1, 1, 9, 9).ge(0.3))):
        results = []
        for backend in ("sdpa", "eager"):
            out = diff_attention(q, k, v, lam, causal=causal, mask=mask, backend=backend)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v, lam))])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_cudnn_is_disabled_for_a_call_alone_and_stays_off_where_it_was(calls, monkeypatch):
    monkeypatch.setattr(sdpa, "_VERSION", (2, 11))  # from which on its gradients under a mask may be NaN
    q, mask = heads(4, 9, 16).requires_grad_(), torch.ones(1, 1, 9, 9, dtype=torch.bool, device="cuda")
    softmax_attention(q, q, q, mask=mask)
    softmax_attention(q, q, q)
    softmax_attention(q[:, :, :1], q, q)
    assert [enabled for *_, enabled in calls] == [False, True, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        softmax_attention(q, q, q, mask=mask)
        assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_graph_leaves_kernels_disabled_that_its_caller_disabled():
    kernels = []

    def backend(graph, inputs):
        named = [node for node in graph.graph.nodes if node.target is torch.nn.attention._backend_from_string]
        kernels.append({node.args[0] for node in named})
        return graph.forward

    def call(x):
        with without_cudnn():
            return x.sin()

    for context in (nullcontext(), sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])):
        torch._dynamo.reset()
        with context:
            torch.compile(call, fullgraph=True, backend=backend)(torch.ones(1))
    assert {"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"} < kernels[0]
    assert kernels[1] == {"EFFICIENT_ATTENTION", "CUDNN_ATTENTION"}  # cuDNN's for what follows


@pytest.mark.quick("2")
@pytest.mark.parametrize("count", [2, 4])
def test_a_graph_of_any_number_of_heads(count):
    q, k = torch.randn(1, 4, 2, 9, 8), torch.randn(1, count, 2, 9, 8)

    def attend(q, k):
        plain = softmax_attention(q[:, :, 0], k[:, :, 0], k[:, :, 1], causal=True)
        return plain + diff_attention(q, k, k[:, :, 0], 0.5, backend="sdpa")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(q, k), attend(q, k))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys"), [(704, 704), (1, 704), (704, 192)])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_finite_and_right_for_logits_of_minus_120(dtype, queries, keys, compiled):
    # cuDNN returns NaN for the queries' gradient (pytorch issue 196678): lengths of 64 more than a multiple of 128
    def inputs():
        torch.manual_seed(0)
        q, k = 0.1 * torch.randn(1, 2, 2, queries, 64), 0.1 * torch.randn(1, 2, 2, keys, 64)
        q[..., 0], k[..., 0] = 1.0, -120 * 64**0.5
        made = (q, k, torch.randn(1, 2, keys, 64), torch.full((1,), 0.5))
        return [t.to("cuda", t.dtype if t.dim() == 1 else dtype).requires_grad_() for t in made]

    mask = torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(max(keys - queries, 0))
    grad = torch.randn(1, 2, queries, 64, device="cuda", dtype=dtype)
    function = torch.compile(diff_attention, fullgraph=True) if compiled else diff_attention
    results = []
    for call, backend in ((function, "sdpa"), (diff_attention, "eager")):
        leaves = inputs()
        out = call(*leaves, mask=mask, backend=backend)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for got, expected in zip(*results, strict=True):
        assert got.isfinite().all()
        if got.shape[-1] == 64:  # the first column's gradient of the queries is 960 times a sum that should be 0
            got, expected = got[..., 1:], expected[..., 1:]
        error = (got.float() - expected.float()).norm() / expected.float().norm()
        assert error < 16 * torch.finfo(dtype).eps, error


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(12, 12), (20, 20), (20, 40), (64, 128)])
def test_grouped_heads_under_a_mask_keep_no_map(dtype, head_dim, value_dim):
    made = [(1, 4, 2, 2048, head_dim), (1, 2, 2, 2048, head_dim), (1, 2, 2048, value_dim)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in made)
    mask = torch.ones(2048, 2048, dtype=torch.bool, device="cuda").tril()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = diff_attention(q, k, v, 0.5, mask=mask, backend="sdpa")
    out.sum().backward()
    maps = 2 * 4 * 2048 * 2048 * dtype.itemsize
    assert torch.cuda.max_memory_allocated() - before < maps
    expected = diff_attention(q, k, v, 0.5, mask=mask, backend="eager")
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
