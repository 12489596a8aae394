"""Export of models: folders and Hub repositories of timm, OpenCLIP and transformers, and graphs."""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.export.model_folders import save_folder

__all__ = ["save_folder"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"save_folder": "model_folders"})
