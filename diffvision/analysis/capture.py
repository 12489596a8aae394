"""Capture the queries, keys, values, lambda and mask of a model's attention layers while the model runs.

`captured` is the only hook for layers of `diffvision.nn`, timm's and OpenCLIP's attention and transformers' models.
Captured calls are used in `maps`, `statistics`, `relevance` and `heads`, and in `diffvision.evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import DiffAttention as TimmDiffAttention
from timm.models.vision_transformer import DiffParallelScalingBlock
from torch import Tensor, nn

from diffvision.nn import AttentionLayer, Inputs
from diffvision.ops.attention.document_masks import boolean_mask

_TIMM = (TimmDiffAttention, DiffParallelScalingBlock)
_INTERFACE = "diffvision_captured"  # the name of our function in transformers' attention interface


Combine = Callable[[Tensor, Tensor | None, Tensor], Tensor]
"""Maps [B, H, P, M, N], lambda and the mask [B, H, M, N] -> the map that weights the values [B, H, M, N]."""


class Scores(NamedTuple):
    """Attention logits, and what turns them into maps.

    B batch, H heads, P maps per head (2 in differential layers, 1 in standard ones), M queries, N keys.
    """

    logits: Tensor  # [B, H, P, M, N] in float32 or better, scaled, before the mask
    allowed: Tensor  # boolean, broadcastable to the logits: True = may attend
    lam: Tensor | None = None  # broadcastable to [B, H, M, 1]; None in standard layers
    # The map that weights the values [B, H, M, N], from maps, lambda and `allowed`; None for map 1 - lambda * map 2.
    combine: Combine | None = None
    is_rowwise: bool = True  # whether a query's row of that map depends on no other query

    def maps(self) -> Tensor:
        """Return the softmax maps [B, H, P, M, N]; a row that may attend to nothing is zeros."""
        lowest = torch.finfo(self.logits.dtype).min
        return self.logits.masked_fill(~self.allowed, lowest).softmax(dim=-1) * self.allowed

    def compute_weights(self) -> Tensor:
        """Return the map that weights the values [B, H, M, N]: map 1 - lambda * map 2, or the variant's combination."""
        return self.combine_maps(self.maps())

    def combine_maps(self, maps: Tensor) -> Tensor:
        """Return the map that weights the values [B, H, M, N], from softmax maps [B, H, P, M, N]."""
        if self.combine is not None:
            return self.combine(maps, self.lam, self.allowed.expand_as(maps)[:, :, 0])
        return maps[:, :, 0] if self.lam is None else maps[:, :, 0] - self.lam * maps[:, :, 1]

    def last_query(self) -> Scores:
        """Return the scores of the last query alone, M = 1.

        Raises:
            ValueError: a row depends on the other queries.
        """
        if not self.is_rowwise:
            raise ValueError("a row of this map depends on the other queries: take the last row of `compute_weights()`")
        lam = None if self.lam is None else self.lam[..., -1:, :]
        return self._replace(logits=self.logits[..., -1:, :], allowed=self.allowed[..., -1:, :], lam=lam)


@dataclass
class Call:
    """What one attention layer computes with in a forward pass.

    Attributes:
        name: of the layer's module in the model; "layers.0" and so on in transformers' models, and in a Llava of ours
            "language_model.layers.0".
        layer: the module.
        q: queries [B, H, P, M, D].
        k: keys [B, Hk, P, N, D], or [B, Hk, 1, N, D] where the maps share one key.
        v: values [B, Hk, N, V], which `see` may replace (not timm's); None in DiffLlama, which reads them in halves.
        lam: broadcastable to [B, H, M, 1]; None in standard layers.
        mask: boolean, True = may attend, broadcastable to [B, H, M, N].
        is_causal: whether each query attends to no key after it.
        scale: of the logits.
        combine: as in `Scores`.
        is_rowwise: as in `Scores`.
        projected: the heads' outputs as the output projection takes them, once it has run; before a norm or gate of
            timm's plain attention; None in transformers' models.
    """

    name: str
    layer: Any
    q: Tensor
    k: Tensor
    v: Tensor | None
    lam: Tensor | None
    mask: Tensor | None
    is_causal: bool
    scale: float
    combine: Combine | None = None
    is_rowwise: bool = True
    projected: Tensor | None = None

    def scores(self) -> Scores:
        """Compute the logits [B, H, P, M, N], which are in memory all at once: choose batch and length accordingly."""
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        queries, keys = self.q.shape[3], self.k.shape[3]
        with torch.autocast(self.q.device.type, enabled=False):
            grouped = self.k.to(dtype).repeat_interleave(self.q.shape[1] // self.k.shape[1], dim=1)
            logits = (self.q.to(dtype) * self.scale) @ grouped.transpose(-1, -2)
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=self.q.device)
        allowed = allowed.tril(keys - queries) if self.is_causal else allowed
        if self.mask is not None:  # [B, H, M, N]: the maps of a head share it
            allowed = allowed & self.mask.reshape((1,) * (4 - self.mask.dim()) + self.mask.shape).unsqueeze(2)
        lam = None if self.lam is None else self.lam.to(dtype)
        return Scores(logits, allowed, lam, self.combine, self.is_rowwise)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values of each head, [B, H, N, V]."""
        assert self.v is not None
        return self.v.to(dtype).repeat_interleave(self.q.shape[1] // self.v.shape[1], dim=1)


See = Callable[[Call], Scores | None]
"""Called with each `Call`; returns scores to compute the layer's output from, or None to let the layer compute it."""


@contextmanager
def captured(model: nn.Module, see: See) -> Iterator[None]:
    """Call `see` for every attention layer at every forward pass within the block, in the order of the layers.

    Args:
        model: a model of ours, timm or OpenCLIP whose attention calls torch's scaled_dot_product_attention or is timm's
            differential one, or a transformers model that uses transformers' attention interface (DiffLlama's heads are
            paired as in its code).
        see: called for each layer, see `See`. If it returns None, a transformers layer is computed from
            `Call.scores()`. timm's differential attention can be read, not changed.

    Raises:
        ValueError: no attention was captured within the block, `see` returned scores for timm's differential attention,
            or a layer adds a bias to its logits.
    """
    calls = 0

    def count_and_see(call: Call) -> Scores | None:
        nonlocal calls
        calls += 1
        return see(call)

    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, AttentionLayer) and not layer.no_maps:
                stack.enter_context(_capture_ours(name, layer, count_and_see))
            elif isinstance(layer, _TIMM):
                stack.enter_context(_capture_timm(name, layer, count_and_see))
        for name, part in _transformers_parts(model).items():
            stack.enter_context(_capture_transformers(name, part, count_and_see))
        plain = {layer: name for name, layer in model.named_modules() if _is_plain(layer)}
        if plain and not is_transformers(model):
            stack.enter_context(_capture_plain(plain, count_and_see))
        yield
    if not calls:
        raise ValueError(_no_attention(model))


def check_attention(model: nn.Module) -> None:
    """Raise a ValueError, before any work, if the model has no attention that can be captured."""
    kinds = (AttentionLayer, *_TIMM)
    captured = (
        _is_plain(layer) or (isinstance(layer, kinds) and not getattr(layer, "no_maps", ""))
        for layer in model.modules()
    )
    if not any(captured) and not _transformers_parts(model):
        raise ValueError(_no_attention(model))


def is_transformers(model: Any) -> bool:
    """Return whether a model is a transformers model without layers of this package or a tower of timm."""
    other = any(isinstance(module, AttentionLayer) or hasattr(module, "timm_model") for module in model.modules())
    return hasattr(model, "set_attn_implementation") and not other


def _transformers_parts(model: Any) -> dict[str, Any]:
    """Return the model if it is transformers', or those in it that are, by the beginning of their layers' names."""
    if is_transformers(model):
        return {"": model}
    children = model.named_children() if hasattr(model, "set_attn_implementation") else ()
    return {f"{name}.": part for name, part in children if is_transformers(part)}


def run_towers(model: Any, batch: Mapping[str, Any]) -> None:
    """Run the towers that the batch has inputs for.

    Args:
        model: a timm, OpenCLIP, language or transformers model.
        batch: `image` [B, 3, h, w] and/or `text` [B, L], or `tokens` [B, N]; a vision-language model's `image` and
            `tokens` with placeholders.

    Raises:
        ValueError: the batch has text, and the model takes images only.
    """
    if "image" in batch and "tokens" in batch:
        images = batch["image"] if len(batch["image"]) else None
        model(batch["tokens"], images, use_cache=False, logits_to_keep=1)
        return
    if "image" in batch:
        getattr(model, "encode_image", model)(batch["image"])
    if "text" in batch:
        if not hasattr(model, "encode_text"):
            raise ValueError(f"{type(model).__name__} has no encode_text: it takes images only")
        model.encode_text(batch["text"])
    if "tokens" in batch:
        if hasattr(model, "hidden"):  # ours, without the head
            model.hidden(batch["tokens"])
        else:
            model(batch["tokens"], **({"use_cache": False} if is_transformers(model) else {}))


def _no_attention(model: nn.Module) -> str:
    """Return why no layer of a model can be captured."""
    for layer in model.modules():
        if isinstance(layer, AttentionLayer) and layer.no_maps:
            return f"no attention of this {type(model).__name__} can be captured: {layer.no_maps}"
    return (
        f"no attention of this {type(model).__name__} can be captured: give a model of ours, a vision transformer of "
        "timm or OpenCLIP, or a transformers model that uses its attention interface"
    )


# ---- ours and timm's -----------------------------------------------------------------------------------------------


@contextmanager
def _capture_ours(name: str, layer: AttentionLayer, see: See) -> Iterator[None]:
    """Replace the layer's `attend` by one that also shows its inputs, for as long as the context lasts."""
    attend = layer.attend
    calls: list[Call] = []

    def attend_and_see(inputs: Inputs) -> Tensor:
        inputs = inputs._replace(mask=boolean_mask(inputs.mask))
        x, q, k, v, mask, is_causal, _, _ = inputs

        def combine(maps: Tensor, lam: Tensor | None, allowed: Tensor) -> Tensor:
            return layer.combine(maps, lam, inputs._replace(mask=allowed, is_causal=False))

        lam = layer.compute_lambda(x)
        lam = None if lam is None else _four_axes(lam)
        scale, is_rowwise = layer.head_dim**-0.5, layer.cacheable
        call = Call(name, layer, q, k, v, lam, mask, is_causal, scale, combine, is_rowwise)
        scores = see(call)
        calls.append(call)
        if scores is None:
            return attend(inputs)
        weights = scores.compute_weights()
        with torch.autocast(q.device.type, enabled=False):
            return (weights @ call.values(weights.dtype)).to(v.dtype)

    layer.__dict__["attend"] = attend_and_see  # found before the class's method
    try:
        with _note_projection(layer.proj, calls):
            yield
    finally:
        del layer.__dict__["attend"]


@contextmanager
def _capture_timm(name: str, layer: Any, see: See) -> Iterator[None]:
    """Show the inputs of timm's differential attention, for as long as the context lasts."""
    calls: list[Call] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(("x", "attn_mask", "is_causal"), args, strict=False)) | kwargs
        mask, is_causal = boolean_mask(arguments.get("attn_mask")), bool(arguments.get("is_causal", False))
        with torch.no_grad():
            q, k, v = _timm_projections(layer, arguments["x"])
            lam = _four_axes(layer._compute_lambda())
        call = Call(name, layer, q, k, v, lam, mask, is_causal, layer.head_dim**-0.5)
        if see(call) is not None:
            raise ValueError(
                f"{name} is timm's {type(layer).__name__}, whose attention can be read, not changed: give one of ours"
            )
        calls.append(call)

    hook = layer.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        with _note_projection(layer.out_proj if isinstance(layer, DiffParallelScalingBlock) else layer.proj, calls):
            yield
    finally:
        hook.remove()


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is plain attention of timm, OpenCLIP or torch that calls torch's fused operation."""
    if isinstance(layer, (AttentionLayer, *_TIMM)):
        return False
    return isinstance(layer, nn.MultiheadAttention) or bool(getattr(layer, "fused_attn", False))


@contextmanager
def _capture_plain(layers: Mapping[nn.Module, str], see: See) -> Iterator[None]:
    """Show what these layers give torch's scaled_dot_product_attention; cross-attention is left alone."""
    active: list[nn.Module] = []  # the captured layers whose forward is running, the innermost last
    functional: Any = F
    attend = F.scaled_dot_product_attention

    def attend_and_see(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute torch's attention, and within a captured layer show `see` the call and use the scores it returns."""
        unchanged = partial(
            attend, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if not active or query.ndim != 4 or query.shape[2] != key.shape[2]:
            return unchanged()
        layer = active[-1]
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        q, k = query[:, :, None], key[:, :, None]
        call = Call(layers[layer], layer, q, k, value, None, boolean_mask(attn_mask), is_causal, factor)
        scores = see(call)
        if scores is None:
            heads = unchanged()
        else:
            weights = scores.compute_weights()
            heads = (weights @ call.values(weights.dtype)).to(value.dtype)
        # The output is a view of `projected`, so that gradients with respect to it can be taken.
        call.projected = heads.transpose(1, 2).flatten(2)
        return call.projected.unflatten(2, (heads.shape[1], heads.shape[3])).transpose(1, 2)

    hooks = [layer.register_forward_pre_hook(lambda layer, _: active.append(layer)) for layer in layers]
    hooks += [layer.register_forward_hook(lambda *_: active.pop() and None) for layer in layers]
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no function that can be replaced
    functional.scaled_dot_product_attention = attend_and_see
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attend
        torch.backends.mha.set_fastpath_enabled(is_fast)
        for hook in hooks:
            hook.remove()


@contextmanager
def _note_projection(projection: nn.Module, calls: list[Call]) -> Iterator[None]:
    """Store the input of a layer's output projection in the layer's last call."""

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if calls:  # empty if the layer was called with `maps`, which bypasses the captured method
            calls.pop().projected = args[0]

    hook = projection.register_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()


def _timm_projections(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k [B, H, 2, N, D] and values [B, H, N, 2D] of timm's two modules."""
    if isinstance(layer, DiffParallelScalingBlock):
        _, q, k, v = layer.in_proj(layer.in_norm(x)).split(layer.in_split, dim=-1)
    else:
        q, k, v = layer.qkv(x).chunk(3, dim=2)
    paired = (layer.num_heads, 2, layer.head_dim)
    q = layer.q_norm(q.unflatten(-1, paired)).permute(0, 2, 3, 1, 4)
    k = layer.k_norm(k.unflatten(-1, paired)).permute(0, 2, 3, 1, 4)
    return q, k, v.unflatten(-1, (layer.num_heads, 2 * layer.head_dim)).transpose(1, 2)


def _four_axes(lam: Tensor | float) -> Tensor:
    """Return lambda with four axes, from any shape that broadcasts to [B, H, N, 1]; V1 has one number for all."""
    lam = torch.as_tensor(lam)
    return lam.reshape((1,) * (4 - lam.ndim) + lam.shape)


# ---- transformers' -------------------------------------------------------------------------------------------------


@contextmanager
def _capture_transformers(prefix: str, model: Any, see: See) -> Iterator[None]:
    """Have transformers compute attention by the formula within the block; names of layers have a prefix.

    Raises:
        ValueError: an attention layer computes more than a softmax of scaled products (softcap, sinks).
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    last: dict[str, Any] = {"query": None}  # DiffLlama asks twice in a row, for the halves of its values
    lambdas: dict[nn.Module, Tensor] = {}  # of V2's layers

    def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        lambdas[layer] = layer.lambda_proj(states).float().sigmoid().transpose(1, 2)[..., None]

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        if query is not last["query"]:
            call = _transformers_call(prefix, module, query, key, value, attention_mask, lambdas, settings)
            maps = (see(call) or call.scores()).maps()
            maps = maps if module in lambdas else maps.transpose(1, 2)
            last.update(query=query, maps=maps.flatten(1, 2), values=call.v)
        values = value if last["values"] is None else last["values"]
        values = values.repeat_interleave(query.shape[1] // values.shape[1], dim=1)
        out = last["maps"] @ values.to(last["maps"].dtype)
        return out.transpose(1, 2).to(value.dtype), None

    before = model.config._attn_implementation
    AttentionInterface.register(_INTERFACE, attend)
    AttentionMaskInterface.register(_INTERFACE, mask)
    model.set_attn_implementation(_INTERFACE)
    hooks = [
        layer.register_forward_pre_hook(note, with_kwargs=True)
        for layer in model.modules()
        if hasattr(layer, "lambda_proj")
    ]
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


def _transformers_call(
    prefix: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    lambdas: Mapping[nn.Module, Tensor],
    settings: Mapping[str, Any],
) -> Call:
    """Return the call of a transformers layer; DiffLlama's heads i and i + H are a pair, V2's 2i and 2i + 1."""
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if settings.get(name) is not None]:
        raise ValueError(
            f"{type(module).__name__} has {', '.join(unknown)}, which cannot be captured: give a model of timm, "
            "OpenCLIP or diffvision"
        )
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    lam: Tensor | None
    v: Tensor | None
    if module in lambdas:
        q, k = (part.unflatten(1, (-1, 2)) for part in (query, keys))
        lam, v = lambdas[module], value
    else:
        maps = hasattr(module, "lambda_q1") + 1
        q, k = (part.unflatten(1, (maps, -1)).transpose(1, 2) for part in (query, keys))
        lam, v = (diff_llama_lambda(module), None) if maps == 2 else (None, value)
    is_causal = attention_mask is None and getattr(module, "is_causal", True)
    scale = settings.get("scaling") or query.shape[-1] ** -0.5
    return Call(f"{prefix}layers.{module.layer_idx}", module, q, k, v, lam, attention_mask, is_causal, scale)


def diff_llama_lambda(module: Any) -> Tensor:
    """Return a DiffLlama layer's lambda, [1, 1, 1, 1]."""
    first = (module.lambda_q1.float() * module.lambda_k1.float()).sum().exp()
    second = (module.lambda_q2.float() * module.lambda_k2.float()).sum().exp()
    return (first - second + module.lambda_init).view(1, 1, 1, 1)
