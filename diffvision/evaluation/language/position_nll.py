"""Cumulative average negative log-likelihood by position, which shows whether a longer context helps.

Source: arXiv 2410.05258, figure 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffvision.evaluation.language.scoring import Progress, silent, token_losses
from diffvision.models.modes import evaluating


def position_nll(
    model: Any,
    documents: Sequence[Tensor],
    *,
    length: int,
    points: int = 32,
    batch_size: int = 8,
    progress: Progress = silent,
) -> dict[str, float]:
    """Return the mean loss of the first p predictions of documents, for p at even steps up to `length`.

    Args:
        model: see `scoring`.
        documents: int64 [N] each; of those with more than `length` tokens the first length + 1 are used, others not.
        length: positions, the longest context.
        points: the number of values returned, at most.

    Returns:
        {"nll/<p>": mean in nats of predictions 1..p, ...}, and "documents", how many were long enough.

    Raises:
        ValueError: no document is long enough.
    """
    long = [document[: length + 1] for document in documents if len(document) > length]
    if not long:
        longest = max((len(document) for document in documents), default=0)
        raise ValueError(
            f"no document has more than {length} tokens (the longest has {longest}): give a smaller length or longer "
            "documents"
        )
    total = torch.zeros(length, dtype=torch.float64)
    starts = list(range(0, len(long), batch_size))
    with evaluating(model):
        for start in progress(starts, "NLL by position"):
            total += token_losses(model, torch.stack(long[start : start + batch_size])).double().sum(dim=0).cpu()
    average = total.cumsum(0) / torch.arange(1, length + 1) / len(long)
    kept = torch.linspace(1, length, min(points, length)).round().long().unique().tolist()
    return {f"nll/{position}": average[position - 1].item() for position in kept} | {"documents": float(len(long))}
