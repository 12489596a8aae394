"""Pretrained models made differential: the same function to begin with, and training that goes on from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
from open_clip.transformer import ResidualAttentionBlock
from timm.layers import Attention as TimmAttention
from timm.models import VisionTransformer
from torch import nn

from diffvision.models.clip import TextBlock
from diffvision.models.language.decoder import LanguageModel
from diffvision.nn import Attention, AttentionLayer, DexAttention, DiffAttention, DiffAttentionV2
from diffvision.nn.linear import refuse_wrapped

Method = Literal["v2", "dex", "v1"]
Heads = Mapping[str, Sequence[int]] | Callable[[int, Attention], Sequence[int]]
"""A block's name -> its heads, or (number of the layer, its attention) -> its heads."""
ENTRYPOINT = "adapted_vit"  # timm's name of what has become of a VisionTransformer


def adapt(model: nn.Module, method: Method = "v2", *, heads: Heads | None = None, only_new: bool = False) -> nn.Module:
    """Make the attention of a pretrained model differential, in place; returns the model.

    | method | what becomes of a layer | at first it computes |
    |---|---|---|
    | "v2" | DIFF V2: its second query a copy of the first, lambda 0.5, the output projection doubled | the same |
    | "dex" | its heads' outputs less lambda times a projection of them, which is zero (arXiv 2505.16333) | the same |
    | "v1" | DIFF V1 by taking heads in pairs, lambda by depth, for comparison | something else |

    "v2" and "dex" give every new matrix a gradient from the first step; for "dex" that takes a lambda above zero, which
    it is as it comes (its layer's lambda_init), and with `diffvision.training.callbacks.LambdaAnnealing`, the paper's.

    A timm model can be saved afterwards as any (`timm.models.save_for_hf`), and `timm.create_model("local-dir:...")`
    builds it again; a `LanguageModel` too (`language.save`). `diffvision adapt` does so, for OpenCLIP models as well.

    Args:
        model: a timm `VisionTransformer` with standard attention, an OpenCLIP model (both towers, where they have it),
            or a `LanguageModel` of the standard variant, whose `config` is changed as well.
        method: "v2", "dex" or "v1".
        heads: of "dex": which heads of a layer are changed, such as `diffvision.analysis.heads.highest_entropy` finds
            (the paper's choice); all by default.
        only_new: leave nothing trainable but what is new, as `freeze_but_new`.

    Raises:
        ValueError: no standard attention in it, or one with more to it (gates, norms of all heads, cross-attention,
            adapters such as LoRA); for "v1" an odd number of heads.
    """
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}: choose one of {', '.join(get_args(Method))}")
    if heads is not None and method != "dex":
        raise ValueError(f"heads are chosen for method 'dex'; {method!r} changes all")
    places = list(_places(model))
    if not places:
        raise ValueError(_nothing_to_change(model))
    chosen = _chosen(places, heads)
    standard = [_standard(place.attention) for place in places]  # all, before any is changed
    settings = [{"heads": chosen(place, own)} if chosen else {} for place, own in zip(places, standard, strict=True)]
    new = [
        _METHODS[method](own, depth=place.depth, **more)
        for place, own, more in zip(places, standard, settings, strict=True)
    ]
    for place, layer in zip(places, new, strict=True):
        place.put(layer)
    if only_new:
        freeze_but_new(model)
    if isinstance(model, LanguageModel):
        halved: Any = {"num_heads": new[0].num_heads, "num_kv_heads": new[0].num_kv_heads} if method == "v1" else {}
        model.config = dataclasses.replace(model.config, variant=method, **halved)
    _rename(model, method)
    return model


def freeze_but_new(model: nn.Module, also: Sequence[str] = ()) -> None:
    """Leave nothing trainable in an adapted model but what is new: DEX's projections and lambdas, V1's lambda vectors
    and norms, V2's lambda projections and queries (the second lie in one matrix with the first).

    Args:
        model: what `adapt` made, or was loaded of it.
        also: further parts of its attention layers that stay trainable; DEX's paper has k_proj, v_proj and proj.

    Raises:
        ValueError: no adapted layer in it, or one without such a part.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, AttentionLayer) and layer.variant in _NEW]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer of {', '.join(_NEW)}: there is nothing new in it")
    for part in also:
        if not hasattr(layers[0], part):
            raise ValueError(f"also has {part!r}, and the layers' parts are {', '.join(layers[0]._modules)}")
    model.requires_grad_(False)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name.startswith(_NEW[layer.variant]) or name.partition(".")[0] in also)


def set_dex_schedule(model: nn.Module, init: float, learned: float) -> None:
    """Lambda of all DEX layers of a model: `init` times the layer's lambda_init plus `learned` times what it learns."""
    for module in model.modules():
        if isinstance(module, DexAttention):
            module.dex_schedule[0], module.dex_schedule[1] = init, learned


def set_dex_lambda(model: nn.Module, value: float) -> None:
    """Lambda of all DEX layers of a model, whatever they have learned."""
    for module in model.modules():
        if isinstance(module, DexAttention):
            module.dex_schedule[0], module.dex_schedule[1] = value / module.dex_lambda_init, 0.0


def merge_dex(model: nn.Module) -> nn.Module:
    """Every DEX layer as a standard one that computes the same, in place; returns the model."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, DexAttention):
                setattr(parent, name, module.merge())
    if isinstance(model, LanguageModel) and model.config.variant == DexAttention.variant:
        model.config = dataclasses.replace(model.config, variant=Attention.variant)
    return model


# ---- where attention is --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Place:
    """A block and its attention, the `depth`-th of its tower."""

    parent: nn.Module
    name: str
    depth: int
    block: str  # the block's name in the model

    @property
    def attention(self) -> nn.Module:
        return getattr(self.parent, self.name)

    def put(self, layer: AttentionLayer) -> None:
        block = self.attention
        if isinstance(block, ResidualAttentionBlock):
            layer.train(block.training)
            setattr(self.parent, self.name, TextBlock(block, layer, causal=False))  # its tower hands it the mask
        else:
            setattr(self.parent, self.name, layer.train(block.training))


def _places(model: nn.Module) -> Iterator[_Place]:
    for name, tower in model.named_modules():
        if isinstance(tower, nn.Sequential | nn.ModuleList) and name.rpartition(".")[2] in ("blocks", "resblocks"):
            for depth, block in enumerate(tower):
                if isinstance(block, TextBlock) and type(block.attn) is Attention:
                    yield _Place(block, "attn", depth, f"{name}.{depth}")
                elif type(block) is ResidualAttentionBlock:
                    yield _Place(tower, str(depth), depth, f"{name}.{depth}")
                elif type(getattr(block, "attn", None)) in (Attention, TimmAttention):
                    yield _Place(block, "attn", depth, f"{name}.{depth}")


def _nothing_to_change(model: nn.Module) -> str:
    name = type(model).__name__
    ours = {layer.variant for layer in model.modules() if isinstance(layer, AttentionLayer)}
    if ours:
        return (
            f"{name} has attention of {', '.join(sorted(ours))}: it is differential already, or none that can become so"
        )
    return f"{name} has no standard attention of timm, OpenCLIP or ours to change"


def _chosen(places: Sequence[_Place], heads: Heads | None) -> Callable[[_Place, Attention], Sequence[int]] | None:
    """The heads of a place, by name or by the caller's function; ValueError on names that are none of a block."""
    if heads is None or not isinstance(heads, Mapping):
        return heads and (lambda place, own: heads(place.depth, own))
    blocks = [place.block for place in places]
    for name in heads:
        if name not in blocks:
            raise ValueError(f"heads names {name!r}, and the blocks are {', '.join(blocks)}")
    return lambda place, own: heads.get(place.block, ())


def _rename(model: nn.Module, method: Method) -> None:
    """timm's models say what builds them, so that timm can save them and build them again."""
    for module in model.modules():
        part: Any = module
        config = getattr(part, "pretrained_cfg", None)
        if isinstance(module, VisionTransformer) and config and config.get("architecture") != ENTRYPOINT:
            built = {"base": config.get("architecture"), "method": method}
            part._model_args = {**getattr(part, "_model_args", {}), **built}
            part.pretrained_cfg = part.default_cfg = {**config, "architecture": ENTRYPOINT}


def _standard(module: nn.Module) -> Attention:
    """The standard layer of ours that a host's attention is; tensors are copies, or views of copies."""
    if isinstance(module, Attention):
        refuse_wrapped(q_proj=module.q_proj, k_proj=module.k_proj, v_proj=module.v_proj, proj=module.proj)
        return module
    if isinstance(module, TimmAttention):
        refuse_wrapped(qkv=module.qkv, proj=module.proj)
        return _of_timm(module)
    assert isinstance(module, ResidualAttentionBlock)
    refuse_wrapped(attn=module.attn, out_proj=module.attn.out_proj)
    return _of_torch(module)


def _of_timm(theirs: TimmAttention) -> Attention:
    more = [name for name in ("norm", "gate") if not isinstance(getattr(theirs, name, None), nn.Identity | None)]
    if more or theirs.proj.out_features != theirs.qkv.in_features:
        raise ValueError(
            f"timm's attention here has {', '.join(more) or 'another width at its end'}: V1 and V2 have none"
        )
    own = _layer(theirs.proj, theirs.qkv.in_features, theirs.num_heads, theirs.head_dim, theirs.qkv.bias is not None)
    _fill(own, theirs.qkv.weight.chunk(3), None if theirs.qkv.bias is None else theirs.qkv.bias.chunk(3), theirs.proj)
    own.q_norm, own.k_norm = cast(Any, theirs.q_norm), cast(Any, theirs.k_norm)
    own.attn_drop, own.proj_drop = theirs.attn_drop.p, theirs.proj_drop
    return own


def _of_torch(block: ResidualAttentionBlock) -> Attention:
    theirs = block.attn
    if hasattr(block, "ln_1_kv") or not theirs._qkv_same_embed_dim or theirs.bias_k is not None:
        raise ValueError("a block of cross-attention cannot be made differential: its keys are another sequence's")
    if not theirs.batch_first:
        raise ValueError("the tower's transformer has batch_first=False: make it with batch_first=True")
    out = theirs.out_proj
    own = _layer(out, out.in_features, theirs.num_heads, theirs.head_dim, theirs.in_proj_bias is not None)
    bias = theirs.in_proj_bias
    _fill(own, theirs.in_proj_weight.chunk(3), None if bias is None else bias.chunk(3), out)
    own.attn_drop = theirs.dropout
    return own


def _layer(proj: nn.Linear, width: int, heads: int, head_dim: int, bias: bool) -> Attention:
    made: Any = {"device": proj.weight.device, "dtype": proj.weight.dtype}
    return Attention(width, heads, head_dim=head_dim, qkv_bias=bias, proj_bias=proj.bias is not None, **made)


@torch.no_grad()
def _fill(own: AttentionLayer, weights: Any, biases: Any, proj: nn.Linear) -> None:
    for number, linear in enumerate((own.q_proj, own.k_proj, own.v_proj)):
        linear.weight.copy_(weights[number])
        if biases is not None:
            linear.bias.copy_(biases[number])
    own.proj.load_state_dict(proj.state_dict())


# ---- what becomes of it --------------------------------------------------------------------------------------------


def _again(own: Attention, kind: Any, num_heads: int, num_kv_heads: int, **settings: Any) -> Any:
    """A layer of another kind with the standard one's settings and its keys, values and output projection."""
    made = {"device": own.q_proj.weight.device, "dtype": own.q_proj.weight.dtype}
    biases = {"qkv_bias": own.q_proj.bias is not None, "proj_bias": own.proj.bias is not None}
    new = kind(
        own.q_proj.in_features, num_heads, num_kv_heads, head_dim=own.head_dim, attn_drop=own.attn_drop,
        rotary=own.rotary, **biases, **settings, **made,
    )  # fmt: skip
    new.q_norm, new.k_norm, new.proj_drop = own.q_norm, own.k_norm, own.proj_drop
    for name in ("k_proj", "v_proj", "proj"):
        setattr(new, name, getattr(own, name))
    return new


@torch.no_grad()
def _to_v2(own: Attention, depth: int) -> DiffAttentionV2:
    """Each query twice, lambda 1/2 (the sigmoid of zero), the output projection doubled: (A - A / 2) V 2 W = A V W."""
    new = _again(own, DiffAttentionV2, own.num_heads, own.num_kv_heads, head_norm=False)
    new.head_norm = own.head_norm
    for name, value in own.q_proj.named_parameters():
        twice = value.unflatten(0, (own.num_heads, 1, own.head_dim)).expand(-1, 2, -1, *value.shape[1:])
        getattr(new.q_proj, name).copy_(twice.flatten(0, 2))
    new.lambda_proj.weight.zero_()
    new.proj.weight *= 2
    return new


def _to_dex(own: Attention, depth: int, heads: Sequence[int] | None = None) -> DexAttention:
    new = _again(own, DexAttention, own.num_heads, own.num_kv_heads, depth=depth, heads=heads)
    new.q_proj, new.head_norm = own.q_proj, own.head_norm
    return new


def _to_v1(own: Attention, depth: int) -> DiffAttention:
    """Heads 2i and 2i + 1 become the two maps of head i, and their values its value."""
    if own.num_heads % 2 or own.num_kv_heads % 2:
        raise ValueError(
            f"method 'v1' pairs heads: {own.num_heads} and {own.num_kv_heads} key/value heads have no pairs"
        )
    new = _again(own, DiffAttention, own.num_heads // 2, own.num_kv_heads // 2, depth=depth)
    new.q_proj = own.q_proj
    return new


_METHODS: dict[str, Callable[..., AttentionLayer]] = {"v2": _to_v2, "dex": _to_dex, "v1": _to_v1}
_NEW = {"v2": ("lambda_proj", "q_proj"), "dex": ("dex",), "v1": ("lambda_", "head_norm")}
