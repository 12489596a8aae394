"""Attention laid open: every attention of a model computed by its formula, for a function to look at and to change.

Ours and Hugging Face's models alike. All logits of a layer are in memory at once, [B, H, P, N, N]: choose batch and
length accordingly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffvision.evaluation.language.hugging_face import explicit_attention
from diffvision.nn import AttentionLayer


class AttentionCall(NamedTuple):
    """One layer's attention. B batch, H heads, P maps a head (2 in differential layers), M queries, N keys."""

    logits: Tensor  # [B, H, P, M, N] in float32 or better, scaled, before the mask
    allowed: Tensor  # boolean, broadcastable to the logits: True = may attend
    lam: Tensor | None = None  # broadcastable to [B, H, M, 1]; None in standard layers

    def maps(self) -> Tensor:
        """The softmax maps [B, H, P, M, N]; a row that may attend to nothing is zeros."""
        lowest = torch.finfo(self.logits.dtype).min
        return self.logits.masked_fill(~self.allowed, lowest).softmax(dim=-1) * self.allowed

    def applied(self) -> Tensor:
        """What multiplies the values, [B, H, M, N]: map 1 - lambda * map 2, or the one map."""
        maps = self.maps()
        return maps[:, :, 0] if self.lam is None else maps[:, :, 0] - self.lam * maps[:, :, 1]

    def last_query(self) -> AttentionCall:
        """The same for the last query alone, M = 1."""
        lam = None if self.lam is None else self.lam[..., -1:, :]
        return AttentionCall(self.logits[..., -1:, :], self.allowed[..., -1:, :], lam)


See = Callable[[AttentionCall], Tensor | None]
"""Looks at an attention; returns logits to go on with in place of its own, or None."""


@contextmanager
def attention_seen(model: nn.Module, see: See) -> Iterator[None]:
    """Within it, `see` is called for every attention layer at every forward pass, in the order of the layers.

    Args:
        model: one with layers of `diffvision.nn`, or a Hugging Face model whose attention goes through transformers'
            attention interface (DiffLlama's heads are paired as it pairs them).
        see: see `See`.

    Raises:
        ValueError: a model of neither kind, or none of whose attentions was reached within the block.
    """
    calls = 0

    def counted(call: AttentionCall) -> AttentionCall:
        nonlocal calls
        calls += 1
        changed = see(call)
        return call if changed is None else call._replace(logits=changed)

    layers = [module for module in model.modules() if isinstance(module, AttentionLayer)]
    hugging_face = not layers and hasattr(model, "set_attn_implementation")
    for layer in layers:
        layer.__dict__["_attend"] = functools.partial(_attend, layer, counted)  # before the class's own
    try:
        with explicit_attention(model, functools.partial(_look, counted)) if hugging_face else nullcontext():
            yield
    finally:
        for layer in layers:
            del layer.__dict__["_attend"]
    if not calls:
        raise ValueError(
            f"no attention of this {type(model).__name__} could be seen: it takes layers of diffvision.nn, or a "
            "Hugging Face model that uses transformers' attention interface"
        )


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's stack of blocks: of its lists of modules, the one with the most parameters.

    Raises:
        ValueError: it has no list of modules.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(f"{type(model).__name__} keeps no nn.ModuleList, in which its layers could be found")
    return max(lists, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))


def _attend(
    layer: AttentionLayer,
    see: Callable[[AttentionCall], AttentionCall],
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """As the layer's own `_attend`, from logits that can be seen."""
    compute_lambda: Any = getattr(layer, "compute_lambda", None)
    lam = None if compute_lambda is None else compute_lambda(x)
    lam = lam.view(1, 1, 1, 1) if lam is not None and lam.ndim < 4 else lam  # V1: one number for all
    applied = _look(see, q, k, lam, mask, is_causal, layer.head_dim**-0.5).applied()
    with torch.autocast(q.device.type, enabled=False):
        values = v.to(applied.dtype).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return (applied @ values).to(v.dtype)


def _look(
    see: Callable[[AttentionCall], AttentionCall],
    q: Tensor,
    k: Tensor,
    lam: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> AttentionCall:
    """What is made of q [B, H, P, M, D], k [B, Hk, Pk, N, D] and a boolean mask [.., M, N] after `see` has seen it."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q.shape[3], k.shape[3]
    with torch.autocast(q.device.type, enabled=False):
        grouped = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        logits = (q.to(dtype) * scale) @ grouped.transpose(-1, -2)
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    allowed = allowed.tril(keys - queries) if is_causal else allowed
    if mask is not None:  # [B, H, M, N]: the maps of a head share it
        allowed = allowed & mask.reshape((1,) * (4 - mask.dim()) + mask.shape).unsqueeze(2)
    return see(AttentionCall(logits, allowed, None if lam is None else lam.to(dtype)))
