"""Perplexity of documents, in windows that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffvision.evaluation.language.scoring import Progress, padded_batches, silent, token_losses
from diffvision.evaluation.per_sample import PerSample
from diffvision.models.modes import evaluating


def perplexity(
    model: Any,
    documents: Sequence[Tensor],
    *,
    window: int,
    num_bytes: int | None = None,
    batch_size: int = 8,
    progress: Progress = silent,
) -> dict[str, float]:
    """Return the mean over all tokens but each document's first, every token weighing the same.

    Args:
        model: see `scoring`.
        documents: int64 [N] each, such as a start token and a text.
        window: tokens that the model reads at a time.
        num_bytes: bytes of UTF-8 in the text of the scored tokens, for bits_per_byte, which compares models of
            different tokenizers.

    Returns:
        nll (nats per token), perplexity, tokens (how many were scored), and bits_per_byte if num_bytes is given.

    Raises:
        ValueError: no document has two tokens.
    """
    nll = perplexity_samples(model, documents, window=window, batch_size=batch_size, progress=progress)["nll"]
    total, count = nll.values.sum().item(), nll.size
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
    """Return nll and perplexity per window; the windows of a document are one unit.

    Args:
        model, documents, window, batch_size, progress: as `perplexity`.

    Raises:
        ValueError: as `perplexity`.
    """
    pieces, units = [], []
    for number, document in enumerate(documents):
        own = split_windows(document, window)
        pieces += own
        units += [number] * len(own)
    if not pieces:
        raise ValueError("no document has two tokens: perplexity needs one to read and one to predict")
    sums = torch.zeros(len(pieces), dtype=torch.float64)
    counts = torch.tensor([len(piece) - 1 for piece in pieces])
    with evaluating(model):
        for numbers, tokens, lengths in progress(
            list(padded_batches([piece.tolist() for piece in pieces], batch_size)), "perplexity"
        ):
            is_scored = torch.arange(1, tokens.shape[1]) < lengths[:, None]
            sums[numbers] = token_losses(model, tokens).cpu().double().where(is_scored, 0.0).sum(dim=1)
    nll = PerSample(sums, torch.tensor(units), weights=counts)
    return {"nll": nll, "perplexity": nll._replace(exponential=True)}


def split_windows(document: Tensor, window: int) -> list[Tensor]:
    """Return windows of `window` + 1 tokens that share one token, so that each token but the first is predicted once.

    Raises:
        ValueError: the window is below 1.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    return [document[begin : begin + window + 1] for begin in range(0, len(document) - 1, window)]


def exponential(nll: float) -> float:
    """Return exp, infinite where it overflows."""
    return math.exp(nll) if nll < 700 else math.inf
