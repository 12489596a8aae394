import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from diffvision.ops import rms_norm


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


def test_gradients_are_right_of_transposed_heads_and_compile_whole():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    assert rms_norm(x, weight, None).isfinite().all()
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
