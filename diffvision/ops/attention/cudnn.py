"""A context in which torch's attention does not take cuDNN's kernel; `sdpa.plan_cuda` says why."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def without_cudnn() -> AbstractContextManager:
    """Return a context in which cuDNN's attention is disabled, in a graph too."""
    if torch.compiler.is_compiling():  # a graph takes this context as a whole
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
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
