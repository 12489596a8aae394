"""Conversion of pretrained models to differential attention that compute the same function before further training.

Layers are replaced in place; timm builds such a model again by the name in `adapted.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import torch
from open_clip.transformer import ResidualAttentionBlock
from timm.layers import Attention as TimmAttention
from timm.models import VisionTransformer
from torch import nn

from diffvision.models.by_layer import as_text
from diffvision.models.clip import TextBlock
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.names import Method
from diffvision.nn import Attention, AttentionLayer, DexAttention, DiffAttention, DiffAttentionV2
from diffvision.nn.linear import refuse_wrapped

Heads = Mapping[str, Sequence[int]] | Callable[[int, Attention], Sequence[int]]
"""A block's name -> its heads, or (index of the layer, its attention) -> its heads."""
ENTRYPOINT = "adapted_vit"  # timm's name of an adapted VisionTransformer


def adapt(model: nn.Module, method: Method = "v2", *, heads: Heads | None = None, only_new: bool = False) -> nn.Module:
    """Make the attention of a pretrained model differential, in place, and return the model.

    | method | the new layer | at first it computes |
    |---|---|---|
    | "v2" | DIFF V2: its second query a copy of the first, lambda 0.5, the output projection doubled | the same |
    | "dex" | its heads' outputs less lambda times a projection of them, which is zero (arXiv 2505.16333) | the same |
    | "v1" | DIFF V1 by taking heads in pairs, lambda by depth, for comparison | something else |

    "v2" and "dex" give every new matrix a gradient from the first step. For "dex" this needs a lambda above zero, which
    the default (the layer's lambda_init) and the paper's `diffvision.training.callbacks.LambdaAnnealing` give.

    A timm model can be saved afterwards (`timm.models.save_for_hf`), and `timm.create_model("local-dir:...")` builds it
    again. A `LanguageModel` can be saved by `language.save`, and `diffvision adapt` also saves OpenCLIP models.

    Args:
        model: a timm `VisionTransformer` with standard attention, an OpenCLIP model (both towers, where they have it),
            a `LanguageModel` of the standard variant, whose `config` is changed as well, or a BERT encoder of
            transformers (`BertModel`, `BertForMaskedLM`, ...), whose class becomes one of `diffvision.models.bert`.
        method: "v2", "dex" or "v1".
        heads: for "dex", which heads of a layer are changed, such as those of the paper's choice,
            `diffvision.analysis.heads.highest_entropy`; all by default.
        only_new: freeze all but the new parameters, as `freeze_but_new` does.

    Raises:
        ValueError: there is no standard attention, or it has further parts (gates, norms of all heads, cross-attention,
            adapters such as LoRA), only some layers of a tower have it, or for "v1" the number of heads is odd.
    """
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}: choose one of {', '.join(get_args(Method))}")
    if heads is not None and method != "dex":
        raise ValueError(f"heads are chosen for method 'dex'; {method!r} changes all")
    slots = list(_attention_slots(model))
    if not slots:
        raise ValueError(_no_standard_attention(model))
    bert = _bert(model)
    if bert and type(model) not in (*bert.CLASSES, *bert.CLASSES.values()):
        known = ", ".join(kind.__name__ for kind in bert.CLASSES)
        raise ValueError(f"{type(model).__name__} is not adapted, since it could not be saved: give one of {known}")
    if bert:
        bert.check_attention(model)
    _refuse_mixed(model, slots)
    choose = _head_choice(slots, heads)
    standard = [_standard(slot.attention) for slot in slots]  # all, before any is changed
    settings = [{"heads": choose(slot, layer)} if choose else {} for slot, layer in zip(slots, standard, strict=True)]
    new = [
        _METHODS[method](layer, depth=slot.depth, **more)
        for slot, layer, more in zip(slots, standard, settings, strict=True)
    ]
    for slot, layer in zip(slots, new, strict=True):
        slot.put(layer)
    if only_new:
        freeze_but_new(model)
    if isinstance(model, LanguageModel):
        halved: Any = {"num_heads": new[0].num_heads, "num_kv_heads": new[0].num_kv_heads} if method == "v1" else {}
        model.config = dataclasses.replace(model.config, variant=method, **halved)
    _rename(model, method)
    if bert:
        bert.become_adapted(model, method)
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
    layers = [layer for layer in model.modules() if isinstance(layer, AttentionLayer) and layer.variant in _NEW]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer of {', '.join(_NEW)}, so no new parameters: adapt it first"
        )
    for part in also:
        if not hasattr(layers[0], part):
            raise ValueError(f"also has {part!r}, and the layers' parts are {', '.join(layers[0]._modules)}")
    model.requires_grad_(False)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name.startswith(_NEW[layer.variant]) or name.partition(".")[0] in also)


def set_dex_schedule(model: nn.Module, init: float, learned: float) -> None:
    """Set lambda of all DEX layers to `init` times the layer's lambda_init plus `learned` times its learned part."""
    for module in model.modules():
        if isinstance(module, DexAttention):
            module.dex_schedule[0], module.dex_schedule[1] = init, learned


def set_dex_lambda(model: nn.Module, value: float) -> None:
    """Set lambda of all DEX layers of a model to a value, without their learned parts."""
    for module in model.modules():
        if isinstance(module, DexAttention):
            module.dex_schedule[0], module.dex_schedule[1] = value / module.dex_lambda_init, 0.0


def merge_dex(model: nn.Module) -> nn.Module:
    """Replace every DEX layer by a standard one that computes the same, in place, and return the model."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, DexAttention):
                setattr(parent, name, module.merge())
    if isinstance(model, LanguageModel):
        variants = [_merged(layer.variant) for layer in model.config.layers()]
        variant = _merged(model.config.variant)
        by_layer = as_text(variants, variant)
        model.config = dataclasses.replace(model.config, variant=variant, variant_by_layer=by_layer)
    if (bert := _bert(model)) and type(model) in bert.CLASSES.values():
        bert.become_standard(model)
    return model


def _merged(variant: str) -> str:
    return Attention.variant if variant == DexAttention.variant else variant


# ---- finding the attention -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The location of a block's attention: attribute `name` of `parent`, in the `depth`-th block of a tower."""

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
            setattr(self.parent, self.name, TextBlock(block, layer, causal=False))  # its tower passes the mask
        elif bert := _bert(block):
            bert.put(block, layer)
        else:
            setattr(self.parent, self.name, layer.train(block.training))


def _bert(module: nn.Module) -> Any:
    """Return `diffvision.models.bert` for a BERT of transformers' or its attention, else None.

    transformers, which may be missing, is imported there, and is imported already where there is such a module.
    """
    origins = {kind.__module__ for kind in type(module).__mro__}
    is_bert = "transformers.models.bert.modeling_bert" in origins
    return importlib.import_module("diffvision.models.bert") if is_bert else None


def _attention_slots(model: nn.Module) -> Iterator[_Slot]:
    if bert := _bert(model):
        for depth, name, layer in bert.unadapted_layers(model):
            yield _Slot(layer, "attention", depth, name)
        return
    for name, tower in model.named_modules():
        if isinstance(tower, nn.Sequential | nn.ModuleList) and name.rpartition(".")[2] in ("blocks", "resblocks"):
            for depth, block in enumerate(tower):
                if isinstance(block, TextBlock) and type(block.attn) is Attention:
                    yield _Slot(block, "attn", depth, f"{name}.{depth}")
                elif type(block) is ResidualAttentionBlock:
                    yield _Slot(tower, str(depth), depth, f"{name}.{depth}")
                elif type(getattr(block, "attn", None)) in (Attention, TimmAttention):
                    yield _Slot(block, "attn", depth, f"{name}.{depth}")


def _refuse_mixed(model: nn.Module, slots: Sequence[_Slot]) -> None:
    """Raise a ValueError for a tower in which only some layers are standard, as with `variant_by_layer`."""
    towers = {slot.block.rpartition(".")[0] for slot in slots}
    standard = {slot.block for slot in slots}
    for name, layer in model.named_modules():
        block = name.rpartition(".")[0]
        if isinstance(layer, AttentionLayer) and block.rpartition(".")[0] in towers and block not in standard:
            raise ValueError(
                f"{block} has attention of {layer.variant} already and {slots[0].block} standard attention: the layers "
                "of a tower are adapted together; start from a model without variant_by_layer"
            )


def _no_standard_attention(model: nn.Module) -> str:
    name = type(model).__name__
    ours = {layer.variant for layer in model.modules() if isinstance(layer, AttentionLayer)}
    if ours:
        return f"{name} has attention of {', '.join(sorted(ours))}: it is differential already, or cannot become so"
    return f"{name} has no standard attention of timm, OpenCLIP or ours to change"


def _head_choice(slots: Sequence[_Slot], heads: Heads | None) -> Callable[[_Slot, Attention], Sequence[int]] | None:
    """Return a function that chooses the heads of a layer, or None for all; ValueError for an unknown block's name."""
    if heads is None or not isinstance(heads, Mapping):
        return heads and (lambda slot, layer: heads(slot.depth, layer))
    blocks = [slot.block for slot in slots]
    for name in heads:
        if name not in blocks:
            raise ValueError(f"heads names {name!r}, and the blocks are {', '.join(blocks)}")
    return lambda slot, layer: heads.get(slot.block, ())


def _rename(model: nn.Module, method: Method) -> None:
    """Set the architecture of timm's models, so that timm can save them and build them again."""
    for module in model.modules():
        part: Any = module
        config = getattr(part, "pretrained_cfg", None)
        if isinstance(module, VisionTransformer) and config and config.get("architecture") != ENTRYPOINT:
            built = {"base": config.get("architecture"), "method": method}
            part._model_args = {**getattr(part, "_model_args", {}), **built}
            part.pretrained_cfg = part.default_cfg = {**config, "architecture": ENTRYPOINT}


def _standard(module: nn.Module) -> Attention:
    """Return a host's attention as a standard layer of ours; tensors are copies, or views of copies."""
    if isinstance(module, Attention):
        refuse_wrapped(q_proj=module.q_proj, k_proj=module.k_proj, v_proj=module.v_proj, proj=module.proj)
        return module
    if isinstance(module, TimmAttention):
        refuse_wrapped(qkv=module.qkv, proj=module.proj)
        return _of_timm(module)
    if bert := _bert(module):
        return bert.standard_of(module)
    assert isinstance(module, ResidualAttentionBlock)
    refuse_wrapped(attn=module.attn, out_proj=module.attn.out_proj)
    return _of_torch(module)


def _of_timm(theirs: TimmAttention) -> Attention:
    more = [name for name in ("norm", "gate") if not isinstance(getattr(theirs, name, None), nn.Identity | None)]
    if more or theirs.proj.out_features != theirs.qkv.in_features:
        raise ValueError(f"timm's attention here has {', '.join(more) or 'another output width'}: V1 and V2 have none")
    layer = _layer(theirs.proj, theirs.qkv.in_features, theirs.num_heads, theirs.head_dim, theirs.qkv.bias is not None)
    _fill(layer, theirs.qkv.weight.chunk(3), None if theirs.qkv.bias is None else theirs.qkv.bias.chunk(3), theirs.proj)
    layer.q_norm, layer.k_norm = cast(Any, theirs.q_norm), cast(Any, theirs.k_norm)
    layer.attn_drop, layer.proj_drop = theirs.attn_drop.p, theirs.proj_drop
    return layer


def _of_torch(block: ResidualAttentionBlock) -> Attention:
    theirs = block.attn
    if hasattr(block, "ln_1_kv") or not theirs._qkv_same_embed_dim or theirs.bias_k is not None:
        raise ValueError("a block of cross-attention cannot be made differential: its keys are another sequence's")
    if not theirs.batch_first:
        raise ValueError("the tower's transformer has batch_first=False: make it with batch_first=True")
    out = theirs.out_proj
    layer = _layer(out, out.in_features, theirs.num_heads, theirs.head_dim, theirs.in_proj_bias is not None)
    bias = theirs.in_proj_bias
    _fill(layer, theirs.in_proj_weight.chunk(3), None if bias is None else bias.chunk(3), out)
    layer.attn_drop = theirs.dropout
    return layer


def _layer(proj: nn.Linear, width: int, heads: int, head_dim: int, bias: bool) -> Attention:
    made: Any = {"device": proj.weight.device, "dtype": proj.weight.dtype}
    return Attention(width, heads, head_dim=head_dim, qkv_bias=bias, proj_bias=proj.bias is not None, **made)


@torch.no_grad()
def _fill(layer: AttentionLayer, weights: Any, biases: Any, proj: nn.Linear) -> None:
    for number, linear in enumerate((layer.q_proj, layer.k_proj, layer.v_proj)):
        linear.weight.copy_(weights[number])
        if biases is not None:
            linear.bias.copy_(biases[number])
    layer.proj.load_state_dict(proj.state_dict())


# ---- the new layers --------------------------------------------------------------------------------------------------


def _like(layer: Attention, kind: Any, num_heads: int, num_kv_heads: int, **settings: Any) -> Any:
    """Make a layer of another kind with the standard one's settings, keys, values and output projection."""
    made = {"device": layer.q_proj.weight.device, "dtype": layer.q_proj.weight.dtype}
    biases = {"qkv_bias": layer.q_proj.bias is not None, "proj_bias": layer.proj.bias is not None}
    new = kind(
        layer.q_proj.in_features, num_heads, num_kv_heads, head_dim=layer.head_dim, attn_drop=layer.attn_drop,
        rotary=layer.rotary, context_dim=layer.context_dim, **biases, **settings, **made,
    )  # fmt: skip
    new.q_norm, new.k_norm, new.proj_drop = layer.q_norm, layer.k_norm, layer.proj_drop
    for name in ("k_proj", "v_proj", "proj"):
        setattr(new, name, getattr(layer, name))
    return new


@torch.no_grad()
def _to_v2(layer: Attention, depth: int) -> DiffAttentionV2:
    """Make a V2 layer of the same function: queries copied, lambda 1/2 (sigmoid of 0), projection doubled.

    It computes (A - A / 2) V 2 W = A V W.
    """
    new = _like(layer, DiffAttentionV2, layer.num_heads, layer.num_kv_heads, head_norm=False)
    new.head_norm = layer.head_norm
    for name, value in layer.q_proj.named_parameters():
        twice = value.unflatten(0, (layer.num_heads, 1, layer.head_dim)).expand(-1, 2, -1, *value.shape[1:])
        getattr(new.q_proj, name).copy_(twice.flatten(0, 2))
    new.lambda_proj.weight.zero_()
    new.proj.weight *= 2
    return new


def _to_dex(layer: Attention, depth: int, heads: Sequence[int] | None = None) -> DexAttention:
    new = _like(layer, DexAttention, layer.num_heads, layer.num_kv_heads, depth=depth, heads=heads)
    new.q_proj, new.head_norm = layer.q_proj, layer.head_norm
    return new


def _to_v1(layer: Attention, depth: int) -> DiffAttention:
    """Make a V1 layer: heads 2i and 2i + 1 become the two maps of head i, and their values its value."""
    if layer.num_heads % 2 or layer.num_kv_heads % 2:
        raise ValueError(
            f"method 'v1' pairs heads: {layer.num_heads} and {layer.num_kv_heads} key/value heads have no pairs; "
            "use method 'v2' or 'dex'"
        )
    new = _like(layer, DiffAttention, layer.num_heads // 2, layer.num_kv_heads // 2, depth=depth)
    new.q_proj = layer.q_proj
    return new


_METHODS: dict[str, Callable[..., AttentionLayer]] = {"v2": _to_v2, "dex": _to_dex, "v1": _to_v1}
_NEW = {"v2": ("lambda_proj", "q_proj"), "dex": ("dex",), "v1": ("lambda_", "head_norm")}
