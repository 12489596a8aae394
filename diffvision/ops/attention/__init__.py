"""Differential attention behind one function; each backend is a file that knows nothing of the others."""

from diffvision.ops.attention.api import BACKENDS, diff_attention, supported_backends
from diffvision.ops.attention.eager import attention_maps
from diffvision.ops.attention.problem import Problem

__all__ = ["BACKENDS", "Problem", "attention_maps", "diff_attention", "supported_backends"]
