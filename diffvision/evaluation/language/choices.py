"""Choices of a language model among continuations, by constrained greedy decoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from diffvision.evaluation.language.scoring import logits_at, padded_batches
from diffvision.models.modes import evaluating


def constrained_choices(
    model: Any, prompts: Sequence[Sequence[int]], choices: Sequence[Sequence[int]], *, batch_size: int = 8
) -> list[int]:
    """Return the choice that constrained greedy decoding writes after each prompt.

    At every step it takes the likeliest of the tokens that still lead to a choice.

    Args:
        prompts: tokens, at least one each.
        choices: tokens of each choice.

    Raises:
        ValueError: two choices are equal, or one begins another, so that decoding could not tell them apart.
    """
    kept = sorted(tuple(choice) for choice in choices)
    for first, second in itertools.pairwise(kept):
        if second[: len(first)] == first:
            raise ValueError(
                f"the choice of tokens {list(first)} begins the choice {list(second)}: end each with a token that is "
                "in none of them, such as a line's end"
            )
    written: list[list[int]] = [[] for _ in prompts]
    left = [list(range(len(choices))) for _ in prompts]
    while pending := [number for number, choices_left in enumerate(left) if len(choices_left) > 1]:
        allowed = {n: sorted({choices[c][len(written[n])] for c in left[n]}) for n in pending}
        unsure = [n for n in pending if len(allowed[n]) > 1]
        picked = {n: allowed[n][0] for n in pending if len(allowed[n]) == 1}
        picked |= _likeliest(model, {n: [*prompts[n], *written[n]] for n in unsure}, allowed, batch_size)
        for n, token in picked.items():
            left[n] = [c for c in left[n] if choices[c][len(written[n])] == token]
            written[n].append(token)
    return [choices_left[0] for choices_left in left]


def _likeliest(
    model: Any, rows: dict[int, list[int]], allowed: dict[int, list[int]], batch_size: int
) -> dict[int, int]:
    """Return for each row the likeliest of its allowed tokens after its last token."""
    keys, picked = list(rows), {}
    with evaluating(model):
        for numbers, tokens, lengths in padded_batches([rows[key] for key in keys], batch_size):
            logits = logits_at(model, tokens, lengths[:, None] - 1)[:, 0].cpu()
            for row, number in enumerate(numbers):
                candidates = allowed[keys[number]]
                picked[keys[number]] = candidates[int(logits[row, candidates].argmax())]
    return picked
