"""What each layer's differential maps add up to, and what its heads give: statistics by layer.

A differential row sums to 1 - lambda and has negative entries; where lambda nears 1, heads' outputs shrink, and the
head norm of V1 scales them up again (arXiv 2410.05258 section 2.1; DIFF V2 leaves the norm out for the gradients that
this makes).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.evaluation.language.attention import AttentionCall, attention_seen
from diffvision.evaluation.language.scoring import Progress, device_of, evaluating, unseen
from diffvision.nn import AttentionLayer


def head_statistics(
    model: nn.Module, rows: Tensor, *, batch_size: int = 1, progress: Progress = unseen
) -> dict[str, float]:
    """Means over tokens, heads and rows of each layer.

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
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, AttentionLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer of diffvision.nn: give one of our models")
    sums: list[list[Tensor]] = [[] for _ in layers]
    other: list[list[Tensor]] = [[] for _ in layers]  # of a batch: negative, absolute
    rms: list[list[Tensor]] = [[] for _ in layers]
    calls: Iterator[int] = iter(())  # the layer of each attention, in a pass

    def see(call: AttentionCall) -> None:
        layer, applied = next(calls), call.applied()
        sums[layer].append(applied.sum(-1).flatten().double())
        allowed = call.allowed.expand_as(call.logits)[:, :, 0]
        negative = ((applied < 0) & allowed).sum() / allowed.sum()
        other[layer].append(torch.stack([negative.double(), applied.abs().sum(-1).mean().double()]))

    def note(layer: int) -> Any:
        def hook(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
            rms[layer].append(args[0].double().square().mean(-1).sqrt().flatten())

        return hook

    hooks = [layer.head_norm.register_forward_pre_hook(note(place)) for place, layer in enumerate(layers)]
    try:
        with evaluating(model), attention_seen(model, see):
            for batch in progress(rows.split(batch_size), "heads"):
                calls = iter(range(len(layers)))
                model(batch.to(device_of(model)))
    finally:
        for hook in hooks:
            hook.remove()
    metrics: dict[str, float] = {}
    for place in range(len(layers)):
        row, (negative, absolute) = torch.cat(sums[place]), torch.stack(other[place]).mean(0).tolist()
        heads = torch.cat(rms[place])
        metrics |= {f"row_sum/{place}": row.mean().item(), f"row_sum_std/{place}": row.std(correction=0).item()}
        metrics |= {f"negative/{place}": negative, f"absolute/{place}": absolute}
        metrics |= {f"rms/{place}": heads.mean().item(), f"rms_min/{place}": heads.min().item()}
    return metrics
