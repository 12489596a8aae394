"""A model leaves: as a folder or a repository of timm, OpenCLIP or transformers, as a graph, in eight bits."""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.export.folders import save_folder

__all__ = ["save_folder"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"save_folder": "folders"})
