"""Token losses and greedy matches of a language model.

A model is anything that maps int64 tokens [B, N] to logits [B, N, vocabulary]: `diffvision.models.language`, a Hugging
Face causal language model (an object with `.logits`), or a function. It must be causal: rows of unequal length are
padded on the right, where a causal model does not see the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffvision.models.modes import evaluating

Progress = Callable[[Iterable[Any], str], Iterable[Any]]
"""Wraps an iterable in a progress bar, given also its description."""


def silent(items: Iterable[Any], description: str) -> Iterable[Any]:
    """Return the items without showing progress."""
    return items


def get_device(model: Any) -> torch.device:
    """Return where the model's parameters are; the CPU for a function."""
    if isinstance(model, nn.Module) and (first := next(model.parameters(), None)) is not None:
        return first.device
    return torch.device("cpu")


def logits_at(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return float32 logits [B, K, vocabulary] after the tokens [B, N] at `positions` [B, K].

    A model with a separate head computes logits for those positions only.
    """
    tokens, positions = tokens.to(get_device(model)), positions.to(get_device(model))
    states, head = _states_and_head(model, tokens)
    return head(states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))).float()


def token_losses(model: Any, tokens: Tensor, chunk: int = 1024) -> Tensor:
    """Return the negative log-likelihood in nats of each token after the first, float32 [B, N - 1].

    The model reads N - 1 tokens. If its head is separate, as in ours, logits are computed for `chunk` positions at a
    time, so that a long row needs no [N, vocabulary].
    """
    tokens = tokens.to(get_device(model))
    states, head = _states_and_head(model, tokens[:, :-1])
    losses = [
        F.cross_entropy(head(part).float().transpose(1, 2), target, reduction="none")
        for part, target in zip(states.split(chunk, dim=1), tokens[:, 1:].split(chunk, dim=1), strict=True)
    ]
    return torch.cat(losses, dim=1)


def _states_and_head(model: Any, tokens: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the head's input, [B, N, width], and the head; for a model without a separate head its logits."""
    hugging_face = hasattr(model, "get_output_embeddings")
    if not hugging_face and hasattr(model, "hidden") and hasattr(model, "head_weight"):
        return model.hidden(tokens), lambda states: F.linear(states, model.head_weight)
    out = model(tokens, use_cache=False) if hugging_face else model(tokens)
    return getattr(out, "logits", out), lambda logits: logits


def padded_batches(rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield rows of tokens in batches of similar length, longest first.

    A batch is (the rows' numbers, int64 [B, N] padded on the right with 0, lengths [B]).
    """
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        batch = [torch.as_tensor(rows[number], dtype=torch.int64) for number in numbers]
        yield numbers, nn.utils.rnn.pad_sequence(batch, batch_first=True), torch.tensor([len(row) for row in batch])


def greedy_matches(
    model: Any, rows: Sequence[Sequence[int]], spans: Sequence[Sequence[tuple[int, int]]], *, batch_size: int = 8
) -> list[list[bool]]:
    """Return whether greedy decoding would write each span of each row, given all that comes before the span.

    A greedy continuation equals the span exactly if each of its tokens is the likeliest after the true ones before it,
    so one forward pass decides what decoding token by token would.

    Args:
        rows: tokens, answers included.
        spans: for each row its answers, [start, stop) each; start is at least 1.
    """
    matches: list[list[bool]] = [[] for _ in rows]
    with evaluating(model):
        for numbers, tokens, _ in padded_batches(rows, batch_size):
            asked = [[position for start, stop in spans[n] for position in range(start, stop)] for n in numbers]
            positions = nn.utils.rnn.pad_sequence([torch.tensor(wanted) - 1 for wanted in asked], batch_first=True)
            best = logits_at(model, tokens, positions.clamp(min=0)).argmax(dim=-1).cpu()
            right = best == tokens.gather(1, positions + 1)
            for row, number in enumerate(numbers):
                left = right[row].tolist()
                for start, stop in spans[number]:
                    matches[number].append(all(left[: stop - start]))
                    left = left[stop - start :]
    return matches
