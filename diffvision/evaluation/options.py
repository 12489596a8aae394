"""The settings that all evaluations share. Commands import this module for their help, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "fp16"]
"""What a model computes in."""


@dataclass(frozen=True)
class Options:
    """Settings of the evaluations; each reads the ones it needs. The defaults are CLIP_benchmark's or the paper's.

    Args:
        split: the split that is measured.
        train_split: the split that probes are fitted on.
        recall_k: the K of recall@K.
        probe_cost: C of the linear probe's regularisation; None chooses it on a validation split.
        fewshot_k: examples per class of the `fewshot_k` probe.
        fewshot_epochs: passes of the `fewshot_k` probe over its examples.
        fewshot_lr: its first learning rate.
        episodes: number of few-shot episodes.
        ways: classes in an episode.
        shots: examples per class in an episode.
        queries: test images per class in an episode.
        seed: of random draws: episodes, few-shot examples, held-out validation samples.
        classnames: names of the classes in prompts instead of the data's: "imagenet", a file with a name per line, or
            in Python a list. Classes named by numbers or ImageNet's wnids are sorted by them.
        templates: of prompts, instead of the data's: one with {c} where the name belongs, "imagenet" for its 80, a file
            with one per line, or a list.
    """

    split: str = "test"
    train_split: str = "train"
    recall_k: tuple[int, ...] = (1, 5, 10)
    probe_cost: float | None = None
    fewshot_k: int = 5
    fewshot_epochs: int = 10
    fewshot_lr: float = 0.1
    episodes: int = 5000
    ways: int = 5
    shots: int = 5
    queries: int = 6
    seed: int = 0
    classnames: str | list[str] | None = None
    templates: str | list[str] | None = None

    def __post_init__(self) -> None:
        counts = ("fewshot_k", "fewshot_epochs", "episodes", "ways", "shots", "queries")
        for name, value in [(name, getattr(self, name)) for name in counts] + [("recall_k", k) for k in self.recall_k]:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not self.recall_k:
            raise ValueError("recall_k is empty: name at least one K, such as 5")
        if self.probe_cost is not None and self.probe_cost <= 0:
            raise ValueError(f"probe_cost must be above 0, or None to have it chosen, got {self.probe_cost}")


@dataclass(frozen=True)
class InferenceSettings:
    """How a model is run over evaluation folders.

    Args:
        batch_size: images per batch and rank.
        num_workers: processes that read and decode images.
        device: where the model is; by default that of its parameters.
        precision: "fp32" runs the model as it is, without an enclosing autocast; the others run under autocast.
        progress: wraps an iterable in a progress bar, given also its description; None for silence.
        cache: folder that stores features.
    """

    batch_size: int = 64
    num_workers: int = 0
    device: Any = None  # a torch.device or its name; jsonargparse would import torch for the type
    precision: Precision = "fp32"
    progress: Callable[[Any, str], Iterable] | None = None
    cache: str | None = None
