"""Conversion of pretrained models to differential attention that compute the same function before further training.

Layers are replaced in place; timm builds such a model again by the name in `adapted.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from open_clip.transformer import Attention as OpenClipAttention
from open_clip.transformer import ResidualAttentionBlock
from timm.layers import Attention as TimmAttention
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from diffvision.models.clip import TextBlock
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.merge import merge_dex
from diffvision.nn import ATTENTION, AttentionLayer, build_attention
from diffvision.nn.dex import set_dex_lambda, set_dex_schedule
from diffvision.nn.linear import refuse_wrapped

__all__ = ["ENTRYPOINT", "Heads", "adapt", "freeze_but_new", "merge_dex", "set_dex_lambda", "set_dex_schedule"]

Heads = Mapping[str, Sequence[int]] | Sequence[int]
"""A block's name -> its heads, none in other blocks; or the heads of every block."""
ENTRYPOINT = "adapted_vit"  # timm's name of an adapted VisionTransformer


def adapt(model: nn.Module, method: str = "v2", *, heads: Heads | None = None, only_new: bool = False) -> nn.Module:
    """Make the attention of a pretrained model differential, in place, and return the model.

    | method | the new layer | at first it computes |
    |---|---|---|
    | "v2" | DIFF V2: its second query a copy of the first, lambda 0.5, the output projection doubled | the same |
    | "dex" | its heads' outputs less lambda times a projection of them, which is zero (arXiv 2505.16333) | the same |
    | "v1" | DIFF V1 by taking heads in pairs, lambda by depth, for comparison | another function |

    "v2" and "dex" give every new matrix a gradient from the first step. For "dex" this needs a lambda above zero, which
    the default (the layer's lambda_init) and the paper's `diffvision.training.callbacks.LambdaAnnealing` give.

    "gated" adds a gate of 1/2 and doubles the output projection, which computes the same. Layers that have a gate keep
    it: "v2" then makes "v2_gated", and "v1" "v1_gated". "sink" and "integral" cannot compute the same, and are refused.

    A timm model can be saved afterwards (`timm.models.save_for_hf`), and `timm.create_model("local-dir:...")` builds it
    again. A `LanguageModel` can be saved by `language.save`, and `diffvision adapt` also saves OpenCLIP models.

    Args:
        model: a timm `VisionTransformer` with standard attention, an OpenCLIP model (both towers, where they have it),
            or a `LanguageModel` of the standard variant, whose `config` is changed as well.
        method: "v2", "dex" or "v1", or another variant of `diffvision.nn.ATTENTION` that has `from_standard`.
        heads: for "dex", which heads of a layer are changed, such as those of the paper's choice,
            `diffvision.analysis.heads.highest_entropy`; all by default.
        only_new: freeze all but the new parameters, as `freeze_but_new` does.

    Raises:
        ValueError: there is no standard attention, or it has further parts (norms of all heads, cross-attention,
            adapters such as LoRA), only some layers of a tower have it, or for "v1" the number of heads is odd.
    """
    if method not in ATTENTION or not ATTENTION[method].new_parameters:
        methods = [name for name, kind in ATTENTION.items() if kind.new_parameters]
        why = ATTENTION[method].no_adapting if method in ATTENTION else ""
        raise ValueError(f"method is {method!r}{why}: choose one of {', '.join(methods)}")
    if heads is not None and method != "dex":
        raise ValueError(f"heads is for method 'dex', and {method!r} changes all heads: leave it out")
    slots = list(_attention_slots(model))
    if not slots:
        ours = ", ".join(sorted({layer.variant for layer in _attention_layers(model)})) or "none of ours"
        raise ValueError(f"{type(model).__name__} must have standard attention of timm, OpenCLIP or ours, got {ours}")
    _refuse_mixed(model, slots)
    blocks = [slot.block for slot in slots]
    if isinstance(heads, Mapping) and (unknown := [name for name in heads if name not in blocks]):
        raise ValueError(f"heads names {unknown[0]!r}: choose among the blocks {', '.join(blocks)}")
    standard = [_to_standard(slot.attention) for slot in slots]  # all, before any is changed
    new = []
    for slot, layer in zip(slots, standard, strict=True):
        settings: dict[str, Any] = {}
        if heads is not None:
            settings["heads"] = heads.get(slot.block, ()) if isinstance(heads, Mapping) else heads
        variant = _gated_variant(method) if layer.variant == "gated" else method
        new.append(ATTENTION[variant].from_standard(layer, depth=slot.depth, **settings))
    for slot, layer in zip(slots, new, strict=True):
        slot.put(layer)
    if only_new:
        freeze_but_new(model)
    if isinstance(model, LanguageModel):
        kv_heads = None if model.config.num_kv_heads is None else new[0].num_kv_heads
        model.config = dataclasses.replace(
            model.config, variant=new[0].variant, num_heads=new[0].num_heads, num_kv_heads=kv_heads
        )
    _rename(model, method)
    return model


def freeze_but_new(model: nn.Module, also: Sequence[str] = ()) -> None:
    """Freeze all parameters of an adapted model but the new ones.

    These are DEX's projections and lambdas, V1's lambda vectors and norms, V2's lambda projections and queries (whose
    first and second maps are one matrix).

    Args:
        model: a model that `adapt` made, or that was loaded from one.
        also: further parts of its attention layers that stay trainable; DEX's paper has k_proj, v_proj and proj.

    Raises:
        ValueError: there is no adapted layer, or it has no such part.
    """
    layers = [layer for layer in _attention_layers(model) if layer.new_parameters]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer that adapt makes, so no new parameters: adapt it first")
    for part in also:
        if not hasattr(layers[0], part):
            raise ValueError(f"also has {part!r}: choose among the layers' parts {', '.join(layers[0]._modules)}")
    model.requires_grad_(False)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name.startswith(layer.new_parameters) or name.partition(".")[0] in also)


# ---- finding the attention -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The location of a block's attention: attribute `name` of `parent`, in the `depth`-th block of a tower."""

    parent: nn.Module
    name: str
    depth: int
    block: str  # the block's name in the model
    causal: bool = False  # whether an OpenCLIP tower passes the causal mask

    @property
    def attention(self) -> nn.Module:
        return getattr(self.parent, self.name)

    def put(self, layer: AttentionLayer) -> None:
        """Put a differential layer where the plain attention is."""
        block = self.attention
        if isinstance(block, ResidualAttentionBlock):
            layer.train(block.training)
            setattr(self.parent, self.name, TextBlock(block, layer, self.causal))
        else:
            setattr(self.parent, self.name, layer.train(block.training))


def _attention_slots(model: nn.Module) -> Iterator[_Slot]:
    """Yield every place of a model where plain attention can be replaced."""
    for name, tower in model.named_modules():
        if isinstance(tower, nn.Sequential | nn.ModuleList) and name.rpartition(".")[2] in ("blocks", "resblocks"):
            owner = model.get_submodule(".".join(name.split(".")[:-2]))  # of OpenCLIP's transformer
            causal = getattr(owner, "attn_mask", None) is not None and getattr(owner, "cls_emb", None) is None
            for depth, block in enumerate(tower):
                if type(block) is ResidualAttentionBlock:
                    yield _Slot(tower, str(depth), depth, f"{name}.{depth}", causal)
                elif type(attn := getattr(block, "attn", None)) is TimmAttention or is_standard(attn):
                    yield _Slot(block, "attn", depth, f"{name}.{depth}")


def _attention_layers(model: nn.Module) -> list[AttentionLayer]:
    return [layer for layer in model.modules() if isinstance(layer, AttentionLayer)]


def is_standard(module: Any) -> bool:
    """Return whether a module is the standard attention of ours, which may have a gate."""
    return isinstance(module, AttentionLayer) and module.variant in ("standard", "gated")


def _gated_variant(method: str) -> str:
    """Return the variant of a method for layers with a gate."""
    name = method if method.endswith("_gated") else f"{method}_gated"
    if name not in ATTENTION:
        raise ValueError(f"the model's attention has gates, which method {method!r} does not take: use 'v2' or 'v1'")
    return name


def _refuse_mixed(model: nn.Module, slots: Sequence[_Slot]) -> None:
    """Raise a ValueError for a tower in which only some layers are standard, as with `variant_by_layer`."""
    towers = {slot.block.rpartition(".")[0] for slot in slots}
    standard = {slot.block for slot in slots}
    for name, layer in model.named_modules():
        block = name.rpartition(".")[0]
        if isinstance(layer, AttentionLayer) and block.rpartition(".")[0] in towers and block not in standard:
            raise ValueError(
                f"{block} has attention of {layer.variant} and {slots[0].block} standard attention: start from a "
                "model without variant_by_layer"
            )


def _rename(model: nn.Module, method: str) -> None:
    """Set the architecture of timm's models, so that timm can save them and build them again."""
    for module in model.modules():
        part: Any = module
        config = getattr(part, "pretrained_cfg", None)
        if isinstance(module, VisionTransformer) and config and config.get("architecture") != ENTRYPOINT:
            built = {"base": config.get("architecture"), "method": method}
            part._model_args = {**getattr(part, "_model_args", {}), **built}
            part.pretrained_cfg = part.default_cfg = {**config, "architecture": ENTRYPOINT}


def _to_standard(module: Any) -> AttentionLayer:
    """Return a library's attention as a standard layer of ours; tensors are copies, or views of copies."""
    if isinstance(module, AttentionLayer):
        refuse_wrapped(q_proj=module.q_proj, k_proj=module.k_proj, v_proj=module.v_proj, proj=module.proj)
        return module
    return _from_timm(module) if isinstance(module, TimmAttention) else _from_torch(module)


def _from_timm(theirs: TimmAttention) -> AttentionLayer:
    """Return a plain layer of ours with the weights of timm's attention."""
    gate = getattr(theirs, "gate", None)
    refuse_wrapped(qkv=theirs.qkv, proj=theirs.proj, **({} if gate is None else {"gate": gate}))
    has_norm = not isinstance(getattr(theirs, "norm", None), nn.Identity | None)
    if has_norm or theirs.proj.out_features != theirs.qkv.in_features:
        what = "a norm of all heads" if has_norm else "another output width"
        raise ValueError(f"timm's attention here has {what}, which no layer of ours has: give a model without it")
    layer = _layer(theirs, theirs.qkv.weight, theirs.qkv.bias, theirs.proj, gate)
    layer.q_norm, layer.k_norm = cast(Any, theirs.q_norm), cast(Any, theirs.k_norm)
    layer.attn_drop, layer.proj_drop = theirs.attn_drop.p, theirs.proj_drop
    return layer


def _from_torch(block: ResidualAttentionBlock) -> AttentionLayer:
    """Return a plain layer of ours with the weights of OpenCLIP's attention block."""
    theirs: Any = block.attn
    is_torch = not isinstance(theirs, OpenClipAttention)  # which is that of OpenCLIP 4's blocks
    refuse_wrapped(out_proj=theirs.out_proj, **({"attn": theirs} if is_torch or is_parametrized(theirs) else {}))
    if hasattr(block, "ln_1_kv") or theirs.in_proj_weight is None or (is_torch and theirs.bias_k is not None):
        raise ValueError("a block of cross-attention has keys of another sequence: adapt blocks of self-attention only")
    if is_torch and not theirs.batch_first:
        raise ValueError("the tower's transformer has batch_first=False: make it with batch_first=True")
    layer = _layer(theirs, theirs.in_proj_weight, theirs.in_proj_bias, theirs.out_proj)
    layer.attn_drop = theirs.dropout if is_torch else theirs.attn_drop.p
    return layer


@torch.no_grad()
def _layer(
    theirs: Any, weight: Tensor, bias: Tensor | None, proj: nn.Linear, gate: nn.Linear | None = None
) -> AttentionLayer:
    """Return a standard layer with a library's weights, those of queries, keys and values stacked in one matrix."""
    layer = build_attention(
        "standard" if gate is None else "gated",
        weight.shape[1],
        theirs.num_heads,
        head_dim=theirs.head_dim,
        qkv_bias=bias is not None,
        proj_bias=proj.bias is not None,
        device=proj.weight.device,
        dtype=proj.weight.dtype,
    )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            for linear, part in zip((layer.q_proj, layer.k_proj, layer.v_proj), value.chunk(3), strict=True):
                getattr(linear, name).copy_(part)
    layer.proj.load_state_dict(proj.state_dict())
    if gate is not None:
        cast(Any, layer).gate.load_state_dict(gate.state_dict())
    return layer
