"""The GPU's capability, the attention kernels that torch has enabled, and a context without cuDNN's."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_OTHERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@torch.compiler.assume_constant_result  # a number, because comparing a tuple in a graph fails in torch 2.11
def compute_capability(index: int | None = None) -> int:
    """Return a GPU's compute capability as a number, 90 for 9.0; 80 without a GPU, as for fake tensors."""
    return _compute_capability(index)


@cache  # which is not to be traced
def _compute_capability(index: int | None) -> int:
    if not torch.cuda.is_available():
        return 80
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def has_little_shared_memory(capability: int) -> bool:
    """Return whether a program has 99 KiB of shared memory on cards of a capability; on others it has 163 or more."""
    return 86 <= capability <= 89 or capability >= 120


@torch.compiler.assume_constant_result  # a graph keeps the kernels of when it was made, as torch's own attention does
def is_enabled(name: str) -> bool:
    """Return whether `torch.nn.attention.sdpa_kernel` or torch's settings leave a kernel enabled."""
    return getattr(torch.backends.cuda, f"{name}_sdp_enabled")()


def without_cudnn() -> AbstractContextManager:
    """Return a context in which cuDNN's attention is disabled, in a graph too."""
    if torch.compiler.is_compiling():  # a graph takes this context as a whole
        return sdpa_kernel([kernel for name, kernel in _OTHERS.items() if is_enabled(name)])
    return _disabled()


@contextmanager
def _disabled() -> Iterator[None]:
    """Do what `sdpa_kernel` does for one kernel, at a hundredth of its time."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
