"""Helpers for code that depends on autocast, or has to run without it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

# The types of devices that have autocast: torch 2.11 cannot trace `torch.amp.is_autocast_available`.
DEVICES = frozenset(
    device for device in ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla") if is_autocast_available(device)
)


def is_enabled(device: str) -> bool:
    """Return whether autocast is on for a type of device."""
    return device in DEVICES and torch.is_autocast_enabled(device)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear map takes x: the one to which autocast casts it, or its own."""
    is_cast = is_enabled(x.device.type) and x.is_floating_point() and x.itemsize < 8
    return torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype


def cast_once(x: Tensor) -> Tensor:
    """Return the input of several linear maps as autocast would cast it for each: backward then keeps one copy."""
    device = x.device.type
    if device not in DEVICES or not torch.is_autocast_enabled(device) or not x.is_floating_point() or x.itemsize == 8:
        return x
    return x.to(torch.get_autocast_dtype(device))


def without_autocast(device: str) -> AbstractContextManager:
    """Return a context without autocast; it costs nothing where autocast is off, and takes any type of device."""
    is_on = device in DEVICES and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_on else nullcontext()
