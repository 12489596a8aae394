"""What each layer's differential maps add up to, and what its heads give: statistics by layer over rows of tokens.

A differential row sums to 1 - lambda and has negative entries; where lambda nears 1, heads' outputs shrink, and the
head norm of V1 scales them up again (arXiv 2410.05258 section 2.1; DIFF V2 leaves the norm out for the gradients that
this makes). Statistics of one text by head are in `inspection`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, Scores, captured, run_towers
from diffvision.analysis.statistics import rms, row_sums
from diffvision.evaluation.language.scoring import Progress, device_of, unseen
from diffvision.models.modes import evaluating
from diffvision.nn import AttentionLayer


def head_statistics(
    model: nn.Module, rows: Tensor, *, batch_size: int = 1, progress: Progress = unseen
) -> dict[str, float]:
    """Return means over tokens, heads and rows of each layer.

    Args:
        model: of ours; in standard layers the sums are 1 and nothing is negative.
        rows: int64 [S, N], which the model reads whole.
        batch_size: rows at a time.

    Returns:
        For each layer i from 0: "row_sum/i" and its standard deviation "row_sum_std/i"; "negative/i", the share of
        entries below 0 among those that may attend; "absolute/i", the sum of a row's absolute values; "rms/i" and
        "rms_min/i", root mean square of a head's output before the head norm, its mean and its least over tokens and
        heads.

    Raises:
        ValueError: a model without layers of `diffvision.nn`.
    """
    names = [name for name, layer in model.named_modules() if isinstance(layer, AttentionLayer)]
    if not names:
        raise ValueError(f"{type(model).__name__} has no attention layer of diffvision.nn: give one of our models")
    sums: dict[str, list[Tensor]] = {name: [] for name in names}
    shares: dict[str, list[Tensor]] = {name: [] for name in names}  # of a batch: negative, absolute
    sizes: dict[str, list[Tensor]] = {name: [] for name in names}

    def see(call: Call) -> Scores:
        scores = call.scores()
        applied = scores.applied()
        allowed = scores.allowed.expand_as(scores.logits)[:, :, 0]
        negative = ((applied < 0) & allowed).sum() / allowed.sum()
        heads = (applied @ call.values(applied.dtype)).to(call.q.dtype)
        sums[call.name].append(row_sums(applied).flatten().double())
        shares[call.name].append(torch.stack([negative.double(), applied.abs().sum(-1).mean().double()]))
        sizes[call.name].append(rms(heads.double()).flatten())
        return scores

    with evaluating(model), captured(model, see):
        for batch in progress(rows.split(batch_size), "heads"):
            run_towers(model, {"tokens": batch.to(device_of(model))})
    metrics: dict[str, float] = {}
    for index, name in enumerate(names):
        row, (negative, absolute) = torch.cat(sums[name]), torch.stack(shares[name]).mean(0).tolist()
        heads = torch.cat(sizes[name])
        metrics |= {f"row_sum/{index}": row.mean().item(), f"row_sum_std/{index}": row.std(correction=0).item()}
        metrics |= {f"negative/{index}": negative, f"absolute/{index}": absolute}
        metrics |= {f"rms/{index}": heads.mean().item(), f"rms_min/{index}": heads.min().item()}
    return metrics
