"""Differential attention behind one function, with a backend in each file or folder.

Backends do not import each other; layers with parameters are in `diffvision.nn`.
"""

from diffvision.ops.attention.api import diff_attention, diff_attention_varlen
from diffvision.ops.attention.choice import BACKENDS, attention_backend, supported_backends
from diffvision.ops.attention.problem import Problem
from diffvision.ops.attention.reference import attention_maps
from diffvision.ops.attention.sdpa import softmax_attention

__all__ = [
    "BACKENDS",
    "Problem",
    "attention_backend",
    "attention_maps",
    "diff_attention",
    "diff_attention_varlen",
    "softmax_attention",
    "supported_backends",
]
