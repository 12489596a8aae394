"""Attention with a learned sink: plain attention with one more logit per head in the softmax, whose value is zero."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffvision import ops
from diffvision.nn.attention import Attention, Inputs
from diffvision.ops.attention.document_masks import boolean_mask

_PAD = 8  # channels, so that sizes stay those of torch's kernels


class SinkAttention(Attention):
    """Softmax attention over [s_h, logits], where s_h is learned for each head and has a value of zero.

        head_i = sum_j exp(l_ij) v_j / (exp(s_h) + sum_j exp(l_ij))

    A row sums to less than 1, so a token can attend to nothing. s starts at 0, which is
    softmax-off-by-one. The sink is one more key before all others, so that causal masks stay aligned to the last key:
    queries have one more channel that holds s_h, keys a zero there, and the sink's key a one. Eight channels are added
    for it, and torch's attention needs no float mask. The arguments are those of `AttentionLayer`.

    Source: the sinks of gpt-oss; evanmiller.org "Attention is off by one" for s = 0.
    """

    variant, identifying_weight = "sink", "sink"
    no_adapting = ", but a sink above -inf changes every row, and one of -inf has no gradient"

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        """Make s [H]."""
        self.sink = nn.Parameter(torch.empty(self.num_heads, **factory_kwargs))

    def reset_parameters(self) -> None:
        """Set s to zero."""
        nn.init.zeros_(self.sink)

    def attend(self, inputs: Inputs) -> Tensor:
        _, q, k, v, mask, is_causal, dropout, _ = inputs
        q, k = q.squeeze(2), k.squeeze(2)
        count, wide = k.shape[2], self.head_dim + _PAD  # the operation divides logits by the root of `wide`
        logit = (self.sink.float() * wide**0.5).to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
        q = F.pad(torch.cat((q * (wide / self.head_dim) ** 0.5, logit), dim=-1), (0, _PAD - 1))
        key = F.pad(k.new_ones(1), (self.head_dim, _PAD - 1)).expand(*k.shape[:2], 1, wide)
        k = torch.cat((key, F.pad(k, (0, _PAD))), dim=2)
        v = F.pad(v, (0, 0, 1, 0))
        if (mask := boolean_mask(mask)) is not None:  # of packed documents too, each of which sees the sink
            mask = F.pad(mask.expand(*mask.shape[:-1], count), (1, 0), value=True)
        # With a query of the sink as well, torch takes the causal mask by name.
        is_square = is_causal and mask is None and q.shape[2] == count
        q = F.pad(q, (0, 0, 1, 0)) if is_square else q
        out = ops.softmax_attention(q, k, v, causal=is_causal, mask=mask, dropout=dropout)
        return out[:, :, 1:] if is_square else out

    def combine(self, maps: Tensor, lam: Tensor | None, inputs: Inputs) -> Tensor:
        """Return the softmax maps, scaled by one minus the sink's share."""
        q, k = inputs.q.squeeze(2).to(maps.dtype), inputs.k.squeeze(2).to(maps.dtype)
        with torch.autocast(q.device.type, enabled=False):
            k = k.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
            logits = q @ k.mT * self.head_dim**-0.5
        if inputs.is_causal:
            later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(k.shape[2] - q.shape[2] + 1)
            logits = logits.masked_fill(later, -torch.inf)
        if inputs.mask is not None:
            logits = logits.masked_fill(~inputs.mask, torch.finfo(logits.dtype).min)
        total = logits.logsumexp(-1, keepdim=True)
        return maps.squeeze(2) * (total - self.sink.to(maps.dtype)[:, None, None]).sigmoid()
