"""torch.compile in training: its settings, and what a failure says.

A module is compiled whole: code that cannot be traced is an error, and never runs eagerly in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Graphs of one function. Dynamo's limit of 8 is too low for FSDP2's blocks, each of which has its own lambda_init.
RECOMPILE_LIMIT = 256
CORRECT_SINCE = (2, 15)  # the version of torch from which gradients need no options (pytorch issues 193061 and 198333)
COMPILING_NOTICE = "the first step compiles the model, which takes minutes: model.compile=false trains without"
_COMPILER_PACKAGES = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "torch._subclasses")


def compile_in_place(module: nn.Module, *, fullgraph: bool = True, dynamic: bool = False) -> None:
    """Compile a module's forward pass in place; the keys of its state_dict stay.

    There is one graph for each batch size, with and without gradients, in training and in evaluation; batches that
    `mark_batch_dynamic` marked share one. Sizes never become dynamic by themselves, so a resumed run compiles the same
    graphs as the interrupted one.

    Under DDP gradients are reduced after a graph's backward pass. `optimize_ddp`, which splits graphs at DDP's buckets
    so that both overlap, is off because it cannot split graphs with checkpointed blocks.

    Args:
        module: a model, or a part of it.
        fullgraph: refuse graph breaks; False for FSDP2's blocks, whose hooks run between graphs.
        dynamic: compile one graph for all batch sizes.
    """
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.optimize_ddp = False
    module.compile(fullgraph=fullgraph, dynamic=dynamic, options=inductor_options())
    separate = SeparateGradients()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(separate)


class SeparateGradients:
    """Hook of parameters that copies a gradient whose memory is shared with, or part of, another tensor.

    For a batch of one a graph returns the gradient of a ViT's class token as a view of that of its positions, and
    autograd keeps both. In-place operations (accumulation, clipping) would then change one of them twice. The copy has
    its parameter's strides, as DDP expects.
    """

    def __init__(self) -> None:
        self._owners: dict[int, nn.Parameter] = {}  # address -> whose gradient lies there
        self._addresses: dict[nn.Parameter, int] = {}

    def __call__(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None
        address = _address(parameter)
        owner = self._owners.get(address)
        is_part = grad.nbytes < grad.untyped_storage().nbytes()
        if owner is parameter and not is_part:
            return
        is_shared = owner is not None and owner.grad is not None and _address(owner) == address
        if is_shared or is_part:
            parameter.grad = torch.empty_like(parameter).copy_(grad)
            address = _address(parameter)
        if self._owners.get(earlier := self._addresses.get(parameter, 0)) is parameter:
            del self._owners[earlier]
        self._owners[address], self._addresses[parameter] = parameter, address


def _address(parameter: nn.Parameter) -> int:
    assert parameter.grad is not None
    return parameter.grad.untyped_storage().data_ptr()


def inductor_options() -> dict[str, bool] | None:
    """Return the inductor options that the installed torch needs for correct gradients on CUDA; None if none.

    From 2.10 to 2.14, where a norm's backward pass and a sum over the batch are one kernel, some gradients are never
    written (pytorch issue 193061; in 2.10 those of a convolution's bias too, 190796). In 2.13 and 2.14 the backward
    pass may draw another dropout mask than the forward pass did (198333).

    No option is known against 188912: with 2.13.0 and a whole H100 a compiled SigLIP ViT of timm fails torch's check
    under AMP. A scalar's gradient is off by 0.38, in eager mode by 0.10. 2.12.1 passes, and so did torch's main branch
    after 2.13. Without that card it cannot be tried.
    """
    major, minor = torch.__version__.split(".")[:2]
    version = (int(major), int(minor))
    options = {}
    if version < CORRECT_SINCE:
        options["triton.mix_order_reduction"] = False
    if (2, 13) <= version < CORRECT_SINCE:
        options["align_random_eager"] = True
    return options or None


@contextmanager
def explain_failures() -> Iterator[None]:
    """Turn an error of torch.compile into a ValueError that names `model.compile`.

    Raises:
        ValueError: torch.compile failed.
    """
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(_COMPILER_PACKAGES):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        raise ValueError(
            f"torch {torch.__version__} cannot compile the model: set model.compile to false ({reason:.120})"
        ) from error
