"""Our timm models: vision transformers with any attention of `diffvision.nn.ATTENTION`, registered by name.

A model is timm's `VisionTransformer` with the block below. Only the attention differs, so all that timm does with its
models (features, resizing, checkpointing, layer decay, saving) works with these. A name is a family and a shape:

    diff_vit_<shape>     V1: half of the plain model's heads, of the same size     diff_vit_base_patch16_224
    diffv2_vit_<shape>   V2: as many heads, the MLP narrower by half a width       diffv2_vit_base_patch16_224
    plain_vit_<shape>    standard attention in the same block, their baseline      plain_vit_base_patch16_clip_224
    gda_vit_<shape>      grouped: V1's heads, several to a noise head               gda_vit_base_patch16_224
    dint_vit_<shape>     DINT: V1 whose rows sum to 1                               dint_vit_base_patch16_224
    vca_vit_<shape>      Visual-Contrast Attention: plain heads, a narrower MLP     vca_vit_base_patch16_224
    gated_vit_<shape>    plain attention with a sigmoid gate, a narrower MLP        gated_vit_base_patch16_224
    sink_vit_<shape>     plain attention with a learned sink for each head          sink_vit_base_patch16_224
    integral_vit_<shape> V1's heads with one softmax of the mean logits             integral_vit_base_patch16_224
    dna_vit_<shape>      DnA: a softmax of negated logits added, a narrower MLP     dna_vit_base_patch16_224
    coda_vit_<shape>     CoDA: V2 whose second queries are the first ones, rotated  coda_vit_base_patch16_224

`ALIASES` has short names, such as `diff_vit_base`. There is a plain baseline for each CLIP tower and
the debug models; that of `diff_vit_base_patch16_224` is timm's `vit_base_patch16_224`, the same function.

Besides timm's arguments, `timm.create_model` takes those of `ATTENTION_SETTINGS` and what the model's variants take
besides: numbers and strings, so that a saved model's configuration can hold them. `variant`, such as "v2_gated", gives
all layers another attention, with its matched heads and MLP. `variant_by_layer`, such as "4*standard", does so by depth
(`diffvision.models.by_layer`). `reg_tokens=4` is timm's: learned register tokens, which any of the models may have.
None has released weights: `pretrained=True` is a RuntimeError.
"""

from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.layers import LayerNorm, register_notrace_module
from timm.models import VisionTransformer, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from diffvision.models.bundled import bundled
from diffvision.models.by_layer import extra_queries, matched_heads, variants_by_layer
from diffvision.nn import (
    ATTENTION,
    GRID_ATTENTION,
    AttentionLayer,
    build_attention,
    settings_of,
)

__all__ = ["ALIASES", "ATTENTION_SETTINGS", "CLIP_SHAPES", "MODELS", "SHAPES", "SIZES", "Block", "model_names"]

ATTENTION_SETTINGS = (
    "num_kv_heads",
    "head_dim",
    "head_norm",
    "lambda_init",
    "rotary",
    "signal_ratio",
    "contrast_size",
    "joint",
    "gate",
    "variant_by_layer",
)
# Arguments of attention that `Block` passes on, and those that a vision transformer has no use of.
_OF_THE_BLOCK = {"dim", "num_heads", "depth", "qkv_bias", "qk_norm", "proj_bias", "attn_drop", "proj_drop", "device"}
_OF_THE_BLOCK |= {"dtype", "heads", "context_dim"}
_LAYERS = ChainMap[str, type[AttentionLayer]](GRID_ATTENTION, ATTENTION)

# torch.fx cannot follow the operation's checks of its arguments: to a tracer an attention layer is one node.
register_notrace_module(AttentionLayer)


class Block(TimmBlock):
    """timm's pre-norm block around an attention that a factory makes.

    Args:
        *args: of `timm.models.vision_transformer.Block`, as are the settings.
        attn_layer: called as `attn_layer(dim, num_heads, depth=, qkv_bias=, qk_norm=, proj_bias=, attn_drop=,
            proj_drop=, device=, dtype=)`, such as `partial(build_attention, "v1")`.
        depth: the block's index.
        scale_attn_norm: must be False; the attention's `head_norm` takes its place.
        **settings: as `*args`.

    Raises:
        ValueError: scale_attn_norm is True.
    """

    def __init__(
        self,
        *args: Any,
        attn_layer: Callable[..., nn.Module],
        depth: int = 0,
        scale_attn_norm: bool = False,
        **settings: Any,
    ) -> None:
        if scale_attn_norm:
            raise ValueError("scale_attn_norm must be False: use head_norm=True, a norm of each head's output")

        def create(cls: type, dim: int, num_heads: int, *, scale_norm: bool, norm_layer: Any, **own: Any) -> nn.Module:
            return attn_layer(dim, num_heads, depth=depth, **own)

        # timm's block wants a class, and passes the depth to its own differential attention alone.
        settings["attn_layer"] = type("Attention", (), {"__new__": create})
        super().__init__(*args, **settings)


class GridTransformer(VisionTransformer):
    """timm's `VisionTransformer` with attention over a grid, whose layers it tells the grid of patches.

    The arguments are those of `VisionTransformer`.

    Raises:
        ValueError: patch_drop_rate is not 0.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.patch_drop, nn.Identity):
            raise ValueError("Visual-Contrast Attention pools a whole grid: leave patch_drop_rate (patch dropout) at 0")
        self._set_grid(self.patch_embed.grid_size)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Change the resolution or the patch size, as timm's; the pooled tokens stay as many."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        self._set_grid(self.patch_embed.grid_size)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block's activations in the backward pass, as timm's.

        Raises:
            ValueError: enable is True in a model with dynamic_img_size, whose grid may have changed by then.
        """
        if enable and self.dynamic_img_size:
            raise ValueError("gradient checkpointing needs one grid, and dynamic_img_size changes it: choose one")
        super().set_grad_checkpointing(enable)

    def _pos_embed(self, x: Tensor) -> Tensor:
        if self.dynamic_img_size:  # x [B, h, w, dim]
            self._set_grid((x.shape[1], x.shape[2]))
        return super()._pos_embed(x)

    def _set_grid(self, grid: Any) -> None:
        for block in self.blocks:
            block.attn.set_grid(grid, self.num_prefix_tokens)  # type: ignore[union-attr, operator]

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return timm's names and the embeddings of the pooled tokens, which are positions as well."""
        own = {f"blocks.{index}.attn.contrast_embed" for index in range(len(self.blocks))}
        return super().no_weight_decay() | own


class Size(NamedTuple):
    """Width and depth of a plain ViT, its heads, and the heads of the V1 model that matches it."""

    width: int
    depth: int
    heads: int  # plain and V2
    diff_heads: int  # V1
    mlp_ratio: float = 4.0  # of plain and V1; V2's is 0.5 smaller, which makes up for its second queries


# Plain sizes: arXiv 2010.11929 table 1 (base, large, huge), 2012.12877 table 1 (tiny, small), timm's vit_so150m.
SIZES = {
    "debug": Size(64, 4, 4, 2),
    "tiny": Size(192, 12, 3, 3),  # V1: 3 heads of 32, since the plain model's 3 of 64 cannot be halved
    "small": Size(384, 12, 6, 3),
    "base": Size(768, 12, 12, 6),
    "large": Size(1024, 24, 16, 8),
    "huge": Size(1280, 32, 16, 8),  # heads of 80
    "so150m": Size(896, 18, 14, 7, mlp_ratio=2.572),
}


class Shape(NamedTuple):
    """A size at a patch size and default resolution (pixels), with the other settings of its name."""

    size: str
    patch: int
    image: int
    crop: float = 0.9  # the part of an image's edge that evaluation keeps
    settings: dict[str, Any] | None = None


_REG4 = {"class_token": False, "reg_tokens": 4, "no_embed_class": True, "global_pool": "avg"}
_SO_REG4 = {"class_token": False, "reg_tokens": 4, "global_pool": "avg", "fc_norm": False}

# timm's vit_<shape> has the same settings, except for the attention.
SHAPES = {
    "debug": Shape("debug", 8, 32, 1.0),
    "tiny_patch16_224": Shape("tiny", 16, 224),
    "tiny_patch16_384": Shape("tiny", 16, 384, 1.0),
    "tiny_patch16_reg4_gap_256": Shape("tiny", 16, 256, 0.95, _REG4),
    "small_patch32_224": Shape("small", 32, 224),
    "small_patch32_384": Shape("small", 32, 384, 1.0),
    "small_patch16_224": Shape("small", 16, 224),
    "small_patch16_384": Shape("small", 16, 384, 1.0),
    "small_patch16_reg4_gap_256": Shape("small", 16, 256, 0.95, _REG4),
    "base_patch32_224": Shape("base", 32, 224),
    "base_patch32_384": Shape("base", 32, 384, 1.0),
    "base_patch16_224": Shape("base", 16, 224),
    "base_patch16_384": Shape("base", 16, 384, 1.0),
    "base_patch16_reg4_gap_256": Shape("base", 16, 256, 0.95, _REG4),
    "base_patch8_224": Shape("base", 8, 224),
    "large_patch16_224": Shape("large", 16, 224),
    "large_patch16_384": Shape("large", 16, 384, 1.0),
    "large_patch14_224": Shape("large", 14, 224),
    "huge_patch14_224": Shape("huge", 14, 224),
    "so150m_patch16_224": Shape("so150m", 16, 224),
    "so150m_patch16_reg4_gap_256": Shape("so150m", 16, 256, 0.95, _SO_REG4),
    "so150m_patch16_reg4_gap_384": Shape("so150m", 16, 384, 1.0, _SO_REG4),
}
# Image towers as DiffCLIP's (arXiv 2503.06626 and its code): no norm before the blocks, LayerNorm's eps 1e-5, and one
# lambda_init for all layers, which variants without one do not read.
_CLIP = {"norm_layer": partial(LayerNorm, eps=1e-5), "lambda_init": 0.8}
_CLIP_DYNAMIC = {**_CLIP, "lambda_init": "depth"}
# For 64 channels timm's default of std 0.02 is too small to learn fast; its "jax" rule goes by the width.
_CLIP_DEBUG = {**_CLIP, "weight_init": "jax"}
# Departs from DiffCLIP's 0.8, which learns the colours of the demo's digits late where few captions name them; chosen
# on those digits (docs/benchmarks/demo.md).
_CLIP_DEBUG_02 = {**_CLIP_DEBUG, "lambda_init": 0.2}
CLIP_SHAPES = {
    "debug_clip": Shape("debug", 8, 32, 1.0, _CLIP_DEBUG),
    "small_patch16_clip_224": Shape("small", 16, 224, 1.0, _CLIP),
    "base_patch32_clip_224": Shape("base", 32, 224, 1.0, _CLIP),
    "base_patch16_clip_224": Shape("base", 16, 224, 1.0, _CLIP),
    "large_patch14_clip_224": Shape("large", 14, 224, 1.0, _CLIP),
}


# Signal heads per noise head, for shapes with enough heads for a ratio of the paper (arXiv 2510.06949), and for debug.
GROUPED = {
    "debug": 2,
    "small_patch16_224": 3,
    "base_patch16_224": 3,
    "base_patch16_384": 3,
    "large_patch16_224": 4,
    "large_patch14_224": 4,
    "huge_patch14_224": 4,
    "debug_clip": 2,
    "base_patch16_clip_224": 3,
}


# The shapes of dint_vit_* and vca_vit_*, and with a small CLIP tower of the cures for attention noise.
FEW_SHAPES = (
    "debug",
    "tiny_patch16_224",
    "small_patch16_224",
    "base_patch16_224",
    "debug_clip",
    "base_patch16_clip_224",
)


class Model(NamedTuple):
    """The meaning of a registered name: the variant, a key of `ATTENTION` or "vca", and a shape."""

    variant: str
    shape: Shape


def _contrast(shape: Shape) -> Shape:
    """Return a shape for Visual-Contrast Attention, with as many parameters as the plain model's.

    Queries are pooled to half of the grid, at least to 2 x 2, which is n tokens. A block's embeddings of them,
    convolution, norms and lambdas have as many parameters as n + 6 units of its MLP (within 1 unit for all sizes), and
    the MLP is so much narrower. Half a unit more is for rounding down.
    """
    size = SIZES[shape.size]
    contrast = max(2, shape.image // shape.patch // 2)
    mlp_ratio = size.mlp_ratio - (contrast**2 + 5.5) / size.width
    settings = {"contrast_size": contrast, "lambda_init": "depth", "mlp_ratio": mlp_ratio}
    return shape._replace(settings={**(shape.settings or {}), **settings})


_ALL = SHAPES | CLIP_SHAPES
MODELS = {
    **{f"diff_vit_{name}": Model("v1", shape) for name, shape in _ALL.items()},
    **{f"diffv2_vit_{name}": Model("v2", shape) for name, shape in _ALL.items()},
    **{f"plain_vit_{name}": Model("standard", shape) for name, shape in CLIP_SHAPES.items()},
    **{
        f"gda_vit_{name}": Model(
            "gda", shape._replace(settings={**(shape.settings or {}), "signal_ratio": GROUPED[name]})
        )
        for name, shape in _ALL.items()
        if name in GROUPED
    },
    **{f"dint_vit_{name}": Model("v1_dint", _ALL[name]) for name in FEW_SHAPES},
    **{f"vca_vit_{name}": Model("vca", _contrast(_ALL[name])) for name in FEW_SHAPES},
    **{
        f"{cure}_vit_{name}": Model(cure, _ALL[name])
        for cure in ("gated", "sink", "integral", "dna", "coda")
        for name in (*FEW_SHAPES, "small_patch16_clip_224")
    },
    "plain_vit_debug": Model("standard", SHAPES["debug"]),
    "diff_vit_base_patch16_clip_dynamic_224": Model("v1", Shape("base", 16, 224, 1.0, _CLIP_DYNAMIC)),
    "diff_vit_debug_clip_lambda02": Model("v1", Shape("debug", 8, 32, 1.0, _CLIP_DEBUG_02)),
}

ALIASES = {
    **{
        f"{family}_vit_{size}": f"{family}_vit_{size}_patch{14 if size == 'huge' else 16}_224"
        for family in ("diff", "diffv2")
        for size in SIZES
        if size != "debug"
    },
    **{
        f"{family}_vit_{size}": f"{family}_vit_{size}_patch16_224"
        for family in ("dint", "vca", "gated", "sink", "integral", "dna", "coda")
        for size in ("tiny", "small", "base")
    },
}
MODELS |= {short: MODELS[name] for short, name in ALIASES.items()}


def model_names() -> list[str]:
    """Return our models' names in timm, sorted."""
    return sorted(MODELS)


def _default_cfg(name: str, shape: Shape) -> dict[str, Any]:
    """Return timm's `default_cfg` of a model, which timm and its users read before the model is built."""
    is_clip = "_clip" in name
    return {
        "url": "",  # no weights
        "num_classes": 1000,
        "input_size": (3, shape.image, shape.image),
        "fixed_input_size": True,
        "pool_size": None,
        "crop_pct": shape.crop,
        "interpolation": "bicubic",
        "mean": OPENAI_CLIP_MEAN if is_clip else IMAGENET_INCEPTION_MEAN,
        "std": OPENAI_CLIP_STD if is_clip else IMAGENET_INCEPTION_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
    }


def _default_cfgs() -> dict[str, Any]:
    """Return the `default_cfg` of each NAME, or of NAME.TAG where the package has weights."""
    cfgs: dict[str, Any] = {}
    for name, model in MODELS.items():
        cfg = _default_cfg(name, model.shape)
        tags = bundled(name)
        about = {**cfg, "num_classes": 10, "license": None}  # an export would give it to any weights of the model
        cfgs |= {f"{name}.{tag}": {**about, "file": str(file)} for tag, file in tags.items()}
        if not tags:
            cfgs[name] = cfg
    return cfgs


def _create(name: str, pretrained: bool, **kwargs: Any) -> VisionTransformer:
    """Build a model of `MODELS`; kwargs are those of timm's VisionTransformer, its builder and ATTENTION_SETTINGS."""
    variant, shape = MODELS[name]
    size = SIZES[shape.size]
    if _LAYERS[variant].needs_grid and (given := {"variant", "variant_by_layer"} & kwargs.keys()):
        raise TypeError(f"{name} has {variant!r} attention in all layers, which takes no {given.pop()}: leave it out")
    variant, by_layer = kwargs.pop("variant", variant), kwargs.pop("variant_by_layer", None)
    if variant not in ATTENTION and not _LAYERS[MODELS[name].variant].needs_grid:
        raise ValueError(f"variant is {variant!r}: choose one of {', '.join(ATTENTION)}")
    kind = _LAYERS[variant]
    variants = [variant] if kind.needs_grid else variants_by_layer(by_layer, variant, kwargs.get("depth", size.depth))
    # A shape's settings serve all variants; a setting that a user gives must be one of this model's.
    takes = set().union(*(settings_of(_LAYERS[one]) for one in variants))
    if useless := {key for key in ATTENTION_SETTINGS if key in kwargs} - takes:
        names = " and ".join(map(repr, dict.fromkeys(variants)))
        values = ", ".join(f"{key}={kwargs[key]!r}" for key in sorted(useless))
        raise TypeError(f"{name} has {names} attention, which takes no {values}: leave it out")
    more = 0 if kind.needs_grid else extra_queries(variant, "standard", gate=kwargs.get("gate"))
    settings = {
        "patch_size": shape.patch,
        "embed_dim": size.width,
        "depth": size.depth,
        "num_heads": size.diff_heads if kind.value_maps == 2 else size.heads,
        "mlp_ratio": size.mlp_ratio - 0.5 * more,
        **(shape.settings or {}),
        **kwargs,
    }
    own = (takes - _OF_THE_BLOCK) | {*ATTENTION_SETTINGS}
    attention = {key: settings.pop(key) for key in [*settings] if key in own}
    attn_layer: Callable[..., nn.Module]
    if kind.needs_grid:
        attn_layer = partial(kind, **attention)
    else:
        attn_layer = partial(_attention_of_layer, variants, variant, **attention)
    return build_model_with_cfg(
        GridTransformer if kind.needs_grid else VisionTransformer,
        name,
        pretrained,
        pretrained_filter_fn=filter_weights,
        feature_cfg={"out_indices": settings.pop("out_indices", 3), "feature_cls": "getter"},
        block_fn=Block if by_layer is None else partial(_block_of_layer, variants, variant, kwargs.get("gate")),
        attn_layer=attn_layer,
        **settings,
    )


def filter_weights(state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """Apply timm's filter, which counts registers as positions, to weights with as many registers as the model."""
    registers = state_dict.get("reg_token")
    count = 0 if registers is None else registers.shape[1]
    if "pos_embed" in state_dict and count != model.num_reg_tokens:
        raise ValueError(f"reg_tokens must be {count}, as in the weights, got {model.num_reg_tokens}")
    return checkpoint_filter_fn(state_dict, model)


def _attention_of_layer(
    variants: Sequence[str],
    variant: str,
    dim: int,
    num_heads: int,
    *,
    depth: int,
    num_kv_heads: int | None = None,
    **settings: Any,
) -> AttentionLayer:
    """Build the attention of a layer, with heads counted for the model's variant."""
    heads, kv_heads = matched_heads(variants[depth], variant, num_heads, num_kv_heads)
    return build_attention(variants[depth], dim, heads, kv_heads, depth=depth, **settings)


def _block_of_layer(
    variants: Sequence[str], variant: str, gate: str | None, *args: Any, depth: int, mlp_ratio: float, **settings: Any
) -> Block:
    """Build the block of a layer, with the MLP's width given for the model's variant."""
    mlp_ratio -= 0.5 * extra_queries(variants[depth], variant, gate=gate)
    return Block(*args, depth=depth, mlp_ratio=mlp_ratio, **settings)


def _register(name: str) -> None:
    """Register a model with timm by a function of that name in this module, as timm's decorator expects."""

    def create(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
        return _create(name, pretrained, **kwargs)

    create.__name__ = create.__qualname__ = name
    globals()[name] = register_model(create)


# timm looks for this name in the module when a function is registered.
default_cfgs = generate_default_cfgs(_default_cfgs())
for _name in MODELS:
    _register(_name)
