"""The difference of two maps' outputs in half precision, against the formula in float64."""

import itertools

import pytest
import torch

from diffvision import ops
from diffvision.ops.attention import difference as module
from diffvision.ops.attention.difference import subtract

HALF = [torch.bfloat16, torch.float16]
LAMBDAS = [(1,), (1, 3, 1, 1), (2, 3, 5, 1)]


def outputs(dtype, lam=(1,)):
    # in the memory order of a projection, as kernels return it
    one, two = (torch.randn(2, 5, 3, 8).to(dtype).transpose(1, 2).requires_grad_() for _ in range(2))
    return one, two, torch.rand(lam).requires_grad_()


def difference(one, two, lam):
    return subtract(one, two, lam, one.dtype)


@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("dtype", HALF)
def test_it_rounds_once_and_so_do_its_gradients(dtype, lam):
    inputs = outputs(dtype, lam)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out, true = difference(*inputs), exact[0] - exact[2] * exact[1]
    assert out.dtype == dtype
    assert out.stride() == inputs[0].stride()
    rounding = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(out.double(), true, **rounding)
    grad = torch.randn(out.shape).to(dtype)
    grads = torch.autograd.grad(out, inputs, grad)
    for got, tensor, expected in zip(grads, inputs, torch.autograd.grad(true, exact, grad.double()), strict=True):
        assert got.dtype == tensor.dtype
        torch.testing.assert_close(got.double(), expected, **rounding)
    # float32 inputs, or autocast's half-precision outputs of them, are not rounded
    torch.testing.assert_close(subtract(*inputs, torch.float32).double(), true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lam", LAMBDAS)
def test_second_derivatives(lam):
    inputs, second = outputs(torch.bfloat16, lam), []
    for tensors in (inputs, [t.detach().double().requires_grad_() for t in inputs]):
        loss = difference(*tensors).double().square().sum()
        squares = [g.double().square().sum() for g in torch.autograd.grad(loss, tensors, create_graph=True)]
        second.append([g.double() for one in squares for g in torch.autograd.grad(one, tensors, retain_graph=True)])
    for got, expected in zip(*second, strict=True):
        assert (got - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("in_dims", [(0, 0, None), (None, None, 0), (1, None, 0), (0, 0, 0)])
def test_vmap_and_its_gradients(in_dims):
    one, two, _ = (t.detach() for t in outputs(torch.bfloat16))
    shapes = [None if dim is None else 3 for dim in in_dims]
    inputs = [
        t if size is None else torch.stack([t + i for i in range(size)], dim)
        for t, size, dim in zip((one, two, torch.rand(1)), shapes, in_dims, strict=True)
    ]

    def gradients(one, two, lam):
        return torch.func.grad(lambda *tensors: difference(*tensors).float().square().sum(), argnums=(0, 1, 2))(
            one, two, lam
        )

    mapped = torch.func.vmap(lambda *t: (difference(*t), *gradients(*t)), in_dims)(*inputs)
    for index in range(3):
        single = [t if dim is None else t.select(dim, index) for t, dim in zip(inputs, in_dims, strict=True)]
        for got, expected in zip(mapped, (difference(*single), *gradients(*single)), strict=True):
            torch.testing.assert_close(got[index], expected, rtol=0.01, atol=0.01)


# What the output of an attention goes to, and so the layout of its gradient.
LAYOUTS = {
    "a projection": lambda out: out.transpose(1, 2).flatten(2).square().sum(),
    "heads": lambda out: (out.contiguous().float() ** 2).sum(),
    "a mean": lambda out: out.float().mean(2).square().sum(),
    "transposed": lambda out: (out.mT.contiguous() ** 2).sum(),
    "a sum": lambda out: out.sum(),
}


def attention(kind, q, k, v):
    """V1 or plain attention of projections [B, N, H, 2, D] and [B, N, H, V]."""
    q, k, v = q.permute(0, 2, 3, 1, 4), k.permute(0, 2, 3, 1, 4), v.transpose(1, 2)
    if kind == "plain":
        return ops.softmax_attention(q[:, :, 0], k[:, :, 0], v)
    function = torch.compile(ops.diff_attention, backend="aot_eager") if kind == "compiled" else ops.diff_attention
    return function(q, k, v, 0.5, backend="sdpa")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*itertools.product(["v1", "plain"], LAYOUTS), ("compiled", "a projection"), ("compiled", "a sum")],
)
def test_a_kernel_s_gradient_has_one_layout(kind, layout, monkeypatch):
    monkeypatch.setattr(module, "AT_RISK", ("cpu",))
    seen, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def looked_at(*args, **settings):
        out = kernel(*args, **settings)
        if out.dtype == torch.bfloat16:
            out.register_hook(lambda grad: seen.append(grad.stride()))
        return out

    if kind != "compiled":  # a graph has no hooks: there the gradients are compared alone
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", looked_at)
    leaves = [torch.randn(2, 5, 3, 2, 8), torch.randn(2, 5, 3, 2, 8), torch.randn(2, 5, 3, 16)]
    half = [leaf.bfloat16().requires_grad_() for leaf in leaves]
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(LAYOUTS[layout](attention(kind, *half)), half)
    true = torch.autograd.grad(LAYOUTS[layout](attention("v1" if kind == "compiled" else kind, *exact)), exact)
    assert seen == {"v1": 2, "compiled": 0, "plain": 1}[kind] * [(5 * 3 * 16, 16, 3 * 16, 1)]
    for got, expected in zip(grads, true, strict=True):
        assert (got.double() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["v1", "compiled", "plain"])
def test_gradients_do_not_depend_on_what_a_kernel_saw_before(kind):
    """cuDNN's plans are kept in a thread, and found by what all these calls have in common."""
    leaves = [torch.randn(2, 33, 3, 2, 16), torch.randn(2, 33, 3, 2, 16), torch.randn(2, 33, 3, 32)]
    half = [leaf.cuda().bfloat16().requires_grad_() for leaf in leaves]
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    for loss in LAYOUTS.values():
        torch.compiler.reset()
        grads = torch.autograd.grad(loss(attention(kind, *half)), half)
        true = torch.autograd.grad(loss(attention("v1" if kind == "compiled" else kind, *exact)), exact)
        for got, expected in zip(grads, true, strict=True):
            assert (got.double().cpu() - expected).norm() < 0.05 * expected.norm()
