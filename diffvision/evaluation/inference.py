"""How a model is run over evaluation folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffvision.evaluation.options import Precision

if TYPE_CHECKING:
    from torch import device

    from diffvision.evaluation.cache import Cache


@dataclass(frozen=True)
class InferenceSettings:
    """How a model is run over evaluation folders.

    Args:
        batch_size: images a batch and rank.
        num_workers: processes that read and decode images.
        device: where the model is; by default that of its parameters.
        precision: "fp32" runs the model as it is, whatever autocast the caller is in; the others are autocasts.
        progress: wraps an iterable in a progress bar, given also its description; None for silence.
        cache: keeps features, so that an evaluation that was interrupted resumes.
    """

    batch_size: int = 64
    num_workers: int = 0
    device: device | str | None = None
    precision: Precision = "fp32"
    progress: Callable[[Any, str], Iterable] | None = None
    cache: Cache | None = None
