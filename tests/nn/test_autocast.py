"""Layers under CUDA's autocast, which widens more operations than a CPU's does: on a CPU a mode does the same.

`pytest -m gpu` runs the same layers under `torch.autocast("cuda")`, and compiled.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from diffvision.nn import ATTENTION, VisualContrastAttention, build_attention
from diffvision.nn.transformer import SwiGLU
from diffvision.ops import attention_backend, norm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16)
VCA = {"vca": True, "vca_two_softmaxes": False}  # `joint`
TOKENS, DIM = 16, 64

# "CUDA Ops that can autocast to float32" of torch's documentation as far as layers use them, and rms_norm, which torch
# 2.15 casts too.
TO_FLOAT32 = {"pow", "rdiv", "rpow", "rtruediv", "reciprocal", "rsqrt", "exp", "expm1", "log", "log1p", "softplus"}
TO_FLOAT32 |= {"prod", "sum", "cumprod", "cumsum", "norm", "normalize", "layer_norm", "group_norm", "rms_norm"}
TO_FLOAT32 |= {"softmax", "log_softmax"}


class CastsOfCuda(TorchFunctionMode):
    """Under a CPU's autocast, cast to float32 what CUDA's autocast does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") and func.__name__.strip("_") in TO_FLOAT32:
            args, kwargs = tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(x):
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in DTYPES else x


@contextmanager
def autocast_of_cuda(device, dtype):
    with pytest.MonkeyPatch.context() as patch, torch.autocast(device, dtype):
        patch.setattr(norm, "LEFT_ALONE", ())
        with CastsOfCuda() if device == "cpu" else nullcontext():
            yield


def make_layer(variant, qk_norm, device):
    if variant in VCA:
        layer = VisualContrastAttention(DIM, 2, contrast_size=2, joint=VCA[variant], qk_norm=qk_norm)
        layer.set_grid((4, 4))
    else:
        layer = build_attention(variant, DIM, 2, qk_norm=qk_norm)
    return layer.to(device)


def kinds_of_call(variant, device):
    yield {}
    if variant not in VCA:
        mask = torch.rand(2, 1, TOKENS, TOKENS, device=device) < 0.8
        yield {"is_causal": True}
        yield {"attn_mask": mask | torch.eye(TOKENS, dtype=torch.bool, device=device)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("variant", [*ATTENTION, *VCA])
def test_layers_compute_and_train_in_half_precision(variant, qk_norm, device):
    layer, projected = make_layer(variant, qk_norm, device), []
    layer.proj.register_forward_pre_hook(lambda _, inputs: projected.append(inputs[0].dtype))
    for kind in kinds_of_call(variant, device):
        x = torch.randn(2, TOKENS, DIM, device=device, requires_grad=True)
        exact = layer(x, **kind)
        (exact_grad,) = torch.autograd.grad(exact.square().sum(), x)
        for dtype in DTYPES:
            projected.clear()
            with autocast_of_cuda(device, dtype), attention_backend("sdpa"):
                out = layer(x, **kind)
            (grad,) = torch.autograd.grad(out.float().square().sum(), x)
            assert (out.dtype, *projected) == (dtype, dtype)
            for got, true in ((out, exact), (grad, exact_grad)):
                assert (got.float() - true).norm() < 0.03 * true.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["v1", "v2", "v1_dint", "vca_two_softmaxes"])
def test_layers_compile_whole_under_autocast(variant):
    layer = make_layer(variant, True, "cuda")
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, TOKENS, DIM, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        out, expected = compiled(x), layer(x)
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert x.grad.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)


# Numbers of half precision that backward keeps for a token, in widths: the tokens, queries, keys and values, each
# map's output, in V1 their difference (for its norm), the input of the output projection if it is none of those. On a
# CPU V1's queries and keys are widened, and a norm in half precision keeps its steps.
@pytest.mark.parametrize(
    ("variant", "device", "widths"),
    [
        ("standard", "cpu", 5),
        ("v2", "cpu", 8),
        *(pytest.param(*case, marks=pytest.mark.gpu) for case in (("v1", "cuda", 8), ("v2", "cuda", 8))),
    ],
)
def test_backward_keeps_one_copy_of_each_activation(variant, device, widths):
    layer = make_layer(variant, False, device)
    x = 1 * torch.randn(8, 128, DIM, device=device, requires_grad=True)  # autocast keeps its casts of leaves
    kept = {}

    def keep(tensor):
        if tensor.numel() >= x.numel() // 2:  # no weight, and no row's logarithm
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        autocast_of_cuda(device, torch.bfloat16),
        attention_backend("sdpa"),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        layer(x)
    assert sum(kept.values()) <= widths * 2 * x.numel()


def test_swiglu_keeps_its_input_once():
    mlp, casts = SwiGLU(8, 16), []
    for part in (mlp.gate, mlp.up):
        part.register_forward_pre_hook(lambda _, inputs: casts.append(inputs[0]))
    x = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        mlp(x)
    assert casts[0] is casts[1]
    assert casts[0].dtype == torch.bfloat16


def test_fx_traces_a_feed_forward_for_any_autocast():
    layer = SwiGLU(8, 16)
    traced, x = torch.fx.symbolic_trace(layer), torch.randn(2, 8)
    torch.testing.assert_close(traced(x), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(traced(x), layer(x))
