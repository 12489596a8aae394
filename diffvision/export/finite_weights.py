"""Checks before a model is written: it has trained or pretrained weights and all are finite."""

from __future__ import annotations

from pathlib import Path

from diffvision.models import checkpoint as checkpoints
from diffvision.opening import Model, open_native


def open_for_export(spec: str | Path, checkpoint: str | Path | None = None) -> Model:
    """Open a model to be written, as `open_native` does.

    Raises:
        FileNotFoundError, ValueError: as `open_native`, or as `check_finite`.
    """
    model = open_native(spec, checkpoint)
    check_finite(model, spec)
    return model


def check_finite(model: Model, spec: str | Path) -> None:
    """Raise a ValueError if a model, opened by `spec`, has randomly initialised or non-finite weights."""
    if model.weights is None:
        raise ValueError(f"{spec} has new weights: give NAME.TAG, or a file of weights as --checkpoint")
    checkpoints.check_finite(model.module.state_dict(), model.weights)
