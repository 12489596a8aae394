"""Activation outliers: the largest attention logits and hidden states against the median (arXiv 2410.05258, table 5).

Attention logits are those before softmax at allowed positions, pooled over all layers, heads and maps (both maps of a
differential head: microsoft/unilm issue #1666). Hidden states are the outputs of the blocks with their residuals (the
same issue).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, Scores, captured, run_towers
from diffvision.evaluation.language.scoring import Progress, get_device, silent
from diffvision.models.modes import evaluating

TOP = (1, 2, 3, 10, 100)
_DROPPED = 12  # low bits of a float32 that the median's histogram leaves out: bins 1/2048 of their value wide


class Magnitudes:
    """The largest absolute values of a stream of tensors, and their median, without storing the stream.

    Args:
        keep: how many of the largest to store.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._largest = torch.empty(0)
        self._counts = torch.zeros(1 << (31 - _DROPPED), dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        """Add values of any shape."""
        magnitudes = values.detach().float().abs().flatten()
        largest = magnitudes.topk(min(self.keep, magnitudes.numel())).values.cpu()
        self._largest = torch.cat([self._largest, largest]).sort(descending=True).values[: self.keep]
        bins = magnitudes.view(torch.int32).long() >> _DROPPED  # positive floats are in the order of their bits
        self._counts += bins.bincount(minlength=len(self._counts)).cpu()

    def top(self, rank: int) -> float:
        """Return the `rank`-th largest (from 1); NaN if there are fewer values."""
        return self._largest[rank - 1].item() if rank <= len(self._largest) else float("nan")

    def median(self) -> float:
        """Return the lower median, within 1/4096 of its value."""
        total = int(self._counts.sum())
        index = int(torch.searchsorted(self._counts.cumsum(0), (total + 1) // 2))
        edges = torch.tensor([index << _DROPPED, (index + 1) << _DROPPED], dtype=torch.int32)
        return edges.view(torch.float32).double().mean().item() if index else 0.0


def outliers(
    model: nn.Module,
    rows: Tensor,
    *,
    top: Sequence[int] = TOP,
    batch_size: int = 1,
    progress: Progress = silent,
) -> dict[str, float]:
    """Return the top-k and median of absolute attention logits and hidden states.

    Args:
        model: as `analysis.capture.captured`, with its blocks in an `nn.ModuleList`.
        rows: int64 [S, N], which the model reads whole (the paper: 0.4M tokens in all).
        top: ranks among the largest, from 1.
        batch_size: rows at a time; all logits of a layer are in memory at once.

    Returns:
        {"attention_logits/top_1": ..., ..., "attention_logits/median": ..., "hidden_states/top_1": ..., ...}.
    """
    kinds = {"attention_logits": Magnitudes(max(top)), "hidden_states": Magnitudes(max(top))}

    def see(call: Call) -> Scores:
        scores = call.scores()
        kinds["attention_logits"].add(scores.logits[scores.allowed.expand_as(scores.logits)])
        return scores

    def note(block: nn.Module, args: Any, out: Any) -> None:
        kinds["hidden_states"].add(out[0] if isinstance(out, tuple) else out)

    hooks = [block.register_forward_hook(note) for block in decoder_layers(model)]
    try:
        with evaluating(model), captured(model, see):
            for batch in progress(rows.split(batch_size), "activation outliers"):
                run_towers(model, {"tokens": batch.to(get_device(model))})
    finally:
        for hook in hooks:
            hook.remove()
    metrics: dict[str, float] = {}
    for kind, magnitudes in kinds.items():
        metrics |= {f"{kind}/top_{rank}": magnitudes.top(rank) for rank in top}
        metrics[f"{kind}/median"] = magnitudes.median()
    return metrics


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the model's stack of blocks: of its lists of modules, the one with the most parameters.

    Raises:
        ValueError: it has no list of modules.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no nn.ModuleList of layers: give a model that has one")
    return max(lists, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))
