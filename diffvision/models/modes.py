"""Evaluation mode for a while.

A context manager for every room above; gradients are not touched here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and give every submodule its own mode back afterwards.

    Args:
        model: any module; it may hold submodules in different modes.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
