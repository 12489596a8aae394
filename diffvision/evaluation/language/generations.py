"""Greedy continuations of prompts by our models and by transformers'."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diffvision.models.language.generation import generate
from diffvision.opening import Model


def max_prompt_tokens(model: Model, max_new_tokens: int) -> int | None:
    """Return the most tokens that a prompt may have; None where the model does not say.

    Raises:
        ValueError: the model reads no more than the new tokens.
    """
    if model.max_length is None:
        return None
    if max_new_tokens >= model.max_length:
        raise ValueError(
            f"new_tokens is {max_new_tokens}, and {model.name} reads {model.max_length} tokens in all: give fewer new "
            "ones"
        )
    return model.max_length - max_new_tokens


def continue_greedily(
    model: Model, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stops: Sequence[str] = ()
) -> list[list[int]]:
    """Return the new tokens of each prompt, greedily and in one batch, up to a stop string or the end of the text."""
    tokenizer = model.tokenizer

    def is_stopped(new: Sequence[int]) -> bool:
        return bool(stops) and stop_at(tokenizer.decode(list(new)), stops) is not None

    module: Any = model.module
    if model.library != "language":
        return _continue_by_transformers(module, model.ends, prompts, max_new_tokens, is_stopped)
    new: list[list[int]] = [[] for _ in prompts]

    def on_token(index: int, token: int) -> bool:
        new[index].append(token)
        return is_stopped(new[index])

    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "vocab_size": tokenizer.vocab_size}
    return generate(module, prompts, stop=model.ends, on_token=on_token, **limits)


def stop_at(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first stop string in a text begins; None if it has none."""
    return min((start for stop in stops if (start := text.find(stop)) >= 0), default=None)


def _continue_by_transformers(
    module: Any,
    ends: frozenset[int],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    is_stopped: Callable[[Sequence[int]], bool],
) -> list[list[int]]:
    """Return new tokens by transformers' `generate`, prompts padded on the left."""
    from transformers import GenerationConfig, StoppingCriteriaList

    longest = max(map(len, prompts))
    pad = min(ends, default=0)
    tokens = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in prompts], device=module.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=module.device)

    lengths: dict[int, int] = {}  # of outputs with a stop string, which are filled up afterwards

    def stopped(sequences: Tensor, scores: Any, **_: Any) -> Tensor:
        for index, row in enumerate(sequences[:, longest:].tolist()):
            if index not in lengths and is_stopped(row):
                lengths[index] = len(row)
        return torch.tensor([index in lengths for index in range(len(sequences))], device=sequences.device)

    default = getattr(module, "generation_config", None)
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
    )
    module.generation_config = GenerationConfig()  # a model's own sampling would be merged with ours
    try:
        out = module.generate(
            tokens, attention_mask=mask, generation_config=config, stopping_criteria=StoppingCriteriaList([stopped])
        )
    finally:
        module.generation_config = default
    new = [row[: lengths.get(index)] for index, row in enumerate(out[:, longest:].tolist())]
    return [list(itertools.takewhile(lambda token: token not in ends, row)) for row in new]
