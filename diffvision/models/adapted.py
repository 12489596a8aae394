"""`adapted_vit`: the timm model name of vision transformers with attention that `diffvision.adapt` changed.

    timm.create_model("adapted_vit", base="vit_base_patch16_224", method="v2")
    timm.create_model("adapted_vit.v2.vit_base_patch16_224")       the same, where only a name can be given (OpenCLIP)
    timm.create_model("local-dir:DIRECTORY", pretrained=True)      what `diffvision adapt` wrote, with its weights

Without weights from a folder the model is a newly initialised `base`, adapted.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import timm
from timm.models import load_pretrained, register_model
from torch import nn

__all__ = ["adapted_vit"]


@register_model
def adapted_vit(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Build a timm VisionTransformer with its attention made differential.

    Args:
        pretrained: load the weights that the configuration names, as a folder's does.
        **kwargs: base (a timm model's name), method (as `adapt`), and whatever that model takes.

    Raises:
        ValueError: base or method is missing, pretrained is set without a folder, or `adapt` refuses the model.
    """
    config: Any = kwargs.pop("pretrained_cfg", None)
    base, method = kwargs.pop("base", None), kwargs.pop("method", None)
    if isinstance(config, str):  # the part of the name after the point
        (method, _, base), config = config.partition("."), None
    if not base or not method:
        raise ValueError("adapted_vit needs a base and a method: base='vit_base_patch16_224', method='v2'")
    if pretrained and not config:
        raise ValueError(f"adapted_vit has no pretrained weights: adapt those of {base}, and load 'local-dir:FOLDER'")
    # Not at the top: `adapt` imports OpenCLIP, and this module is imported right after timm.
    from diffvision.models.adapt import adapt

    source, cache = kwargs.pop("pretrained_model_args", None), kwargs.get("cache_dir")
    built: Any = timm.create_model(base, pretrained_cfg=config, **kwargs)
    model: Any = built.model if kwargs.get("features_only") else built
    adapt(model, method)
    model.pretrained_model_args = source or {}
    if pretrained:
        # For features timm removes unused parts after weights are loaded; here they are removed before.
        kept = model.state_dict().keys() if built is not model else None
        load_pretrained(
            model,
            pretrained_cfg=model.pretrained_cfg,
            num_classes=model.num_classes,
            in_chans=kwargs.get("in_chans", 3),
            filter_fn=partial(_filter, kept=kept),
            cache_dir=cache,
        )
    if built is not model:
        built._model_args = model._model_args
    return built


def _filter(state: dict[str, Any], model: Any, kept: Collection[str] | None) -> dict[str, Any]:
    """Apply timm's filter, and drop weights of parts that a features-only model does not have."""
    from diffvision.models.vit import filter_weights  # which may be importing timm, and so this module

    filtered = filter_weights(state, model)
    return {name: value for name, value in filtered.items() if kept is None or name in kept}
