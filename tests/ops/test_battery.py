"""The numerical battery: every backend, in every dtype that it takes, against the formula in float64.

On a CPU each backend meets each feature once, and only those that the files next to this one do not test: forms of
inputs are in test_attention.py, FlexAttention (seconds to compile a shape) in test_flex.py. `pytest -m gpu` runs all.
"""

import itertools
from types import SimpleNamespace

import oracle
import pytest
import torch
import torch.nn.functional as F
from oracle import PROBLEMS, errors, largest, rounding

from diffvision.ops import diff_attention
from diffvision.ops.attention import BACKENDS
from diffvision.ops.attention.problem import describe

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Queries, keys, causal.
LENGTHS = ((257, 257, True), (1025, 1025, True), (3, 130, False), (65, 127, True), (129, 33, False))
GPU = tuple((n, n, n % 2 == 1) for n in (1, 2, 3, 17, 31, 33, 63, 65, 127, 129, 197, 257, 577, 1023, 1025))
GPU_UNEQUAL = ((1, 65, True), (3, 130, False), (63, 17, False), (65, 127, False), (129, 33, False))

# (backend, device, dtypes)
EVERY = [
    ("eager", "cpu", (FP32, FP16, BF16)),
    ("blocked", "cpu", (FP32, FP16, BF16)),
    ("sdpa", "cpu", (FP32, FP16, BF16)),
    ("eager", "cuda", (FP32, FP16, BF16)),
    ("sdpa", "cuda", (FP32, FP16, BF16)),
    ("flex", "cuda", (FP32, FP16, BF16)),
    ("flash", "cuda", (FP16, BF16)),
]


def _param(*values):
    marks = [pytest.mark.gpu] if values[1] == "cuda" else []
    return pytest.param(*values, marks=marks, id="-".join(str(v).removeprefix("torch.") for v in values))


WITH_DTYPE = [_param(b, d, dtype) for b, d, dtypes in EVERY for dtype in dtypes]
# The first dtype that the kernels are made for: where rounding is not the point.
BACKEND = [_param(b, d, dtypes[0]) for b, d, dtypes in EVERY]
ON_GPU = [_param(b, d, dtypes[0]) for b, d, dtypes in EVERY if d == "cuda"]  # tested elsewhere on a CPU


def tensors(device, dtype, m=17, **sizes):
    return oracle.tensors(**{"b": 1, "h": 2, "m": m, "n": m, "d": 32, "v": 64} | sizes, dtype=dtype, device=device)


def attend(backend, q, k, v, lam, causal=False, mask=None):
    problem = describe(q, k, v, lam, causal=causal, mask=mask, dropout=0.0)
    if q.is_cuda and (reason := BACKENDS[backend].limit(problem)):
        pytest.skip(reason)  # a library that is not installed, or a size that it does not take
    return diff_attention(q, k, v, lam, causal=causal, mask=mask, backend=backend)


def exact(inputs, causal=False, mask=None):
    """(output, gradients of its sum of squares) by the formula in float64, of the same rounded numbers."""
    inputs = [t.detach().double().requires_grad_() for t in inputs]
    out = diff_attention(*inputs, causal=causal, mask=mask, backend="eager")
    return out, torch.autograd.grad(out.square().sum(), inputs)


def _lengths(backend, device, dtype):
    if device == "cuda":
        return (*GPU, *GPU_UNEQUAL)
    return LENGTHS if dtype == FP32 else LENGTHS[3:4]  # half types are rounded at both ends only


ACCURACY = [
    _param(b, d, dtype, *shape) for b, d, dtypes in EVERY for dtype in dtypes for shape in _lengths(b, d, dtype)
]


@pytest.mark.parametrize(("backend", "device", "dtype", "m", "n", "causal"), ACCURACY)
def test_errors_stay_near_plain_attention_s(backend, device, dtype, m, n, causal):
    """Output at most 2.5 times and gradients at most 3 times the error of plain SDPA at the same dtype."""
    causal = causal and m <= n  # a row without keys has no error to compare with
    inputs = tensors(device, dtype, m=m, n=n, h=1 if n > 500 else 2)
    attend(backend, *inputs, causal=causal)  # skips where it cannot
    found = errors(backend, inputs, causal=causal)
    assert [error.of for error in found] == ["output", *(f"gradient of {name}" for name in ("q", "k", "v", "lambda"))]
    assert not [error for error in found if error.is_wrong]


@pytest.mark.parametrize(("backend", "device", "dtype"), WITH_DTYPE)
def test_cancelling_maps_lose_nothing_absolute(backend, device, dtype):
    lam = torch.tensor([0.0, 0.2, 0.8, 1.0, 1.5], device=device)[:, None, None]  # of each head
    q, k, v, _ = tensors(device, dtype, h=5, m=65)
    q = torch.stack([q[:, :, 0], 0.99 * q[:, :, 0] + 0.1 * q[:, :, 1]], dim=2)
    k = torch.stack([k[:, :, 0], 0.99 * k[:, :, 0] + 0.1 * k[:, :, 1]], dim=2)
    inputs = [q, k, v, lam]
    first = [t[:, :, 0] for t in (q, k)]
    plain = largest(
        F.scaled_dot_product_attention(*first, v), F.scaled_dot_product_attention(*(t.double() for t in (*first, v)))
    )
    true, _ = exact(inputs)
    out = attend(backend, *inputs)
    for head in range(5):
        assert largest(out[:, head], true[:, head]) <= 2.5 * plain + rounding(dtype, true[:, head])


@pytest.mark.parametrize(("backend", "device", "dtype"), WITH_DTYPE)
def test_extreme_logits_stay_finite(backend, device, dtype):
    inputs = tensors(device, dtype, h=4, m=33, d=16)
    size = torch.tensor([1e2, 1e3, 1e4, 6e4], device=device).sqrt().to(dtype)[:, None, None, None] * 0.5  # of each head
    q, k = ((t.detach().sign() * size).requires_grad_() for t in inputs[:2])
    out = attend(backend, q, k, *inputs[2:])
    grads = torch.autograd.grad(out.float().sum(), [q, k, *inputs[2:]])
    assert all(t.isfinite().all() for t in (out, *grads))


@pytest.mark.parametrize(("backend", "device", "dtype"), WITH_DTYPE)
def test_a_row_without_keys_is_zeros_forward_and_backward(backend, device, dtype):
    inputs = tensors(device, dtype, b=2, m=17)
    mask = torch.ones(2, 1, 17, 17, dtype=torch.bool, device=device)
    mask[0, :, 3] = False
    out = attend(backend, *inputs, mask=mask)
    assert (out[0, :, 3] == 0).all()
    assert (out[1, :, 3] != 0).any()
    grads = torch.autograd.grad(out.float().square().sum(), inputs)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0, :, :, 3] == 0).all()
    inputs = tensors(device, dtype, m=40, n=17)  # under causal the first 23 queries see no key
    out = attend(backend, *inputs, causal=True)
    grads = torch.autograd.grad(out.float().square().sum(), inputs)
    assert (out[:, :, :23] == 0).all()
    assert (out[:, :, 23] != 0).any()
    assert (grads[0][:, :, :, :23] == 0).all()


@pytest.mark.parametrize(("backend", "device", "dtype"), ON_GPU)
@pytest.mark.parametrize("problem", [name for name in PROBLEMS if name != "no keys"])
def test_every_problem_forward_and_backward(backend, device, dtype, problem):
    """Those of test_attention.py, with heads of a size that kernels take."""
    inputs = oracle.tensors(**{"d": 32, "v": 64} | PROBLEMS[problem], dtype=dtype, device=device)
    q, k = inputs[:2]
    padding = torch.rand(q.shape[0], 1, 1, k.shape[3], device=device) > 0.3
    for causal, mask in itertools.product((False, True), (None, padding)):
        out = attend(backend, *inputs, causal=causal, mask=mask)
        true, true_grads = exact(inputs, causal, mask)
        close = 2e-5 if dtype == FP32 else 2e-2
        torch.testing.assert_close(out.double(), true, rtol=close, atol=close)
        grads = torch.autograd.grad(out.double().square().sum(), inputs)
        for got, want in zip(grads, true_grads, strict=True):
            close = (1e-5 if dtype == FP32 else 1e-2) * max(1.0, want.abs().max().item())
            torch.testing.assert_close(got.double(), want, rtol=0, atol=4 * close)


@pytest.mark.parametrize(("backend", "device", "dtype"), BACKEND)
def test_views_copies_and_expanded_tensors_give_the_same(backend, device, dtype):
    q, k, v, lam = tensors(device, dtype, b=2, m=33)
    expected = attend(backend, q, k, v, lam)
    close = {"rtol": 0, "atol": 1e-6 if dtype == FP32 else 1e-3}
    for change in (
        lambda t: t.contiguous(),
        lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda t: torch.stack([t, t], dim=-1)[..., 0],
    ):
        torch.testing.assert_close(attend(backend, *(change(t) for t in (q, k, v)), lam), expected, **close)
    if backend != "flex":  # which takes no empty batch
        assert attend(backend, q[:0], k[:0], v[:0], lam).shape == (0, *expected.shape[1:])
    one = [t[:1].expand_as(t) for t in (q, k, v)]
    torch.testing.assert_close(attend(backend, *one, lam.expand(2, 2, 33, 1))[1], expected[0], **close)


@pytest.mark.quick("blocked-cpu-float32")
@pytest.mark.parametrize(("backend", "device", "dtype"), BACKEND)
def test_the_same_call_twice_is_bit_equal(backend, device, dtype):
    inputs, results = tensors(device, dtype, m=65, h=4, hk=2), []
    for _ in range(2):
        out = attend(backend, *inputs, causal=True)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    exempt = backend == "sdpa" and device == "cuda"  # torch's backward adds in any order there
    for once, again in list(zip(*results, strict=True))[: 1 if exempt else None]:
        assert torch.equal(once, again)


@pytest.mark.parametrize(("backend", "device", "dtype"), BACKEND)
@pytest.mark.parametrize("wanted", [(0, 2), (1,), (3,)])
def test_gradients_of_some_inputs_only(backend, device, dtype, wanted):
    inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors(device, dtype, m=17))]
    out = attend(backend, *inputs)
    grads = torch.autograd.grad(out.double().square().sum(), [inputs[i] for i in wanted])
    _, true = exact(inputs)
    for i, got in zip(wanted, grads, strict=True):
        close = (4e-5 if dtype == FP32 else 4e-2) * max(1.0, true[i].abs().max().item())
        torch.testing.assert_close(got.double(), true[i], rtol=0, atol=close)


@pytest.mark.quick
@pytest.mark.parametrize(("backend", "device", "dtype"), [p for p in BACKEND if p.values[:2] != ("flex", "cuda")])
def test_compiles_whole_with_its_gradient(backend, device, dtype):
    inputs = tensors(device, dtype, m=33)
    attend(backend, *inputs, causal=True)  # skips where it cannot

    def loss(*t):
        return diff_attention(*t, causal=True, backend=backend).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == FP32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(compiled(*inputs), loss(*inputs), **close)
    grads = torch.autograd.grad(compiled(*inputs), inputs)
    for got, want in zip(grads, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(got, want, **close)


def wrong_backward(out):
    return out.detach() * 1.001 + 1.001 * (out - out.detach()) - 0.001 * out.detach()


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda out: out * 1.0001, "output"),
        (lambda out: torch.where(out == out.max(), torch.nan, out), "output"),
        (wrong_backward, "gradient of q"),
    ],
)
def test_the_oracle_finds_a_wrong_backend(change, first, monkeypatch):
    eager = BACKENDS["eager"].diff_attention
    broken = SimpleNamespace(limit=lambda _: None, diff_attention=lambda *t, **settings: change(eager(*t, **settings)))
    monkeypatch.setitem(BACKENDS, "broken", broken)
    found = errors("broken", tensors("cpu", FP32))
    assert next(error.of for error in found if error.is_wrong) == first
