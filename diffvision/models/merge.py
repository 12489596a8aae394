"""DEX layers merged into standard ones, which compute the same."""

import dataclasses

from torch import nn

from diffvision.models.by_layer import as_text
from diffvision.models.language.decoder import LanguageModel
from diffvision.nn import ATTENTION, AttentionLayer


def merge_dex(model: nn.Module) -> nn.Module:
    """Replace every DEX layer by a standard one that computes the same, in place, and return the model."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, AttentionLayer) and module.mergeable:
                setattr(parent, name, module.merge())
    if isinstance(model, LanguageModel):
        variants = [_merge(layer.variant) for layer in model.config.layers()]
        variant = _merge(model.config.variant)
        by_layer = as_text(variants, variant)
        model.config = dataclasses.replace(model.config, variant=variant, variant_by_layer=by_layer)
    return model


def _merge(variant: str) -> str:
    return "standard" if ATTENTION[variant].mergeable else variant
