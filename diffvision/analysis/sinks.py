"""Attention sinks: the tokens that heads look at whatever the query, and what they are for.

A head has a sink if one token receives `SINK` or more of its attention, mean over the queries (Gu et al. 2024, arXiv
2410.10781, who count the first token of texts). Its use is one of two (arXiv 2606.08105; the thresholds are ours):

- NOP: the token's value is small, so attending to it adds next to nothing.
- broadcast: the token's value counts, and the head adds the same to every token.

`measure_sinks` has the numbers of one layer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from diffvision.analysis import statistics
from diffvision.analysis.maps import LayerMaps

SINK = 0.3  # of a head's attention, on one token
SMALL = 0.5  # of the median norm of a head's values: below it, a sink's value is small
COMMON = 0.5  # of a head's output: above it, the head adds the same to all tokens
OUTLIER = 3.0  # times the median norm of tokens (arXiv 2309.16588 shows norms of 3 to 10 times the others')


class Sinks(NamedTuple):
    """The sinks of one layer; `value` and `shared_fraction` are NaN where a layer's values are not captured."""

    share_by_key: Tensor  # [H, N], each token's share of the attention
    value: Tensor  # [H], the norm of the value of the token that has most, over the median of the head's
    shared_fraction: Tensor  # [H], part of the output that all queries share
    outputs: Tensor | None  # [H, N, V], of the heads, before a norm

    @property
    def share(self) -> Tensor:
        """Share of the attention on the most attended token, [H]."""
        return self.share_by_key.amax(dim=-1)

    def kinds(self) -> dict[str, Tensor]:
        """Return which heads have a sink, and of which kind, [H] each; a sink may be of both kinds, or of neither."""
        sink = self.share >= SINK
        return {"sink": sink, "nop": sink & (self.value < SMALL), "broadcast": sink & (self.shared_fraction > COMMON)}


@torch.no_grad()
def measure_sinks(layer: LayerMaps) -> Sinks:
    """Return the sinks of one layer."""
    shares = statistics.share_by_key(layer.weights.float())
    if layer.values is None:
        unknown = torch.full_like(shares[:, 0], math.nan)
        return Sinks(shares, unknown, unknown, None)
    norms = layer.values.float().norm(dim=-1)  # [H, N]
    value = norms.gather(1, shares.argmax(dim=-1, keepdim=True))[:, 0] / norms.median(dim=-1).values
    outputs = layer.outputs(layer.weights)[0].float()
    return Sinks(shares, value, statistics.shared_fraction(outputs), outputs)


def relative_norms(hidden: Tensor) -> Tensor:
    """Return the norms [N] of hidden states [N, C] over their median; tokens over `OUTLIER` are outliers."""
    norms = hidden.float().norm(dim=-1)
    return norms / norms.median()
