"""DINT attention: V1 plus lambda times the mean of its first map."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from diffvision import ops
from diffvision.nn.attention import Inputs
from diffvision.nn.diff_attention import DiffAttention


class DintAttention(DiffAttention):
    """DINT: V1 with an integral term, so that the rows of the applied map sum to 1 and not to 1 - lambda.

        head = RMSNorm((A1 - lambda A2 + lambda G) v) * (1 - lambda_init)      A1, A2: V1's softmax maps
        G_i = mean of A1_j over the tokens j that token i may attend to

    Without a mask G is the mean over all queries, the same in every row; in a causal layer it is a running mean, so
    that no token sees a later one; under a padding mask the mean is over real tokens, and among packed documents over
    the token's document (a fourth map, attention with equal weights, takes it without a mask of pairs). In
    cross-attention G is the mean over all queries. Where a mask differs between queries, G_i is the mean over those
    that may attend to no more than token i may, so that it reads nothing hidden from token i. As G v is the mean of
    A1 v, no map is built. But A1 v is needed by itself, and `ops.diff_attention` returns only the
    difference: the first map is computed twice, three maps for V1's two. docs/reference/models.md says what that costs.

    Parameters and arguments are those of `DiffAttention`, whose weights it loads. `attn_drop` is drawn for G's first
    map once more. A token needs the outputs of those before it, so there is no decoding with a cache of keys and
    values.

    Source: arXiv 2501.17486. The applied map without a mask was compared with `MultiheadDintAttention` of
    jwliao1209/Differential-FT-Transformer; that module has no mask, scales the logits by D**0.5 instead of D**-0.5, and
    normalises only if asked. The means under a mask, V1's norm and its factor are this project's reading.
    """

    variant = "v1_dint"
    cacheable = False

    def attend(self, inputs: Inputs) -> Tensor:
        x, q, k, v, mask, is_causal, dropout, _ = inputs
        difference = super().attend(inputs)
        first = ops.softmax_attention(q[:, :, 0], k[:, :, 0], v, causal=is_causal, mask=mask, dropout=dropout)
        if isinstance(mask, ops.Documents):
            equal = torch.zeros_like(q[:, :, 0])
            mean = ops.softmax_attention(equal, equal, first, causal=is_causal, mask=mask)
        else:
            mean = _mean(first, inputs)
        return (difference + self.compute_lambda(x) * mean).to(difference.dtype)

    def combine(self, maps: Tensor, lam: Tensor, inputs: Inputs) -> Tensor:  # type: ignore[override]
        return super().combine(maps, lam, inputs) + lam * _mean(maps[:, :, 0], inputs)


def _mean(rows: Tensor, inputs: Inputs) -> Tensor:
    if inputs.is_cross:
        return mean_over_queries(rows, inputs.mask)
    return mean_of_rows(rows, inputs.mask, inputs.is_causal)


def mean_of_rows(
    rows: Float[Tensor, "B H N X"], mask: Tensor | None, is_causal: bool
) -> Float[Tensor, "B H N X"] | Float[Tensor, "B H 1 X"]:
    """Return for each token the mean of the rows of the tokens that it may attend to, in float32 or better.

    Args:
        rows: a row for each token, of a map or of its output.
        mask: boolean, True = may attend, broadcastable to [B, H, N, N]; combined with is_causal by AND.
        is_causal: each token attends to itself and those before it.

    Returns:
        [B, H, N, X], or [B, H, 1, X] where all tokens have the same mean; zeros for a token that may attend to none.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    count = rows.shape[2]
    if mask is None and not is_causal:
        return rows.mean(dim=2, keepdim=True)
    if mask is None:
        return rows.cumsum(dim=2) / torch.arange(1, count + 1, device=rows.device)[:, None]
    if is_causal:
        mask = mask & torch.ones(count, count, dtype=torch.bool, device=rows.device).tril()
    return _average_selected(mask, rows)


def mean_over_queries(
    rows: Float[Tensor, "B H N X"], mask: Tensor | None
) -> Float[Tensor, "B H N X"] | Float[Tensor, "B H 1 X"]:
    """Return, for each query of cross-attention, the mean of the rows of queries that may attend to no more than it.

    Args:
        rows: a row for each query, of a map or of its output.
        mask: boolean, True = may attend, broadcastable to [B, H, N, L].

    Returns:
        As `mean_of_rows`; a query that may attend to nothing is in no mean.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if mask is None or mask.shape[-2] == 1:
        return rows.mean(dim=2, keepdim=True)
    with torch.autocast(rows.device.type, enabled=False):
        outside = (~mask).to(rows.dtype) @ mask.to(rows.dtype).mT  # [.., i, j]: keys of query j that i may not see
    return _average_selected((outside == 0) & mask.any(dim=-1).unsqueeze(-2), rows)


def _average_selected(selected: Tensor, rows: Tensor) -> Tensor:
    """Return for each token i the mean of rows [B, H, N, X] at the j where the boolean selected[.., i, j] is True."""
    weights = selected.to(rows.dtype)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1)
    with torch.autocast(rows.device.type, enabled=False):
        return weights.expand(*rows.shape[:2], -1, -1) @ rows
