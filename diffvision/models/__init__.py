"""Our models for timm, OpenCLIP and text; importing `vit`, `adapted` and `clip` registers their names."""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.models import adapted, clip, language, vit

__all__ = ["adapted", "clip", "language", "vit"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__))
