"""What autocast does on a device, for code that has to know it or to be left alone by it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear map takes x: the one to which autocast casts it, or its own."""
    device = x.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on and x.is_floating_point() and x.itemsize < 8 else x.dtype


def cast_once(x: Tensor) -> Tensor:
    """Return the input of several linear maps as autocast would cast it for each: backward then keeps one copy."""
    device = x.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return x.to(product_dtype(x)) if is_on else x


def without_autocast(device: str) -> AbstractContextManager:
    """Return a context without autocast; it costs nothing where autocast is off, and takes any type of device."""
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_on else nullcontext()
