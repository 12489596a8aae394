"""Perplexity: the mean negative log-likelihood of tokens, whole or by strided windows, and its bits a byte."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffvision.evaluation.language.scoring import Progress, padded_batches, silent, token_losses
from diffvision.evaluation.per_sample import PerSample
from diffvision.models.modes import evaluating


class Window(NamedTuple):
    """A piece of a document: a model reads all but its last token, and is scored on the last ones."""

    tokens: Tensor  # int64 [up to window + 1]
    first: int  # index in `tokens` of the first one that is scored; at least 1


def windows(document: Tensor, window: int, stride: int | None = None) -> Iterator[Window]:
    """Cut a document so that each of its tokens after the first is scored once.

    Args:
        document: int64 [N].
        window: tokens that the model reads at a time.
        stride: how far the windows' starts are apart. By default `window`: they do not overlap, and a window's first
            prediction sees one token. A smaller one gives every prediction at least window - stride + 1 tokens, at
            window / stride times the cost.

    Raises:
        ValueError: window below 1; stride not in 1..window.
    """
    stride = window if stride is None else stride
    if not 1 <= stride <= window:
        raise ValueError(
            f"stride must be 1 to the window, which must be above 0, got stride {stride} and window {window}"
        )
    scored = 1  # index in the document of the next token to score
    for begin in range(0, len(document) - 1, stride):
        piece = document[begin : begin + window + 1]
        yield Window(piece, scored - begin)
        scored = begin + len(piece)
        if scored == len(document):
            return


def perplexity(
    model: Any,
    documents: Sequence[Tensor],
    *,
    window: int,
    stride: int | None = None,
    num_bytes: int | None = None,
    batch_size: int = 8,
    progress: Progress = silent,
) -> dict[str, float]:
    """Return the mean over all tokens but each document's first, every token weighing the same.

    Args:
        model: see `scoring`.
        documents: int64 [N] each, such as a start token and a text.
        window, stride: as `windows`.
        num_bytes: bytes of UTF-8 in the text of the scored tokens, for bits_per_byte, which compares models of
            different tokenizers.

    Returns:
        nll (nats a token), perplexity, tokens (how many were scored), and bits_per_byte where num_bytes is given.

    Raises:
        ValueError: no document has two tokens; window or stride as `windows`.
    """
    pieces = [piece for document in documents for piece in windows(document, window, stride)]
    if not pieces:
        raise ValueError("no document has two tokens: perplexity needs one to read and one to predict")
    total, count = 0.0, 0
    with evaluating(model):
        for _, losses, scored, _ in scored_windows(model, pieces, batch_size, progress, "perplexity"):
            total += losses[scored].double().sum().item()
            count += int(scored.sum())
    metrics = {"nll": total / count, "perplexity": exponential(total / count), "tokens": float(count)}
    if num_bytes:
        metrics["bits_per_byte"] = total / math.log(2) / num_bytes
    return metrics


def perplexity_samples(
    model: Any,
    documents: Sequence[Tensor],
    *,
    window: int,
    batch_size: int = 8,
    progress: Progress = silent,
) -> dict[str, PerSample]:
    """Return nll and perplexity window by window; the windows of a document are one unit.

    Args:
        model, documents, batch_size, progress: as `perplexity`.
        window: as `windows`.

    Raises:
        ValueError: as `perplexity`.
    """
    cut = [(piece, number) for number, document in enumerate(documents) for piece in windows(document, window)]
    if not cut:
        raise ValueError("no document has two tokens: perplexity needs one to read and one to predict")
    pieces = [piece for piece, _ in cut]
    sums = torch.zeros(len(cut), dtype=torch.float64)
    counts = torch.zeros(len(cut), dtype=torch.int64)
    with evaluating(model):
        for numbers, losses, scored, _ in scored_windows(model, pieces, batch_size, progress, "perplexity"):
            sums[numbers] = losses.double().where(scored, 0.0).sum(dim=1)
            counts[numbers] = scored.sum(dim=1)
    nll = PerSample(sums, torch.tensor([number for _, number in cut]), weights=counts)
    return {"nll": nll, "perplexity": nll._replace(exponential=True)}


def scored_windows(
    model: Any, pieces: Sequence[Window], batch_size: int, progress: Progress, description: str
) -> Iterator[tuple[list[int], Tensor, Tensor, Tensor]]:
    """Yield by batches on the CPU: windows' numbers [B], losses and which count [B, N - 1], and tokens [B, N]."""
    batches = list(padded_batches([piece.tokens.tolist() for piece in pieces], batch_size))
    for numbers, tokens, lengths in progress(batches, description):
        target = torch.arange(1, tokens.shape[1])
        first = torch.tensor([pieces[number].first for number in numbers])
        scored = (target >= first[:, None]) & (target < lengths[:, None])
        yield numbers, token_losses(model, tokens).cpu(), scored, tokens


def exponential(nll: float) -> float:
    """Return exp, infinite where it overflows."""
    return math.exp(nll) if nll < 700 else math.inf
