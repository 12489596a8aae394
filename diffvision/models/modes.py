"""A context manager for evaluation mode. It does not move models between devices or precisions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode without gradients, and restore the mode of each module afterwards.

    Each module gets back the mode it had, because locked towers are in another mode than the rest. `torch.no_grad` is
    used rather than inference mode: a tensor that a module caches here may be needed in training afterwards.

    Args:
        model: a module; any other object has no modes, and only gradients are disabled.
    """
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    if modes:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
