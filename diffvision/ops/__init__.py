"""Pure functions on tensors: differential attention, attention maps, RMS norm, and rotary embedding."""

from diffvision.ops.attention import (
    Documents,
    attention_backend,
    attention_maps,
    diff_attention,
    document_ends,
    softmax_attention,
)
from diffvision.ops.norm import rms_norm
from diffvision.ops.rotary import apply_rotary, rotary_tables

__all__ = [
    "Documents",
    "apply_rotary",
    "attention_backend",
    "attention_maps",
    "diff_attention",
    "document_ends",
    "rms_norm",
    "rotary_tables",
    "softmax_attention",
]
