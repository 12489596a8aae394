"""Opening of a model to be written: it has trained or pretrained weights and all are finite."""

from __future__ import annotations

from pathlib import Path

from diffvision.models.checkpoint import check_finite
from diffvision.opening import Model, open_native


def open_for_export(spec: str | Path, checkpoint: str | Path | None = None) -> Model:
    """Open a model to be written, as `open_native` does.

    Raises:
        FileNotFoundError, ValueError: as `open_native`, or its weights are randomly initialised or not finite.
    """
    model = open_native(spec, checkpoint)
    if model.weights is None:
        raise ValueError(f"{spec} has new weights: give NAME.TAG, or a file of weights as --checkpoint")
    check_finite(model.module.state_dict(), model.weights)
    return model
