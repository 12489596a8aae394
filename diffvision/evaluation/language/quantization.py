"""Attention logits quantised after training, and what that does to the loss (arXiv 2410.05258, figure 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, Scores, captured
from diffvision.evaluation.language.options import Granularity
from diffvision.evaluation.language.perplexity import exponential
from diffvision.evaluation.language.scoring import Progress, token_losses, unseen
from diffvision.models.modes import evaluating

_SHARED = {"layer": (1, 2, 3, 4), "head": (3, 4), "row": (4,)}  # axes of [B, H, P, M, N] that share a scale


def quantised(logits: Tensor, allowed: Tensor, bits: int, granularity: Granularity = "layer") -> Tensor:
    """Round logits to the nearest of 2 ** bits - 1 even levels from -a to a (dynamic absmax).

    a is the largest absolute value that any query may attend to.

    Args:
        logits: [B, H, P, M, N].
        allowed: boolean, broadcastable to the logits.
        bits: 2 to 24.
        granularity: what shares an a: "layer", all of a sequence's logits in a layer; "head", one map of one head;
            "row", one query of it. The paper does not say which it used.

    Raises:
        ValueError: bits out of range; unknown granularity.
    """
    if not 2 <= bits <= 24:
        raise ValueError(f"bits is {bits}: give 2 to 24 (a float32 holds no more)")
    if granularity not in _SHARED:
        raise ValueError(f"granularity is {granularity!r}: choose one of {', '.join(_SHARED)}")
    largest = (logits.abs() * allowed).amax(dim=_SHARED[granularity], keepdim=True)
    step = (largest / (2 ** (bits - 1) - 1)).clamp(min=torch.finfo(logits.dtype).tiny)
    return (logits / step).round().clamp(-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1) * step


@contextmanager
def quantised_attention(model: nn.Module, bits: int, granularity: Granularity = "layer") -> Iterator[None]:
    """Have the model attend by quantised logits within the block.

    The padding of a batch of unequal rows counts towards a row's largest logit: give rows of one length, or a batch of
    one.

    Args:
        model: as `analysis.capture.captured`.
        bits: as `quantised`.
        granularity: as `quantised`.
    """

    def quantise(call: Call) -> Scores:
        scores = call.scores()
        return scores._replace(logits=quantised(scores.logits, scores.allowed, bits, granularity))

    with captured(model, quantise):
        yield


def quantization(
    model: nn.Module,
    rows: Tensor,
    *,
    bits: Sequence[int] = (16, 8, 6, 4),
    granularity: Granularity = "layer",
    also: Mapping[str, Callable[[Any], float]] | None = None,
    batch_size: int = 8,
    progress: Progress = unseen,
) -> dict[str, float]:
    """Return the loss with attention logits as they are, and at each number of bits.

    Args:
        model: as `analysis.capture.captured`.
        rows: int64 [S, N], which the model reads whole.
        bits: as `quantised`.
        granularity: as `quantised`.
        also: further numbers to take of the model under each of these, such as its needle accuracy. Its batches must
            have rows of one length.

    Returns:
        {"nll/full": nats a token, "perplexity/full": ..., "nll/16": ..., "<name of also>/16": ..., ...}.
    """
    metrics: dict[str, float] = {}
    for count in progress([None, *bits], "quantised attention"):
        attention = nullcontext() if count is None else quantised_attention(model, count, granularity)
        with evaluating(model), attention:
            nll = row_losses(model, rows, batch_size).mean().item()
            others = {name: take(model) for name, take in (also or {}).items()}
            values = {"nll": nll, "perplexity": exponential(nll), **others}
        metrics |= {f"{name}/{count or 'full'}": value for name, value in values.items()}
    return metrics


def row_losses(model: nn.Module, rows: Tensor, batch_size: int) -> Tensor:
    """Return the model's loss of each of rows [S, N], nats a token, float64 [S]."""
    return torch.cat([token_losses(model, batch).double().mean(dim=1).cpu() for batch in rows.split(batch_size)])
