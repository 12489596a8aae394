"""What layers computed, numbers and pictures of it, and curves of training runs.

Evaluations over data are not here; they are in `diffvision.evaluation`.
"""

from diffvision.analysis.lambdas import layer_lambdas
from diffvision.analysis.maps import LayerMaps, layer_maps, patch_maps

__all__ = ["LayerMaps", "layer_lambdas", "layer_maps", "patch_maps"]
