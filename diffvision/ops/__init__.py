"""Pure functions on tensors: the one operation of this package, its attention maps, and rotary embedding."""

from diffvision.ops.attention import attention_maps, diff_attention, supported_backends
from diffvision.ops.rotary import apply_rotary, rotary_tables

__all__ = ["apply_rotary", "attention_maps", "diff_attention", "rotary_tables", "supported_backends"]
