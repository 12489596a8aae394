"""Differential attention for vision and multimodal learning.

Importing the package registers its models with timm (`timm.create_model("diff_vit_base")`) and OpenCLIP
(`open_clip.create_model("DiffCLIP-ViT-B-16")`), and does nothing else: no Lightning, no data code.
"""

from typing import TYPE_CHECKING, Any

from diffvision import models
from diffvision.models.adapt import adapt
from diffvision.models.replace import replace_attention

if TYPE_CHECKING:
    from diffvision.opening import Model, open_model

__version__ = "0.1.0"

__all__ = ["Model", "__version__", "adapt", "models", "open_model", "replace_attention"]


def __getattr__(name: str) -> Any:
    """Return `open_model` or `Model`, imported when it is asked for."""
    if name not in ("Model", "open_model"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diffvision import opening

    return getattr(opening, name)
