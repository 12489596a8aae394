"""The class `Model`, an opened model with its transform and tokenizer; `diffvision.opening.open_model` opens one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from diffvision.models.checkpoint import holds_average
from diffvision.opening.specs import SUFFIXES

Library = Literal["open_clip", "timm", "language", "transformers"]
"""The library that builds a model: OpenCLIP, timm, `diffvision.models.language`, or transformers."""
KINDS: dict[Library, str] = {
    "open_clip": "an image-text model",
    "timm": "an image model",
    "language": "a language model",
    "transformers": "a language model",
}


@dataclass(frozen=True)
class Model:
    """A model in evaluation mode with its transform, tokenizer and origin.

    Attributes:
        name: the model's name in its library, also in tables and pictures.
        library: the library that builds it.
        module: the model itself.
        config: what the library builds it from: OpenCLIP's model_cfg, the arguments of timm.create_model, or the
            fields of a language model's configuration.
        transform: PIL image -> tensor [3, h, w]; None for a language model.
        tokenizer: captions -> int64 [B, L] for OpenCLIP; for a language model an object with encode, decode, vocab_size
            and eos_id, None where none came with the model; None for an image model.
        processor: of a vision-language model: transforms images, and writes conversations as tokens with placeholders.
        preprocess: the settings of `transform`, as the library keeps them; empty for a language model.
        max_length: tokens that a language model reads; None where it does not say.
        weights: the file, folder, hub id or tag that the weights came from; None where they are new.
        run: the directory of the training run, with its config.yaml and metrics.csv, if the weights are a file of one.
        path: the file or folder of the weights; None where they are a tag's, the Hub's or new.
    """

    name: str
    library: Library
    module: nn.Module
    config: dict[str, Any] = field(default_factory=dict)
    transform: Any = None
    tokenizer: Any = None
    processor: Any = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    weights: str | None = None
    run: Path | None = None
    path: Path | None = None

    @property
    def is_language(self) -> bool:
        """Whether it is a language model, without an image tower."""
        return self.library in ("language", "transformers") and self.processor is None

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a language model's text: of a document, and of a turn by its chat template."""
        from diffvision.data.text.chat import find_turn_end
        from diffvision.data.text.tokenizers import Tokenizer

        given = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        given = given if isinstance(given, list) else [given]
        is_ours = isinstance(self.tokenizer, Tokenizer)
        turn = find_turn_end(self.tokenizer) if is_ours else getattr(self.tokenizer, "turn_end", None)
        ends = {*given, self.tokenizer.eos_id, turn}
        return frozenset(end for end in ends if end is not None)

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next(self.module.parameters()).device

    @property
    def average_note(self) -> str:
        """A note to follow the model's name: ", averaged weights (EMA)", or an empty string."""
        is_file = self.path is not None and self.path.suffix in SUFFIXES and self.path.is_file()
        return ", averaged weights (EMA)" if is_file and holds_average(str(self.path)) else ""

    def for_images(self) -> Model:
        """Return the model; raise a ValueError if it is a language or vision-language model."""
        if self.is_language:
            raise ValueError(
                f"{self.name} is a language model: give one of images, or use `diffvision evaluate-language`"
            )
        self._refuse_joint()
        return self

    def _refuse_joint(self) -> None:
        if self.processor is not None:
            raise ValueError(f"{self.name} is a vision-language model: use `diffvision evaluate-vlm`")

    def for_text(self) -> Model:
        """Return self if it is a trained language model.

        Raises:
            ValueError: it is an image model, or its weights are randomly initialised.
        """
        self._refuse_joint()
        if not self.is_language:
            raise ValueError(f"{self.name} is a model of images: give a language model, or use `diffvision evaluate`")
        if self.weights is None:
            raise ValueError(f"{self.name} has new weights: give --checkpoint, or a .ckpt file or folder instead of it")
        return self
