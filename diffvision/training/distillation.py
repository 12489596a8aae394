"""Distillation of a language model from a teacher's next-token distributions. The loss is in `cross_entropy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.data.text.tokenizers import Tokenizer
from diffvision.evaluation.language.scoring import logits_at
from diffvision.opening import open_model
from diffvision.training.cross_entropy import IGNORED, SoftTargets


@dataclass(frozen=True)
class Distillation:
    """Settings of distillation from a teacher's next-token distributions.

    Attributes:
        teacher: a language model with the same tokenizer: any spec of `open_model`, such as `hf:ID` or a run.
        top_k: number of the teacher's likeliest tokens to use, renormalised to sum to 1.
        weight: weight of the cross entropy with the teacher; the data's tokens have 1 - weight.
    """

    teacher: str
    top_k: int = 32
    weight: float = 0.5

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"distill.top_k must be 1 or more, got {self.top_k}")
        if not 0 < self.weight <= 1:
            raise ValueError(f"distill.weight must be above 0 and at most 1, got {self.weight}")


class Teacher:
    """A frozen teacher. It is neither a submodule of the trained module nor in its checkpoints.

    Its tokenizer must be the data's, and its context at least `length` tokens.
    """

    def __init__(
        self, settings: Distillation, tokenizer: Tokenizer, length: int, device: torch.device | str = "cpu"
    ) -> None:
        opened = open_model(settings.teacher, device=device).for_text()
        self.settings, self.size = settings, tokenizer.vocab_size
        _check_tokenizer(settings.teacher, opened.tokenizer, tokenizer)
        if opened.max_length is not None and opened.max_length < length:
            raise ValueError(
                f"data.length must be at most {opened.max_length:,} for the teacher {settings.teacher}, got {length:,}"
            )
        self.model = opened.module.requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Teacher:
        return self  # EMA copies the module

    @torch.no_grad()
    def soft_targets(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> SoftTargets:
        """Return the teacher's distribution at each position [B * N, K]; zeros where the target is IGNORED.

        The teacher reads each document separately, so any causal model can be the teacher.

        Args:
            inputs: token ids [B, N].
            targets: ids of the next tokens, or IGNORED [B, N].
            documents: document number of each token [B, N]; None if each row is one document.
        """
        k = min(self.settings.top_k, self.size)
        ids = inputs.new_zeros(*inputs.shape, k)
        probabilities = torch.zeros(*inputs.shape, k, device=inputs.device)
        for row, (tokens, target) in enumerate(zip(inputs, targets, strict=True)):
            sizes = [len(tokens)]
            if documents is not None:
                sizes = documents[row].unique_consecutive(return_counts=True)[1].tolist()
            valid = target != IGNORED
            asked = [part.nonzero()[:, 0] for part in valid.split(sizes)]
            read = [number for number, positions in enumerate(asked) if len(positions)]
            if not read:
                continue
            parts = tokens.split(sizes)
            pad = nn.utils.rnn.pad_sequence
            texts = pad([parts[number] for number in read], batch_first=True)
            logits = logits_at(self.model, texts, pad([asked[number] for number in read], batch_first=True))
            answered = torch.cat([part[: len(asked[n])] for n, part in zip(read, logits, strict=True)])
            best = answered[:, : self.size].topk(k)
            ids[row, valid], probabilities[row, valid] = best.indices, best.values.softmax(dim=-1)
        return SoftTargets(ids.flatten(0, 1), probabilities.flatten(0, 1), self.settings.weight)


def _check_tokenizer(teacher: str, theirs: Any, ours: Tokenizer) -> None:
    """Raise ValueError unless each of our tokens is the teacher's token of that id."""
    if theirs is None:
        raise ValueError(f"the teacher {teacher} must have a tokenizer.json, to compare with the data's")
    known = theirs.vocabulary() if isinstance(theirs, Tokenizer) else theirs.tokenizer.get_vocab()
    if not ours.vocabulary().items() <= known.items():
        raise ValueError(f"the teacher {teacher} must have the data's tokenizer, got one with other tokens or ids")
