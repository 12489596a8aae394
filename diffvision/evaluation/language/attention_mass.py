"""The share of attention on the answer and on the rest of the context (arXiv 2410.05258, table 3).

In the contexts of needle retrieval, the attention weights of the query that predicts the answer's first token (the
difference of the maps in differential layers) are summed over four spans: the start token, the needle with the answer,
the rest of the haystack (noise) and the question. The sums are averaged over heads, layers and samples (microsoft/unilm
issue #1654), and normalised so that the spans' absolute values sum to 1. The normalisation comes last because a
difference can be negative, and a single head's row can sum to zero. The paper shows its normalisation in a figure only;
it may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, Scores, captured
from diffvision.evaluation.language.needle import DEPTHS, NeedleSample, needle_samples
from diffvision.evaluation.language.scoring import Progress, get_device, silent
from diffvision.models.modes import evaluating

SPANS = ("start", "answer", "noise", "question")


def attention_mass(
    model: nn.Module, tokenizer: Any, *, depths: Sequence[float] = DEPTHS, progress: Progress = silent, **drawing: Any
) -> dict[str, float]:
    """Return the normalised attention of each span at each depth.

    Args:
        model: as `analysis.capture.captured`.
        tokenizer, depths: as `needle.needle_samples`.
        **drawing: the other arguments of `needle.needle_samples`.

    Returns:
        {"answer/<depth>": ..., "noise/<depth>": ..., "start/<depth>": ..., "question/<depth>": ...}.
    """
    metrics: dict[str, float] = {}
    for depth in progress(list(depths), "attention on the answer"):
        drawn = needle_samples(tokenizer, depth=depth, **drawing)
        masses = torch.stack([span_masses(model, sample) for sample in drawn]).mean(dim=0)
        shares = masses / masses.abs().sum().clamp(min=torch.finfo(masses.dtype).tiny)
        metrics |= {f"{span}/{depth:g}": share for span, share in zip(SPANS, shares.tolist(), strict=True)}
    return metrics


def span_masses(model: nn.Module, sample: NeedleSample) -> Tensor:
    """Return the attention on each of `SPANS`, [4], averaged over heads and layers, not normalised."""
    rows: list[Tensor] = []

    def see(call: Call) -> Scores:
        scores = call.scores()
        last = scores.last_query() if scores.is_rowwise else scores
        rows.append(last.compute_weights()[0, :, -1].mean(dim=0).double().cpu())  # [N]
        return scores

    tokens = torch.tensor([sample.tokens[: sample.answers[0][0]]], device=get_device(model))
    with evaluating(model), captured(model, see):
        model(tokens)
    row = torch.stack(rows).mean(dim=0)
    first = min(1, sample.needle[0])  # a context without a start token may begin with the needle
    start, answer, asked = row[:first].sum(), row[slice(*sample.needle)].sum(), row[sample.question :].sum()
    return torch.stack([start, answer, row.sum() - start - answer - asked, asked])
