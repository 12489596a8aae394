"""The lookback ratio: how much of its attention a head keeps on the context while a model writes.

Source: Chuang et al. 2024, Lookback Lens (arXiv 2407.07071) section 2.1: a head's mean attention on the tokens of the
context, as a share of that and of its mean attention on the new tokens so far. A low ratio goes with statements that
the context does not support. A differential head has no single softmax map: here it is the magnitude of what multiplies
the values, |map 1 - lambda map 2|, as in `statistics.shares`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, captured, run_towers
from diffvision.models.modes import evaluating


def lookback_ratio(applied: Tensor, context: int) -> Tensor:
    """Return the lookback ratio of each query after the context, [..., N - context].

    It is between 0 and 1: 1 / 2 where a token of the context has as much as a new one, and NaN where a head's row is
    all zeros.

    Args:
        applied: what multiplies the values, causal, [..., N, N]; its sign does not count.
        context: the number of tokens of the context; those after it are the new ones, the query's own included.

    Raises:
        ValueError: no token is of the context, or none after it.
    """
    length = applied.shape[-1]
    if not 0 < context < length:
        raise ValueError(f"context is {context} of {length} tokens: there must be tokens in it, and after it")
    rows = applied[..., context:, :].abs()
    new_tokens = torch.arange(1, length - context + 1, dtype=rows.dtype, device=rows.device)
    looking_back = rows[..., :context].mean(dim=-1)
    return looking_back / (looking_back + rows[..., context:].sum(dim=-1) / new_tokens)


def lookback_ratios(model: nn.Module, tokens: Tensor, context: int) -> dict[str, Tensor]:
    """Return the lookback ratios of all heads over a text, {layer's name: [H, N - context]}.

    Args:
        model: as `analysis.capture.captured`, causal.
        tokens: int64 [N], on the model's device: the context, and what was written after it.
        context: the number of tokens of the context. Lookback Lens counts the prompt's last words ("#Summary#:") as
            new ones.

    Raises:
        ValueError: as `lookback_ratio`; a model whose attention cannot be captured.
    """
    ratios: dict[str, Tensor] = {}

    def see(call: Call) -> None:
        ratios[call.name] = lookback_ratio(call.scores().applied()[0], context)

    with evaluating(model), captured(model, see):
        run_towers(model, {"tokens": tokens[None]})
    return ratios
