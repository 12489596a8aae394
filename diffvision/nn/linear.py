"""A linear map that uses every core for the few rows of a decoding step on a CPU."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

# Times as fast as torch on two cores: 1.5 to 2.0 for up to 4 rows and 1.15 to 1.3 for 8 and 16, with weights of 7e5 and
# more. With 1.8e5, for one row: 2.8 where the weight is read from memory, as each is when a token is decoded, and 0.8
# where the last call left it in the cache; with 2**16 decoding gains nothing.
MAX_ROWS = 16
MIN_WEIGHTS = 2**17
PLAIN = (Tensor, nn.Parameter)  # of weights; a quantised one has no rows to view
# Up to so many weights a copy of them takes less time than a call, on a CPU.
SMALL = 2**16


def few_rows_linear(x: Float[Tensor, "... in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "... out"]:
    """Return `x @ weight.T` without gradients on a CPU, with the rows of the weight shared out among the threads.

    torch multiplies a few rows with a matrix on one thread, and a batch of products on all. The parts are views of the
    weight, so that no number is copied.
    """
    out_features, in_features = weight.shape
    parts = torch.get_num_threads()
    while out_features % parts:
        parts -= 1
    rows = x.reshape(1, -1, in_features)
    shares = weight.view(parts, out_features // parts, in_features).transpose(1, 2)
    out = torch.bmm(rows.expand(parts, -1, -1), shares)  # [parts, rows, out / parts]
    return out.transpose(0, 1).reshape(*x.shape[:-1], out_features)


def linear(x: Float[Tensor, "... in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "... out"]:
    """Return `x @ weight.T` [..., out], by `few_rows_linear` where that is faster."""
    few = (
        not torch.is_grad_enabled()
        and weight.numel() >= MIN_WEIGHTS  # early, as the cheapest test for small models
        and not torch.compiler.is_compiling()  # before any size of x is read, so that a graph holds for all sizes
        and x.numel() <= MAX_ROWS * x.shape[-1]
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and type(weight) in PLAIN
        and not torch.is_autocast_enabled("cpu")
        and torch.get_num_threads() > 1
    )
    return few_rows_linear(x, weight) if few and weight.is_contiguous() else F.linear(x, weight)


class Linear(nn.Linear):
    """`nn.Linear` that computes by `linear` where it has no bias; parameters and names are the same."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        if torch.is_grad_enabled() or self.bias is not None or self.in_features * self.out_features < MIN_WEIGHTS:
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight)


def join(x: Tensor, *layers: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Concatenate the weights and biases of several linear maps of x, or return None if each map must be called.

    One product then replaces several, and the gradient of x is one product instead of a sum of several. On a GPU
    copying the weights costs less than the calls that it saves; on a CPU only up to `SMALL` weights. Maps that are
    wrapped, quantised or have hooks are called, and so are all maps in a graph, which torch.compile fuses itself.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not isinstance(x, Tensor):
        return None
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in layers:
        if type(layer) not in (Linear, nn.Linear) or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        assert isinstance(layer, nn.Linear)
        weight, bias = layer.weight, layer.bias
        if type(weight) not in PLAIN or (weight.numel() > SMALL and not weight.is_cuda):
            return None
        if layer._backward_hooks or layer._backward_pre_hooks:
            return None
        weights.append(weight)
        if bias is not None:
            biases.append(bias)
    if len(biases) not in (0, len(layers)):
        return None
    return torch.cat(weights), torch.cat(biases) if biases else None


def refuse_wrapped(**layers: nn.Module) -> None:
    """Check that each layer is an unwrapped linear map or attention of torch, so that its weights define its output.

    Raises:
        ValueError: a layer is wrapped in an adapter or a parametrization.
    """
    for name, layer in layers.items():
        if not isinstance(layer, nn.Linear | nn.MultiheadAttention) or is_parametrized(layer):
            raise ValueError(
                f"{name} is wrapped ({type(layer).__module__}.{type(layer).__name__}): merge it first (PEFT: "
                "merge_and_unload; torch: remove_parametrizations)"
            )
