"""What is known of a model that was opened; `diffvision.opening.open_model` opens one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

Host = Literal["open_clip", "timm", "language", "transformers"]
"""Who builds a model: OpenCLIP, timm, `diffvision.models.language`, or transformers."""


@dataclass(frozen=True)
class Model:
    """A model in evaluation mode and what belongs to it.

    Attributes:
        name: the model's name at its host, by which tables and pictures call it.
        host: who builds it.
        module: the model itself.
        config: what the host builds it from: OpenCLIP's model_cfg, the arguments that timm's create_model took, or the
            fields of a language model's configuration.
        transform: PIL image -> tensor [3, h, w]; None for a language model.
        tokenizer: captions -> int64 [B, L] for OpenCLIP; for a language model an object with encode, decode, vocab_size
            and eos_id, None where none came with the model; None for an image model.
        preprocess: the settings of `transform`, as the host keeps them; empty for a language model.
        max_length: tokens that a language model reads; None where it does not say.
        weights: the file, folder, hub id or tag that the weights came from; None where they are new.
        run: the directory of the training run, with its config.yaml and metrics.csv, if the weights are a file of one.
    """

    name: str
    host: Host
    module: nn.Module
    config: dict[str, Any] = field(default_factory=dict)
    transform: Any = None
    tokenizer: Any = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    weights: str | None = None
    run: Path | None = None

    @property
    def is_language(self) -> bool:
        """Whether it is a language model, without an image tower."""
        return self.host in ("language", "transformers")
