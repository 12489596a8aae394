"""Looking inside: attention maps, lambda, and figures of both and of training runs."""

from diffvision.analysis.attention import LayerMaps, layer_maps, patch_maps
from diffvision.analysis.lambdas import layer_lambdas

__all__ = ["LayerMaps", "layer_lambdas", "layer_maps", "patch_maps"]
