"""What is looked at: one model, or two of a kind, by name or checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from diffvision.analysis.capture import check_attention
from diffvision.analysis.maps import image_trunk
from diffvision.evaluation.language.loading import load_subject
from diffvision.evaluation.loading import load
from diffvision.models import language


@dataclass(frozen=True)
class Subject:
    """A model that is looked at.

    Attributes:
        transform: of its images; None for a language model.
        tokenizer: of its texts; None for a model of images alone.
        max_length: tokens of a language model's context.
    """

    name: str
    model: nn.Module
    transform: Callable[..., Any] | None = None
    tokenizer: Any = None
    max_length: int | None = None

    @property
    def kind(self) -> str:
        if self.transform is None:
            return "a language model"
        return "an image model" if self.tokenizer is None else "an image-text model"


def subjects_of(
    model: str | None, checkpoint: str | None, versus: str | None, versus_checkpoint: str | None,
    tokenizer: str | None, device: str,
) -> list[Subject]:  # fmt: skip
    if model is None and checkpoint is None:
        raise ValueError("nothing to inspect: give --model (and --checkpoint), or a language model's --checkpoint")
    if model is None and versus is not None:
        raise ValueError(f"versus is {versus!r}, a model of images, beside a language model: give --versus_checkpoint")
    if model is not None and tokenizer is not None:
        raise ValueError(f"tokenizer is {tokenizer!r}: that is for language models; {model} has its own")
    given = [(model, checkpoint)]
    if versus is not None or versus_checkpoint is not None:
        given.append((versus or model, versus_checkpoint))
    if len(set(given)) < len(given):
        raise ValueError(f"versus is the model itself, {model or checkpoint}: give another, or another checkpoint")
    loaded = [_loaded(*one, tokenizer, device) for one in given]
    if len({one.name for one in loaded}) < len(loaded):
        loaded = [Subject(f"{one.name} {place}", one.model, one.transform, one.tokenizer, one.max_length)
                  for one, place in zip(loaded, ("A", "B"), strict=True)]  # fmt: skip
    if len({one.kind for one in loaded}) > 1:
        told = " and ".join(f"{one.name} is {one.kind}" for one in loaded)
        raise ValueError(f"{told}: models of one kind are compared")
    for one in loaded:
        check_model(one)
    return loaded


def _loaded(model: str | None, checkpoint: str | None, tokenizer: str | None, device: str) -> Subject:
    if model is None:
        assert checkpoint is not None
        found = load_subject(checkpoint, tokenizer=tokenizer, device=device)
        if found.tokenizer is None:
            raise ValueError(f"{checkpoint} came without a tokenizer, which reads the text: give --tokenizer")
        unwrap = getattr(found.model, "to_diffvision", None)  # a folder that `diffvision export` wrote
        read = found.model if unwrap is None else unwrap()
        return Subject(found.name, read, None, found.tokenizer, found.max_length)
    if model in language.model_names():
        raise ValueError(f"{model!r} is a language model: give its --checkpoint alone, without --model")
    one = load(model, checkpoint, device=device)
    return Subject(model.rpartition("/")[2], one.model, one.transform, one.tokenizer)


def check_model(subject: Subject) -> None:
    """ValueError, before any work, if there is nothing in it to look at."""
    try:
        check_attention(subject.model)
    except ValueError as error:
        raise ValueError(f"{subject.name}: {error}") from None
    if subject.transform is not None:
        image_trunk(subject.model)
