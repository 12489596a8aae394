"""FSDP2: sharding of weights, gradients and optimizer moments over devices, the same for every module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from diffvision.training.compilation import compile_in_place


def find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated parts of a model, such as its towers' blocks: the items of lists of one class."""
    for child in model.children():
        items = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        if len({type(item) for item in items}) == 1 and all(any(item.children()) for item in items):
            yield from items
        else:
            yield from find_blocks(child)


def shard(model: nn.Module, mesh: DeviceMesh, methods: Sequence[str] = ()) -> None:
    """Shard each block of a model, and the rest together.

    FSDP2 does not shard 0-d parameters, such as OpenCLIP's logit scale. They are replicated, their gradients are
    averaged, and they are saved as without sharding.

    Args:
        model: the whole model, equal in each process.
        mesh: 1-d mesh of the devices.
        methods: methods of the model, besides `forward`, that use its weights.
    """
    scalars = set()
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.ndim:
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                replaced = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                if parameter.requires_grad:
                    replaced.register_post_accumulate_grad_hook(_average_gradient)
                setattr(module, name, replaced)
                scalars.add(replaced)
    if scalars:
        model.register_forward_hook(lambda model, inputs, outputs: apply_to_collection(outputs, DTensor, _to_local))
    blocks = list(find_blocks(model))
    if compiled := [part for part in model.modules() if part._compiled_call_impl is not None]:
        for part in compiled:  # FSDP2 gathers between blocks, which no graph holds: one for each block
            part._compiled_call_impl = None
        for block in blocks:
            compile_in_place(block, fullgraph=False)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=scalars)
    for method in methods:
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)


def _to_local(value: DTensor) -> Tensor:
    """Return the local tensor of a replicated value; its gradient is averaged over devices."""
    return value.to_local(grad_placements=[Partial("avg")]).clone()  # FSDP2 warns of views


def _average_gradient(parameter: Tensor) -> None:
    parameter.grad = cast(DTensor, parameter.grad).redistribute(placements=[Replicate()])


def gather_weights(model: nn.Module) -> None:
    """Keep the whole weights on each device until `release_weights`, so that ranks may run independently."""
    if not is_sharded(model):
        return
    with torch.inference_mode(False), torch.no_grad():  # the next training step uses the same memory
        model.forward = lambda: None
        model()  # FSDP2 takes what is called first for the root, and evaluations may call a part
        del model.forward
        for part in sharded_parts(model):
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()


def release_weights(model: nn.Module) -> None:
    """Shard again what `gather_weights` has gathered."""
    for part in sharded_parts(model):
        part.set_reshard_after_forward(part is not model, recurse=False)  # as FSDP2 has it by default
        part.reshard()


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is sharded."""
    return isinstance(model, FSDPModule)


def restore_moments(optimizer: torch.optim.Optimizer) -> None:
    """Distribute moments like their parameters: torch loads those of 0-d parameters as plain tensors."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor) and not parameter.ndim:
            for name in state.keys() - {"step"}:
                if not isinstance(state[name], DTensor):
                    local = state[name].to(parameter.to_local().device)
                    state[name] = DTensor.from_local(
                        local, parameter.device_mesh, parameter.placements, run_check=False
                    )


def to_whole(value: Tensor) -> Tensor:
    """Gather a tensor if it is sharded, else return it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def sharded_parts(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP modules of a model; an empty list if it is not sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
