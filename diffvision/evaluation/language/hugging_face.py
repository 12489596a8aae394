"""The attention of transformers' models computed from maps that a function sees. transformers is imported only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_NAME = "diffvision_explicit"


@contextmanager
def explicit_attention(model: Any, look: Callable[..., Any]) -> Iterator[None]:
    """Within it, the model's attention is computed from the maps [B, H, P, M, N] of
    `look(q, k, lam, mask, is_causal, scale)`, with q [B, H, P, M, D] (P = 2 for DiffLlama, whose heads i and i + H are
    a pair).

    Raises:
        ValueError: an attention that has more to it than softmax of scaled products (softcap, sinks).
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    last: dict[str, Any] = {"query": None}  # DiffLlama asks twice in a row, for the halves of its values

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        if unknown := [name for name in ("softcap", "s_aux", "position_bias") if settings.get(name) is not None]:
            raise ValueError(f"{type(module).__name__} has {', '.join(unknown)}, which cannot be laid open")
        if query is not last["query"]:
            maps = hasattr(module, "lambda_q1") + 1
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            q, k = (part.unflatten(1, (maps, -1)).transpose(1, 2) for part in (query, keys))
            lam = _diff_llama_lambda(module) if maps == 2 else None
            causal = attention_mask is None and getattr(module, "is_causal", True)
            scale = settings.get("scaling") or query.shape[-1] ** -0.5
            seen = look(q, k, lam, attention_mask, causal, scale)
            last.update(query=query, maps=seen.maps().transpose(1, 2).flatten(1, 2))
        values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        out = last["maps"] @ values.to(last["maps"].dtype)
        return out.transpose(1, 2).to(value.dtype), None

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, mask)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _diff_llama_lambda(module: Any) -> Tensor:
    """A DiffLlama layer's lambda, [1, 1, 1, 1]."""
    first = (module.lambda_q1.float() * module.lambda_k1.float()).sum().exp()
    second = (module.lambda_q2.float() * module.lambda_k2.float()).sum().exp()
    return (first - second + module.lambda_init).view(1, 1, 1, 1)
