"""Our OpenCLIP models: their registration, and OpenCLIP's towers with any attention of `diffvision.nn.ATTENTION`.

OpenCLIP takes a timm image tower by name, but has no hook for the towers that it builds: for an unknown `block_type` it
silently builds its default block. So `patch` wraps the two functions that build towers, and
`text_cfg.block_type = "diffvision:<variant>[:key=value,...]"` (a string that OpenCLIP's schema already has) selects the
attention of the blocks: `"diffvision:v1:lambda_init=0.8"`, `"diffvision:standard"`, `"diffvision:v2"`.
`text_cfg.heads` is the number of differential heads. `vision_cfg.block_type` does the same for OpenCLIP's image tower,
where `head_width` is the width of a differential head's output. Other towers are built as before.

Without this package the same configuration builds plain blocks, and loading our weights into them fails on their names.

The tags of released weights, and what is done with the files that they download, are in `released`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import open_clip.pretrained
import torch
from open_clip.transformer import ResidualAttentionBlock, TextTransformer
from torch import Tensor, nn

from diffvision.models.clip_configs import CONFIGS
from diffvision.models.released import TAGS, wrap_download
from diffvision.nn import ATTENTION, build_attention, settings_of

_PREFIX = "diffvision"
# The settings that the tower decides, and the fields that only OpenCLIP's custom block (which ours replaces) reads.
_TOWER_SETTINGS = {"dim", "num_heads", "depth", "heads", "context_dim", "device", "dtype"}
_CUSTOM_BLOCK_FIELDS = ("qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")


class TextBlock(ResidualAttentionBlock):
    """OpenCLIP's pre-norm block with another attention; norms, MLP and layer scales are those of `block`.

    It is a subclass, since OpenCLIP checkpoints, locks and shards text towers by that class.

    Args:
        block: the block to take norms, MLP and layer scales from; its attention is dropped.
        attn: a class of `diffvision.nn.ATTENTION`.
        causal: whether, in a call without a mask, each token attends to itself and those before it, or to all.
    """

    def __init__(self, block: ResidualAttentionBlock, attn: nn.Module, causal: bool) -> None:
        nn.Module.__init__(self)  # the parent's constructor would build all the parts once more
        self.ln_1, self.attn, self.ls_1 = block.ln_1, attn, block.ls_1
        self.ln_2, self.mlp, self.ls_2 = block.ln_2, block.mlp, block.ls_2
        self.causal = causal

    def attention(
        self, q_x: Tensor, k_x: Tensor | None = None, v_x: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Compute self-attention over q_x [B, L, width].

        Args:
            q_x: tokens.
            k_x: must be None, like `v_x`: there is no cross-attention.
            v_x: must be None.
            attn_mask: additive mask, [L, L] or [B * heads, L, L], that replaces `causal`.

        Raises:
            ValueError: k_x or v_x is not None, or the mask is boolean.
        """
        if k_x is not None or v_x is not None:
            raise ValueError("a diffvision text block is self-attention: it takes no k_x or v_x")
        if attn_mask is None:
            return self.attn(q_x, is_causal=self.causal)
        if attn_mask.dtype == torch.bool:
            raise ValueError(
                "attn_mask is boolean, whose meaning differs within torch: give an additive mask, 0 to attend and "
                "-inf not to"
            )
        if attn_mask.ndim == 3:
            attn_mask = attn_mask.unflatten(0, (q_x.shape[0], -1))  # len() would fix the batch of an export
            if attn_mask.shape[1] != self.attn.num_heads:  # the tower repeats a row's mask for the heads that it counts
                attn_mask = attn_mask[:, :1]
        return self.attn(q_x, attn_mask=attn_mask.to(q_x.dtype))


def parse_block_type(block_type: str) -> tuple[str, dict[str, Any]]:
    """Parse `"diffvision:v1:lambda_init=0.8"` to `("v1", {"lambda_init": 0.8})`.

    Values are read as JSON (`0.8`, `true`, `null`), and others as strings (`depth`).

    Raises:
        ValueError: the variant is unknown, or a setting is not one of the variant's or is set by the tower.
    """
    _, _, rest = block_type.partition(":")
    variant, _, listing = rest.partition(":")
    if variant not in ATTENTION:
        raise ValueError(f"block_type {block_type!r}: unknown variant {variant!r}; choose one of {sorted(ATTENTION)}")
    known = sorted(settings_of(ATTENTION[variant]) - _TOWER_SETTINGS)
    settings = {}
    for item in listing.split(",") if listing else []:
        key, equals, value = item.partition("=")
        if not equals or key not in known:
            raise ValueError(f"block_type {block_type!r}: {item!r} is no setting of {variant!r}; it takes {known}")
        try:
            settings[key] = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            settings[key] = value
    return variant, settings


def _use_attention(transformer: Any, heads: int, variant: str, settings: dict[str, Any], causal: bool = False) -> None:
    """Replace the attention of every block of a tower's transformer."""
    for depth, block in enumerate(transformer.resblocks):
        try:
            attn = build_attention(variant, transformer.width, heads, depth=depth, **{"qkv_bias": True, **settings})
        except TypeError as error:  # a value of the wrong kind, such as head_dim=wide
            raise ValueError(f"block_type has settings {settings} of {variant!r}: {error}") from error
        transformer.resblocks[depth] = TextBlock(block, attn, causal)


def _use_text_attention(tower: TextTransformer, variant: str, settings: dict[str, Any]) -> None:
    """Replace the attention of a text tower, initialised by OpenCLIP's rule for text towers."""
    transformer = tower.transformer
    causal = _has_causal_mask(tower)
    if causal:
        # The blocks apply causality themselves, so that kernels use their causal path instead of a float mask.
        # OpenCLIP itself sets this buffer to None as well (no_causal_mask).
        tower.attn_mask = None
    in_std = transformer.width**-0.5
    out_std = in_std * (2 * transformer.layers) ** -0.5
    _use_attention(transformer, tower.heads, variant, settings, causal)
    for block in transformer.resblocks:
        for linear in (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj, block.attn.proj):
            nn.init.normal_(linear.weight, std=out_std if linear is block.attn.proj else in_std)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


def _has_causal_mask(tower: TextTransformer) -> bool:
    """Return whether the tower's blocks always get the causal mask.

    The mask of a tower with a class token depends on the batch, so such towers keep theirs.
    """
    mask = tower.attn_mask
    if mask is None or tower.cls_emb is not None:
        return False
    if mask.is_meta:  # no values to compare: OpenCLIP builds a causal mask or none
        return True
    return torch.equal(mask, torch.full_like(mask, float("-inf")).triu(1))


def _wrap_text(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return OpenCLIP's builder of text towers, which then also takes our attention by `block_type`."""

    @functools.wraps(build)
    def build_text_tower(embed_dim, text_cfg, quick_gelu=False, cast_dtype=None):
        cfg = open_clip.CLIPTextCfg(**text_cfg) if isinstance(text_cfg, dict) else text_cfg
        requested = _requested_attention(cfg, "text_cfg", cfg.hf_model_name)
        tower = build(embed_dim, cfg, quick_gelu, cast_dtype)
        if requested is not None:
            _use_text_attention(tower, *requested)
        return tower

    return build_text_tower


def _wrap_vision(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return OpenCLIP's builder of vision towers, which then also takes our attention by `block_type`."""

    @functools.wraps(build)
    def build_vision_tower(embed_dim, vision_cfg, quick_gelu=False, cast_dtype=None):
        cfg = open_clip.CLIPVisionCfg(**vision_cfg) if isinstance(vision_cfg, dict) else vision_cfg
        other = "a ResNet" if isinstance(cfg.layers, list | tuple) else cfg.timm_model_name
        requested = _requested_attention(cfg, "vision_cfg", other)
        tower: Any = build(embed_dim, cfg, quick_gelu, cast_dtype)
        if requested is not None:
            _use_attention(tower.transformer, cfg.width // cfg.head_width, *requested)
        return tower

    return build_vision_tower


def _wrap_tokenizer(get: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap open_clip.get_tokenizer so that bpe_path `diffvision:FILE` resolves to a file in this package.

    A configuration cannot name a file of an installed package, whose path differs between machines.
    """

    @functools.wraps(get)
    def get_tokenizer(model_name="", context_length=None, cache_dir=None, **kwargs):
        config = (open_clip.get_model_config(model_name) if model_name else None) or {}
        settings = (config.get("text_cfg") or {}).get("tokenizer_kwargs") or {}
        prefix, colon, file = str(settings.get("bpe_path", "")).partition(":")
        if prefix == _PREFIX and colon:
            kwargs = {"bpe_path": str(Path(__file__).with_name(Path(file).name)), **kwargs}
        return get(model_name, context_length, cache_dir, **kwargs)

    return get_tokenizer


def _requested_attention(cfg: Any, name: str, other: str | None) -> tuple[str, dict[str, Any]] | None:
    """Return the variant and settings that a tower's `block_type` names; None if it is not a `diffvision:` type.

    Raises:
        ValueError: the tower is `other`, not of OpenCLIP's transformers, or has settings that our blocks do not read.
    """
    block_type = cfg.block_type or ""
    if block_type.partition(":")[0] != _PREFIX:
        return None
    if other:
        raise ValueError(f"block_type {block_type!r} is for OpenCLIP's transformers: leave it out for {other}")
    if custom := [field for field in _CUSTOM_BLOCK_FIELDS if getattr(cfg, field)]:
        raise ValueError(
            f"{name} sets {custom}, which block_type {block_type!r} does not read: put the variant's "
            "settings into block_type"
        )
    return parse_block_type(block_type)


def patch() -> None:
    """Register our blocks, the configurations of `clip_configs` and tags with OpenCLIP; a second call has no effect."""
    wrappers: dict[Any, Callable] = {
        open_clip.model._build_text_tower: _wrap_text,
        open_clip.model._build_vision_tower: _wrap_vision,
        open_clip.pretrained.download_pretrained: wrap_download,
        open_clip.factory.get_tokenizer: _wrap_tokenizer,
    }
    for function, wrap in wrappers.items():
        if not hasattr(function, _PREFIX):
            wrapper = wrap(function)
            setattr(wrapper, _PREFIX, True)
            _rebind(function, wrapper)
    open_clip.pretrained._PRETRAINED.update(TAGS)
    open_clip.factory._MODEL_CONFIGS.update(CONFIGS)


def _rebind(old: Callable, new: Callable) -> None:
    """Replace a function in all of OpenCLIP's modules (some import it by name)."""
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == "open_clip" and getattr(module, old.__name__, None) is old:
            setattr(module, old.__name__, new)


def model_names() -> list[str]:
    """Return our models' names in OpenCLIP, sorted."""
    return sorted(CONFIGS)


patch()
