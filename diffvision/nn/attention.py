"""The base class of all attention layers, and the standard layer, which is the baseline of each comparison.

A new variant is a class in another file of `nn`, and a row in the table `ATTENTION` of `nn/__init__.py`.

Shapes: B batch, N tokens, H heads (differential ones), Hk key/value heads, P maps a head, D size of a map's head,
V size of a value head, L keys: the tokens themselves, those of a cache, or a context's.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from diffvision import ops
from diffvision.nn.linear import Linear, join
from diffvision.ops.attention.api import attend
from diffvision.ops.attention.document_masks import boolean_mask
from diffvision.ops.autocast import DEVICES, cast_once

torch.fx.wrap("cast_once")  # one node to a tracer: autocast is that of the call

# Of timm's and torch's plain attention, where ours has q_proj, k_proj and v_proj.
_PLAIN = ("qkv.weight", "in_proj_weight")
# Cosines and sines of the tokens' angles, as `ops.rotary_tables` gives them, broadcastable to [B, H, P, N, D / 2].
Rotation = tuple[Tensor, Tensor]


class Cache(Protocol):
    """The interface of a cache of keys and values; the caches are in `diffvision.models.language.kv_cache`."""

    def positions(self, count: int) -> Tensor:
        """Return the positions [N] of the next `count` tokens."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, and return all those to attend to."""


class Inputs(NamedTuple):
    """The inputs of `AttentionLayer.attend`."""

    x: Tensor  # the queries' tokens [B, N, dim]
    q: Tensor  # [B, H, P, N, D]
    k: Tensor  # [B, Hk, Pk, L, D]
    v: Tensor  # [B, Hk, L, V]
    # Boolean, True = may attend, broadcastable to [B, H, N, L]; combined with is_causal by AND. Or documents.
    mask: Any
    is_causal: bool
    dropout: float  # probability of the maps' entries; 0 in evaluation
    is_cross: bool  # whether keys and values are those of a context, and not of x


class HeadNorm(nn.RMSNorm):
    """RMSNorm with its weight cast to the input's dtype: the fused kernel refuses a float32 weight under autocast."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """Return the norm of the last axis times a constant."""
        if factor == 1.0:
            return ops.rms_norm(x, self.weight, self.eps)
        if x.dtype.itemsize < 4:  # a half-precision weight would round the constant, alike in every row
            return ops.rms_norm(x, self.weight, self.eps) * factor
        return ops.rms_norm(x, self.weight * factor, self.eps)  # cheaper than to scale the result


class AttentionLayer(nn.Module):
    """Attention with its projections, the base class of the variants.

    It is self-attention, or with a `context` cross-attention: queries from one sequence, keys and values from another.
    A variant is a subclass with a row in `diffvision.nn.ATTENTION`. It sets the class attributes below and overrides
    `attend` and `combine`, or `compute_lambda` of `DifferentialLayer`. No other module names a variant's class.

    Args:
        dim: width of the tokens, in and out.
        num_heads: heads of the output; differential heads in differential layers.
        num_kv_heads: key/value heads, a divisor of num_heads; num_heads if None.
        head_dim: D of one map's head; if None, the output heads together are as wide as `dim`.
        head_norm: RMSNorm of each head's output, its weight shared by the heads (eps 1e-5).
        qkv_bias: biases of the query, key and value projections.
        proj_bias: bias of the output projection.
        qk_norm: RMSNorm (eps 1e-6) of each query and key head before rotary embedding.
        attn_drop: dropout of the attention maps, drawn for each map separately.
        proj_drop: dropout of the output.
        rotary: base theta of an interleaved rotary embedding on each map's D, or None for no rotary embedding.
        context_dim: width of the context's tokens, for cross-attention; `dim` if None.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: sizes do not divide.
    """

    variant: ClassVar[str]  # its key in `ATTENTION`
    query_maps: ClassVar[int]  # queries per head
    key_maps: ClassVar[int]  # keys per key/value head
    # V / D, and the number of the plain layer's heads that one head has the width of.
    value_maps: ClassVar[int]
    # Values, each of V, of a key/value head.
    values_per_head: ClassVar[int] = 1
    # Whether a token's output depends on the others through their keys and values alone, which a cache holds.
    cacheable: ClassVar[bool] = True
    # Whether lambda depends on the token, so that there is none without a batch.
    lambda_by_token: ClassVar[bool] = False
    # Why no map from tokens to tokens weights the values; empty where one does.
    no_maps: ClassVar[str] = ""
    # Whether the layer attends over a whole grid of patches, of which `set_grid` tells it.
    needs_grid: ClassVar[bool] = False
    # Whether `merge` returns a standard layer that computes the same.
    mergeable: ClassVar[bool] = False
    # The weight by which a state_dict shows that a layer is of this variant, or one derived from it.
    identifying_weight: ClassVar[str] = ""
    # Prefixes of the parameters that `from_standard` adds, or doubles; empty where it is not implemented.
    new_parameters: ClassVar[tuple[str, ...]] = ()
    no_adapting: ClassVar[str] = ""  # why it is not implemented, where people may ask
    # The variant's settings that change what it computes and that no weight shows: they are recorded with weights.
    recorded: ClassVar[tuple[str, ...]] = ()
    _group: int  # queries that lie together in `q_proj`'s rows
    _modulates: ClassVar[bool] = False  # whether `modulate` does anything
    norm_eps: ClassVar[float] = 1e-5  # of the norm of heads
    output_factor: float = 1.0  # of a head's output, after its norm

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        head_norm: bool = False,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        rotary: float | None = None,
        context_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if context_dim is not None and (not isinstance(context_dim, int) or context_dim < 1):
            raise ValueError(f"context_dim must be a whole number of at least 1, or None for dim, got {context_dim!r}")
        context_dim = dim if context_dim is None else context_dim
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads ({num_heads}) must be a positive multiple of num_kv_heads ({num_kv_heads})")
        if head_dim is None:
            if dim % (num_heads * self.value_maps):
                raise ValueError(
                    f"dim ({dim}) must be a multiple of {num_heads * self.value_maps} ({self.value_maps} map(s) "
                    f"for each of {num_heads} heads of variant {self.variant!r}); change num_heads"
                )
            head_dim = dim // (num_heads * self.value_maps)
        if rotary is not None and (isinstance(rotary, bool) or rotary <= 1):
            raise ValueError(
                f"rotary must be the base of the frequencies, a number above 1 such as 10000, got {rotary!r}"
            )
        if rotary is not None and head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {head_dim}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.value_dim = self.value_maps * head_dim
        self.attn_drop, self.rotary, self.context_dim = attn_drop, rotary, context_dim
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        linear = nn.Linear if qkv_bias else Linear
        self.q_proj = linear(dim, self._count_queries(num_heads) * head_dim, bias=qkv_bias, **factory_kwargs)
        self.k_proj = linear(context_dim, num_kv_heads * self.key_maps * head_dim, bias=qkv_bias, **factory_kwargs)
        values = num_kv_heads * self.values_per_head * self.value_dim
        self.v_proj = linear(context_dim, values, bias=qkv_bias, **factory_kwargs)
        self.q_norm = HeadNorm(head_dim, eps=1e-6, **factory_kwargs) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(head_dim, eps=1e-6, **factory_kwargs) if qk_norm else nn.Identity()
        self.head_norm = HeadNorm(self.value_dim, eps=self.norm_eps, **factory_kwargs) if head_norm else nn.Identity()
        linear = nn.Linear if proj_bias else Linear
        self.proj = linear(num_heads * self.value_dim, dim, bias=proj_bias, **factory_kwargs)
        self.proj_drop = nn.Dropout(proj_drop)
        self.add_parameters(dim, factory_kwargs)
        self.reset_parameters()

    def __init_subclass__(cls, **settings: Any) -> None:
        """Merge inherited `__init__` arguments into the signature."""
        super().__init_subclass__(**settings)
        cls._group = getattr(cls, "query_maps", 0)  # a mixin has none
        cls._modulates = cls.modulate is not AttentionLayer.modulate
        taken: dict[str, inspect.Parameter] = {}
        for kind in cls.__mro__:
            if "__init__" in vars(kind):
                _, *own = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
                passes_on = own[-1:] and own[-1].kind is inspect.Parameter.VAR_KEYWORD
                taken = {one.name: one for one in own[: -1 if passes_on else None]} | taken
                if not passes_on:
                    break
        cls.__signature__ = inspect.Signature(list(taken.values()))  # type: ignore[attr-defined]

    def forward(
        self,
        x: Float[Tensor, "B N dim"],
        attn_mask: Tensor | ops.Documents | None = None,
        is_causal: bool = False,
        *,
        context: Float[Tensor, "B L context_dim"] | None = None,
        cache: Cache | None = None,
        rotation: Rotation | None = None,
        maps: list[Tensor] | None = None,
    ) -> Float[Tensor, "B N dim"]:
        """Attend within each sequence, or from each sequence to its context.

        Args:
            x: tokens [B, N, dim].
            attn_mask: boolean (True = may attend), float of 0 and -inf, or the rows' documents; broadcastable to
                [B, H, N, L] for the L tokens of x, of the context, or those that the cache returns.
            is_causal: each token attends to itself and those before it; combined with attn_mask by AND.
            context: another sequence, from which keys and values are projected in place of x. It has no order in
                common with x, so it is refused with is_causal, a cache, or in a layer with rotary embedding.
            cache: past tokens to attend to as well; the keys and values of x are added to it.
            rotation: the tokens' angles, which a model computes once; else positions count from 0 or by the cache.
            maps: a list to which the map that weights the values is appended, [B, H, N, L] in float32 or better: the
                softmax map, or in differential layers the first map less lambda times the second. The output is then
                computed from that map, which takes its memory.

        Raises:
            ValueError: a float mask has other values than 0 and -inf, the cache has no room or the variant takes none,
                or the context has the wrong width or comes with an argument that it excludes.
        """
        if cache is not None and not self.cacheable:
            self.check_cacheable()
        if self.lambda_by_token or self._modulates:  # which read the tokens once more
            x = cast_once(x)
        source = x if context is None else self._read_context(context, x, is_causal, cache)
        q, k, v = self._project(x, source, cache, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        if attn_mask is not None and (maps is not None or not isinstance(attn_mask, ops.Documents)):
            attn_mask = boolean_mask(attn_mask)
        mask: Any = attn_mask
        inputs = Inputs(x, q, k, v, mask, is_causal, self.attn_drop if self.training else 0.0, context is not None)
        if maps is None:
            heads = self.attend(inputs)
        else:
            softmax = ops.attention_maps(q, k, causal=is_causal, mask=mask)
            dropped = F.dropout(softmax, inputs.dropout)
            maps.append(self.combine(dropped, self.compute_lambda(x), inputs))
            with torch.autocast(x.device.type, enabled=False):
                values = v.to(softmax.dtype).repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
                heads = (maps[-1] @ values).to(v.dtype)
        heads = self.finish(heads)
        if self._modulates:
            heads = self.modulate(heads, x)
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))

    def attention_maps(
        self,
        x: Float[Tensor, "B N dim"],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        context: Float[Tensor, "B L context_dim"] | None = None,
    ) -> Float[Tensor, "B H P N L"]:
        """Return the softmax maps of each head [B, H, P, N, L] (P = 2 in differential layers), for analysis."""
        q, k, _ = self._project(x, x if context is None else self._read_context(context, x, is_causal))
        return ops.attention_maps(q, k, causal=is_causal, mask=boolean_mask(attn_mask))

    def check_cacheable(self) -> None:
        """Raise a ValueError if a cache of keys and values does not hold what this variant needs of past tokens."""
        if not self.cacheable:
            raise ValueError(
                f"variant {self.variant!r} cannot use a cache of keys and values: compute whole sequences "
                "(transformers: use_cache=False)"
            )

    def _read_context(self, context: Tensor, x: Tensor, is_causal: bool, cache: Cache | None = None) -> Tensor:
        """Return the context as the tokens of keys and values; ValueError if it cannot be used."""
        if is_causal or cache is not None or self.rotary is not None:
            given = "is_causal" if is_causal else "a cache" if cache is not None else "rotary embedding"
            raise ValueError(
                f"{given} does not apply to a context: leave it out of cross-attention, use attn_mask, or build "
                "with rotary=None"
            )
        if context.shape[0] != x.shape[0]:
            raise ValueError(f"the context must have a sequence for each of x, {x.shape[0]}, got {context.shape[0]}")
        return context

    def _project(
        self, x: Tensor, source: Tensor, cache: Cache | None = None, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to queries [B, H, P, N, D] and its source to keys [B, Hk, Pk, L, D] and values [B, Hk, L, V].

        Queries and keys are normalised and rotated.
        """
        if source.shape[-1] != self.context_dim:
            raise ValueError(
                f"keys and values need tokens of width {self.context_dim}, got {list(source.shape)}: give a context of "
                "that width, or make the layer with its context_dim"
            )
        q_proj, k_proj, v_proj = self.q_proj, self.k_proj, self.v_proj
        if x is source and torch.is_grad_enabled() and (joined := join(x, q_proj, k_proj, v_proj)) is not None:
            sizes = (q_proj.out_features, k_proj.out_features, v_proj.out_features)
            q, k, v = F.linear(x, *joined).split_with_sizes(sizes, -1)
        else:
            device = x.device.type
            if device in DEVICES and torch.is_autocast_enabled(device):
                tokens = cast_once(x)
                x, source = tokens, tokens if source is x else cast_once(source)
            q, k, v = q_proj(x), k_proj(source), v_proj(source)
        # The norm is of the tokens as they lie in memory.
        q = self.q_norm(q.unflatten(-1, (-1, self._group, self.head_dim))).permute(0, 2, 3, 1, 4)
        k = self.k_norm(k.unflatten(-1, (self.num_kv_heads, self.key_maps, self.head_dim))).permute(0, 2, 3, 1, 4)
        v = v.unflatten(-1, (self.num_kv_heads, self.values_per_head * self.value_dim)).transpose(1, 2)
        if self.rotary is not None:
            if rotation is None:
                count = x.shape[1]
                positions = torch.arange(count, device=x.device) if cache is None else cache.positions(count)
                rotation = ops.rotary_tables(positions, self.head_dim, self.rotary)
            cos, sin = rotation
            q, k = ops.apply_rotary(q, cos, sin), ops.apply_rotary(k, cos, sin)
        return q, k, v

    def _count_queries(self, num_heads: int) -> int:
        """Return the number of queries [D] that `q_proj` makes of a token."""
        return num_heads * self.query_maps

    # ---- what a variant says --------------------------------------------------------------------------------------

    @classmethod
    def extra_rows(cls, head_dim: int, **settings: Any) -> float:
        """Return how many more rows the projections have than the plain layer's, per plain head: 0 in V1.

        In a parameter-matched model the MLP is narrower by as much. The settings are the variant's.
        """
        return (cls.query_maps // cls.value_maps - 1) * head_dim

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        """Make the variant's own parameters with this device and dtype; `reset_parameters` fills them."""

    def reset_parameters(self) -> None:
        """Initialise the variant's own parameters; projections and norms are unchanged."""

    def compute_lambda(self, x: Tensor | None = None) -> Tensor | None:
        """Return the weight of the second map, broadcastable to [B, H, N, 1]; None in a variant of one map."""
        return None

    def lambdas(self) -> dict[str, Tensor]:
        """Return the lambdas that do not depend on tokens, by name, for analysis; a single one is named ""."""
        lam = None if self.lambda_by_token else self.compute_lambda()
        return {} if lam is None else {"": torch.as_tensor(lam)}

    def attend(self, inputs: Inputs) -> Float[Tensor, "B H N V"]:
        """Return the output of each head before its norm."""
        raise NotImplementedError

    def combine(self, maps: Float[Tensor, "B H P N L"], lam: Tensor | None, inputs: Inputs) -> Float[Tensor, "B H N L"]:
        """Return each head's combined map, with which `attend` weights the values.

        Args:
            maps: the softmax maps.
            lam: what `compute_lambda` returned.
            inputs: as in `attend`; `inputs.mask` is the mask of the maps.
        """
        raise NotImplementedError

    def finish(self, heads: Float[Tensor, "B H N V"], factor: float | None = None) -> Float[Tensor, "B H N V"]:
        """Return the input of the output projection: each head's output after its norm, times a factor.

        Args:
            heads: what `attend` returned.
            factor: in place of the variant's `output_factor`, for analysis.
        """
        return self.head_norm(heads)

    def modulate(self, heads: Float[Tensor, "B H N V"], x: Float[Tensor, "B N dim"]) -> Float[Tensor, "B H N V"]:
        """Modulate the output of `finish` by the tokens x, as gated variants do; returns it unchanged by default."""
        return heads

    @classmethod
    def from_standard(cls, layer: AttentionLayer, *, depth: int) -> Self:
        """Build a layer of this variant from a standard one, reusing some of its modules.

        Args:
            layer: the standard layer, whose modules may be changed.
            depth: its index from 0.

        Raises:
            ValueError: the variant cannot be built from a standard layer, or not from one of these sizes.
        """
        raise ValueError(f"variant {cls.variant!r} is not made from standard attention: adapt with another method")

    def merge(self) -> Attention:
        """Return a standard layer that computes the same, where the variant is `mergeable`."""
        raise ValueError(f"variant {self.variant!r} does not merge into standard attention")

    @classmethod
    def _with_parts_of(cls, layer: AttentionLayer, num_heads: int, num_kv_heads: int, **settings: Any) -> Self:
        """Make a layer with the settings, keys, values, norms of queries and keys, and output projection of another."""
        new = cls(
            layer.q_proj.in_features,
            num_heads,
            num_kv_heads,
            head_dim=layer.head_dim,
            attn_drop=layer.attn_drop,
            rotary=layer.rotary,
            context_dim=layer.context_dim,
            qkv_bias=layer.q_proj.bias is not None,
            proj_bias=layer.proj.bias is not None,
            device=layer.q_proj.weight.device,
            dtype=layer.q_proj.weight.dtype,
            **settings,
        )
        for name in ("q_norm", "k_norm", "k_proj", "v_proj", "proj", "proj_drop"):
            setattr(new, name, getattr(layer, name))
        return new

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the layer's weights; say once for a model where they are those of plain attention."""
        found = [prefix + name for name in _PLAIN if prefix + name in state_dict]
        if found and self.query_maps > 1 and not any(key.endswith(_PLAIN) for key in unexpected_keys):
            warnings.warn(
                f"{found[0]} is of plain attention, not {self.variant}: load it into its plain model, and make that "
                "differential with diffvision.adapt",
                stacklevel=2,
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which calls this."""
        raise NotImplementedError("torch.jit.script compiles no attention layer of ours: use torch.jit.trace or export")

    def extra_repr(self) -> str:
        kv = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"variant={self.variant}, num_heads={self.num_heads}{kv}, head_dim={self.head_dim}"


class Attention(AttentionLayer):
    """Standard softmax attention with the interface of the differential layers.

    `head_norm=True` is the paper's ablation of a Transformer with head norm (arXiv 2410.05258, table 6).
    """

    variant, query_maps, key_maps, value_maps = "standard", 1, 1, 1

    def attend(self, inputs: Inputs) -> Tensor:
        _, q, k, v, mask, is_causal, dropout, _ = inputs
        return ops.softmax_attention(q.squeeze(2), k.squeeze(2), v, causal=is_causal, mask=mask, dropout=dropout)

    def combine(self, maps: Tensor, lam: Tensor | None, inputs: Inputs) -> Tensor:
        return maps.squeeze(2)

    @classmethod
    def from_standard(cls, layer: AttentionLayer, *, depth: int) -> Self:
        """Build a layer of this class, or a subclass, from all the modules of a standard one."""
        new = cls._with_parts_of(layer, layer.num_heads, layer.num_kv_heads)
        new.q_proj, new.head_norm = layer.q_proj, layer.head_norm
        return new


class DifferentialLayer(AttentionLayer):
    """Attention that subtracts lambda times a second map of each head from its first; a variant computes lambda."""

    query_maps = 2

    def compute_lambda(self, x: Tensor | None = None) -> Tensor:
        """Return lambda, broadcastable to [B, H, N, 1], in float32 or better."""
        raise NotImplementedError

    def attend(self, inputs: Inputs) -> Tensor:
        x, q, k, v, mask, is_causal, dropout, _ = inputs
        return attend(q, k, v, self.compute_lambda(x), causal=is_causal, mask=mask, dropout=dropout)

    def combine(self, maps: Tensor, lam: Tensor, inputs: Inputs) -> Tensor:  # type: ignore[override]
        one, two = maps.unbind(2)
        return one - lam * two
