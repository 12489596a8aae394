"""What a GPU has that kernels are chosen by: compute capability, and the shared memory that one program may use."""

from functools import cache

import torch

KIB = 1024
# By compute capability, to compile without a device: A100; A10 and RTX 30; L4, L40S and RTX 40; H100 and H200; B200;
# RTX 50 and RTX PRO 6000.
BY_CAPABILITY = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
LEAST, HOPPER = BY_CAPABILITY[86], BY_CAPABILITY[90]


@torch.compiler.assume_constant_result  # a cache is not to be traced
def compute_capability(index: int | None = None) -> tuple[int, int]:
    """Return that of a device, by default the current one; without a GPU, as for fake tensors, an A100's."""
    return _compute_capability(index)


@cache
def _compute_capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else (8, 0)


@torch.compiler.assume_constant_result
def shared_memory(device: torch.device) -> int:
    """Return the bytes a program may use on a device; without a GPU, Hopper's."""
    if device.type != "cuda":
        return HOPPER
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def is_hopper(device: torch.device) -> bool:
    """Return whether tiles are Hopper's, as without a GPU. B200 has its shared memory, but other tensor cores."""
    return device.type != "cuda" or compute_capability(device.index)[0] == 9
