"""What autocast does on a device, for code that has to know it or to be left alone by it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype to which autocast casts the inputs of matrix products, or None where it is off."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def without_autocast(device_type: str) -> AbstractContextManager:
    """Return a context without autocast; it costs nothing where autocast is off, and takes any device."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


def cast_once(x: Tensor) -> Tensor:
    """Return the input of several linear maps as autocast would cast it for each: backward then keeps one copy."""
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None or not x.is_floating_point() or x.dtype == torch.float64 else x.to(dtype)
