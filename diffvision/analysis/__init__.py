"""Attention maps of a model, their statistics and figures, and curves of training runs.

Evaluations over data are in `diffvision.evaluation`. Names are imported on first use, because reading curves needs no
timm.
"""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.analysis.lambdas import layer_lambdas
    from diffvision.analysis.maps import LayerMaps, layer_maps, patch_maps

__all__ = ["LayerMaps", "layer_lambdas", "layer_maps", "patch_maps"]

_MODULES = {"LayerMaps": "maps", "layer_lambdas": "lambdas", "layer_maps": "maps", "patch_maps": "maps"}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
