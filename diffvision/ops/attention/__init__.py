"""Differential attention as one function, with one file per backend.

Backends do not import each other; layers with parameters are in `diffvision.nn`.
"""

from diffvision.ops.attention.api import diff_attention, softmax_attention
from diffvision.ops.attention.choice import BACKENDS, attention_backend
from diffvision.ops.attention.document_masks import Documents, document_ends
from diffvision.ops.attention.problem import Problem
from diffvision.ops.attention.reference import attention_maps

__all__ = [
    "BACKENDS",
    "Documents",
    "Problem",
    "attention_backend",
    "attention_maps",
    "diff_attention",
    "document_ends",
    "softmax_attention",
]
