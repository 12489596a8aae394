"""The settings of the evaluations of vision-language models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VisionLanguageOptions:
    """How questions are asked.

    Args:
        prompt: what a model is asked, with {question} in it. LLaVA-1.5's results on POPE and VQA are with
            "{question}\\nAnswer the question using a single word or phrase.".
        max_new_tokens: most tokens of an answer.
        batch_size: questions at a time.

    Raises:
        ValueError: a prompt without {question}, or a number below 1.
    """

    prompt: str = "{question}"
    max_new_tokens: int = 128
    batch_size: int = 8

    def __post_init__(self) -> None:
        if "{question}" not in self.prompt:
            raise ValueError(f"prompt is {self.prompt!r}: write {{question}} where the question belongs")
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number of at least 1")
