import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from diffvision.ops import norm, rms_norm


@pytest.fixture(autouse=True, params=["torch's", "ours"])
def _size(request, monkeypatch):
    """Small inputs go to torch's call: here to ours too."""
    if request.param == "ours":
        monkeypatch.setattr(norm, "SMALL", -1)
        monkeypatch.setattr(norm, "SMALL_TRAINED", -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5, 8), (8,), (2, 0, 8), (1, 1, 1, 8)])
def test_equals_torch_s(dtype, shape):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    ours, theirs = rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight.to(dtype), 1e-5)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (x, weight), grad), torch.autograd.grad(theirs, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_gradients_are_right_of_transposed_heads_and_compile_whole():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    assert gradgradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    by_func = torch.func.grad(lambda x: rms_norm(x, weight, 1e-5).square().sum())(x)
    torch.testing.assert_close(by_func, torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), x)[0])
    assert rms_norm(x, weight, None).isfinite().all()
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, 1e-5), rms_norm(x, weight, 1e-5))


def test_autocast_leaves_the_statistics_alone_and_a_wrong_weight_is_named():
    x, weight = torch.randn(4, 6, 64), torch.ones(64)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5))
    with pytest.raises(ValueError, match=r"weight \(1,\) must be as long as"):
        rms_norm(x, weight[:1], 1e-5)


def test_weights_of_several_models_at_once_and_gradients_under_autocast():
    x, weights = torch.randn(5, 16, requires_grad=True), torch.rand(3, 16)
    many = torch.func.vmap(lambda w: rms_norm(x, w, 1e-5))(weights)
    grads = torch.func.vmap(torch.func.grad(lambda w: rms_norm(x, w, 1e-5).square().sum()))(weights)
    for one, grad, weight in zip(many, grads, weights, strict=True):
        torch.testing.assert_close(one, F.rms_norm(x, (16,), weight, 1e-5))
        weight = weight.clone().requires_grad_()
        loss = F.rms_norm(x, (16,), weight, 1e-5).square().sum()
        torch.testing.assert_close(grad, torch.autograd.grad(loss, weight)[0])
    weight = torch.rand(16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(rms_norm(x, weight, 1e-5).sum(), (x, weight))
    true = torch.autograd.grad(F.rms_norm(x, (16,), weight, 1e-5).sum(), (x, weight))
    torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-5)
