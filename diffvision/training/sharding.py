"""FSDP2: sharding of a language model's weights, gradients and optimizer moments over devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

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

    Args:
        model: the whole model, equal in each process.
        mesh: 1-d mesh of the devices.
        methods: methods of the model, besides `forward`, that use its weights.
    """
    blocks = list(find_blocks(model))
    if compiled := [part for part in model.modules() if part._compiled_call_impl is not None]:
        for part in compiled:  # FSDP2 gathers between blocks, which no graph holds: one for each block
            part._compiled_call_impl = None
        for block in blocks:
            compile_in_place(block, fullgraph=False)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in methods:
        register_fsdp_forward_method(model, method)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is sharded."""
    return isinstance(model, FSDPModule)
