"""Eight-bit weights of linear layers, through torchao: symmetric, with a scale for each row; not activations.

A quantised weight is torchao's tensor `weight_int8 * scale`. A file has it as two plain tensors, `NAME` (int8
[out, in]) and `NAME_scale` (float32 [out, 1]), so that safetensors holds it and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SCALE = "_scale"


def quantise(model: nn.Module) -> nn.Module:
    """Quantise the weights of a model's linear layers in place, and return the model, which cannot be trained.

    These are all linear layers, lambda projections and heads too: docs/guides/export.md has the accuracy before and
    after.
    Other layers keep their weights: embeddings, a head tied to one, convolutions, norms, lambda vectors, and torch's
    MultiheadAttention, whose fused call reads its weights directly.

    Raises:
        ValueError: torchao is not installed, there is no linear layer, or weights are quantised already.
    """
    torchao = _torchao()
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    fused = {id(part) for attention in attentions for part in attention.modules()}
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and id(module) not in fused]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer to put in eight bits")
    if holds(model.state_dict()):
        raise ValueError(f"{type(model).__name__} is in eight bits already: give the model before that")
    config = torchao.Int8WeightOnlyConfig(granularity=torchao.PerRow(), set_inductor_config=False, version=2)
    chosen = {id(layer) for layer in layers}
    torchao.quantize_(model, config, filter_fn=lambda module, name: id(module) in chosen)
    return model


def holds(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state_dict has quantised weights, as torchao's tensors or as plain ones."""
    return any(hasattr(value, "qdata") or value.dtype == torch.int8 for value in state.values())


def refuse(state: Mapping[str, Tensor], what: str) -> None:
    """Raise a ValueError for quantised weights, where they would be trained or converted."""
    if holds(state):
        raise ValueError(
            f"{what} is in eight bits, which cannot be trained or converted: use the weights it was made from"
        )


def split(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of plain tensors, with two for each quantised weight."""
    plain: dict[str, Tensor] = {}
    for name, value in state.items():
        weight: Any = value
        if hasattr(weight, "qdata"):
            plain |= {name: weight.qdata, name + SCALE: weight.scale.reshape(-1, 1)}
        else:
            plain[name] = value
    return plain


def joined(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join what `split` split, for `load_state_dict(..., assign=True)`.

    Raises:
        ValueError: there are quantised weights and torchao is not installed, or a scale does not fit its weight.
    """
    quantised = {name for name, value in state.items() if value.dtype == torch.int8 and name + SCALE in state}
    scales = {name + SCALE for name in quantised}
    return {
        name: _tensor(name, value, state[name + SCALE]) if name in quantised else value
        for name, value in state.items()
        if name not in scales
    }


def _tensor(name: str, weight: Tensor, scale: Tensor) -> Tensor:
    """Return an int8 weight with one scale a row as torchao's tensor."""
    if weight.ndim != 2 or scale.shape != (weight.shape[0], 1) or not scale.isfinite().all():
        raise ValueError(
            f"{name} is {list(weight.shape)} in eight bits, and {name}{SCALE} {list(scale.shape)}: it must be a finite "
            "number for each row, [rows, 1]"
        )
    return _torchao().Int8Tensor(weight, scale, block_size=[1, weight.shape[1]], dtype=scale.dtype)


def _torchao() -> Any:
    try:
        import torchao.quantization as quantization
    except ImportError as error:
        raise ValueError(f"weights in eight bits need torchao ({error}): pip install 'diffvision[export]'") from None
    return quantization
