"""The configurations of our OpenCLIP models: sizes, and the families of attention that come in them."""

from typing import Any, NamedTuple

from diffvision.models.by_layer import extra_queries, matched_heads

_NANO_TOKENIZER = {"vocab_size": 595, "tokenizer_kwargs": {"bpe_path": "diffvision:nano_merges.txt.gz"}}


class Size(NamedTuple):
    """The sizes of a model.

    Attributes:
        tower: the image tower's name in timm, after the family.
        width: of the text tower and of the embedding.
        heads: of a plain text tower.
        layers: of the text tower.
        image_size: height and width of an image.
        context_length: tokens of a caption.
        tokenizer: vocabulary and tokenizer, where they are not OpenCLIP's.
    """

    tower: str
    width: int
    heads: int
    layers: int = 12
    image_size: int = 224
    context_length: int = 77
    tokenizer: dict[str, Any] = {"vocab_size": 49408}  # noqa: RUF012  never changed


SIZES = {
    "debug": Size("debug_clip", 64, 4, 2, 32, 24),
    "nano": Size("debug_clip", 64, 4, 2, 32, 24, _NANO_TOKENIZER),
    "ViT-S-16": Size("small_patch16_clip_224", 384, 6),
    "ViT-B-32": Size("base_patch32_clip_224", 512, 8),
    "ViT-B-16": Size("base_patch16_clip_224", 512, 8),
    "ViT-L-14": Size("large_patch14_clip_224", 768, 12),
}
_FEW, _CURES = ("debug", "ViT-B-16"), ("debug", "ViT-S-16", "ViT-B-16")
FAMILIES = {
    "CLIP": ("plain", "standard", tuple(SIZES)),
    "DiffCLIP": ("diff", "v1:lambda_init=0.8", (*_CURES, "ViT-B-32", "ViT-L-14")),
    "DiffCLIP-V2": ("diffv2", "v2", _FEW),
    "DiffCLIP-DINT": ("dint", "v1_dint:lambda_init=0.8", _FEW),
    "GatedCLIP": ("gated", "gated", _CURES),
    "SinkCLIP": ("sink", "sink", _CURES),
    "IntegralCLIP": ("integral", "integral", _CURES),
    "DnACLIP": ("dna", "dna", _CURES),
    "CoDACLIP": ("coda", "coda", _CURES),
}
"""Beginning of a model's name -> the family of its image tower in timm, the text tower's attention, and the sizes."""


def _config(size: str, tower: str, attention: str) -> dict[str, Any]:
    """Return OpenCLIP's configuration, whose text tower has as many parameters as plain attention's."""
    sizes, variant = SIZES[size], attention.partition(":")[0]
    more = extra_queries(variant, "standard")
    vision = {"timm_model_name": tower, "timm_model_pretrained": False, "timm_pool": "", "timm_proj": "linear"}
    text = {
        "context_length": sizes.context_length,
        "width": sizes.width,
        "heads": matched_heads(variant, "standard", sizes.heads)[0],
        "layers": sizes.layers,
        "block_type": f"diffvision:{attention}",
        **({"mlp_ratio": 4 - more / 2} if more else {}),
        **sizes.tokenizer,
    }
    vision_cfg = {"image_size": sizes.image_size, **vision}
    return {"embed_dim": sizes.width, "quick_gelu": True, "vision_cfg": vision_cfg, "text_cfg": text}


CONFIGS = {
    f"{name}-{size}": _config(size, f"{family}_vit_{SIZES[size].tower}", attention)
    for name, (family, attention, sizes) in FAMILIES.items()
    for size in sizes
} | {
    "DiffCLIP-nano": _config("nano", "diff_vit_debug_clip_lambda02", "v1:lambda_init=0.2"),
    "DiffCLIP-debug-0.2": _config("debug", "diff_vit_debug_clip_lambda02", "v1:lambda_init=0.2"),
    "DiffCLIP-GDA-debug": _config("debug", "gda_vit_debug_clip", "gda:lambda_init=0.8,signal_ratio=2"),
    "DiffCLIP-GDA-ViT-B-16": _config("ViT-B-16", "gda_vit_base_patch16_clip_224", "gda:lambda_init=0.8,signal_ratio=4"),
    "DiffCLIP-ViT-B-16-dynamic": _config("ViT-B-16", "diff_vit_base_patch16_clip_dynamic_224", "v1:lambda_init=depth"),
    "DiffCLIP-ViT-B-16-vision": _config("ViT-B-16", "diff_vit_base_patch16_clip_224", "standard"),
}
"""Name -> configuration. The last one is differential in the image tower only."""
