"""Differential attention layers: the paper's (V1) and its successor (V2).

lambda_init by depth is in `lambda_init.py`, other forms of V1's lambda are in `lambda_variants.py`, grouped heads in
`grouped.py`, DINT in `dint.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffvision.nn.attention import AttentionLayer, DifferentialLayer, HeadNorm
from diffvision.nn.lambda_init import resolve_lambda_init

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class DiffAttention(DifferentialLayer):
    """The DIFF Transformer's attention (V1): paired queries and keys, values twice as wide, a norm on each head.

        lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init      one number a layer
        head = RMSNorm((softmax(q1 k1') - lambda softmax(q2 k2')) v) * (1 - lambda_init)

    A head's two queries are adjacent in `q_proj`'s rows ([H, 2, D]), and so are its keys; its value is 2D wide. The
    arguments that are not named here are those of `AttentionLayer`.

    Args:
        num_heads: differential heads, half of the matched standard layer's.
        depth: index of the layer from 0, for `lambda_init="depth"`.
        lambda_init: a float (DiffCLIP: 0.8 in every layer), or "depth" for `depth_lambda_init(depth)`.
        head_norm: False leaves the norm out, and keeps the factor (the paper's ablation "w/o GroupNorm").

    Source: arXiv 2410.05258; microsoft/unilm Diff-Transformer/multihead_flashdiff_1.py. Grouped heads are paired as
    there; the plain module of that repository pairs keys of different heads.
    """

    variant, key_maps, value_maps = "v1", 2, 2
    identifying_weight = "lambda_q1"
    recorded: ClassVar[tuple[str, ...]] = ("lambda_init",)
    new_parameters: ClassVar[tuple[str, ...]] = ("lambda_", "head_norm")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        depth: int = 0,
        lambda_init: float | Literal["depth"] = "depth",
        head_norm: bool = True,
        **settings: Any,
    ) -> None:
        self.lambda_init = resolve_lambda_init(lambda_init, depth)
        super().__init__(dim, num_heads, num_kv_heads, head_norm=head_norm, **settings)

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        """Make the four vectors of lambda.

        They have the layer's dtype, so that FSDP2 finds one; the arithmetic is in float32 all the same.
        """
        self.lambda_q1 = nn.Parameter(torch.empty(self.head_dim, **factory_kwargs))
        self.lambda_k1 = nn.Parameter(torch.empty(self.head_dim, **factory_kwargs))
        self.lambda_q2 = nn.Parameter(torch.empty(self.head_dim, **factory_kwargs))
        self.lambda_k2 = nn.Parameter(torch.empty(self.head_dim, **factory_kwargs))

    def reset_parameters(self) -> None:
        """Draw the lambda vectors from N(0, 0.1); zeros would get no gradient."""
        for name in VECTORS:
            nn.init.normal_(getattr(self, name), mean=0.0, std=0.1)

    def compute_lambda(self, x: Tensor | None = None) -> Float[Tensor, 1]:
        """Return the layer's lambda [1], in float32 whatever the parameters' dtype; x is not read."""
        first = torch.dot(self.lambda_q1.float(), self.lambda_k1.float()).exp()
        second = torch.dot(self.lambda_q2.float(), self.lambda_k2.float()).exp()
        return (first - second + self.lambda_init).view(1)

    @property
    def output_factor(self) -> float:  # type: ignore[override]
        """1 - lambda_init."""
        return 1 - self.lambda_init

    def finish(self, heads: Tensor, factor: float | None = None) -> Tensor:
        factor = 1 - self.lambda_init if factor is None else factor
        return self.head_norm(heads, factor) if isinstance(self.head_norm, HeadNorm) else heads * factor

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, lambda_init={self.lambda_init:.4g}"

    @classmethod
    def from_standard(cls, layer: AttentionLayer, *, depth: int) -> Self:
        """Return a layer in which heads 2i and 2i + 1 of a standard one become the maps of head i, their values its.

        It computes another function.
        """
        if layer.num_heads % 2 or layer.num_kv_heads % 2:
            raise ValueError(
                f"method 'v1' pairs heads: {layer.num_heads} and {layer.num_kv_heads} key/value heads have no pairs; "
                "use method 'v2' or 'dex'"
            )
        new = cls._with_parts_of(layer, layer.num_heads // 2, layer.num_kv_heads // 2, depth=depth)
        new.q_proj = layer.q_proj
        return new


class DiffAttentionV2(DifferentialLayer):
    """DIFF V2: two queries per head over one key and value of its group, lambda from the token, no head norm.

        lambda = sigmoid(lambda_proj(x))                                           one number a token and head
        head = (softmax(q1 k') - lambda softmax(q2 k')) v

    The two queries of a head are adjacent in `q_proj`'s rows and so lie in one key/value group, as they must. The
    arguments are those of `AttentionLayer`; `num_heads` is that of the standard layer, with twice its query projection.

    Source: microsoft/unilm Diff-Transformer/Diff-Transformer-V2/multihead_flashdiffv2.py.
    """

    variant, key_maps, value_maps, lambda_by_token = "v2", 1, 1, True
    identifying_weight = "lambda_proj.weight"
    new_parameters: ClassVar[tuple[str, ...]] = ("lambda_proj", "q_proj")

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        """Make the projection of tokens to lambda's logits."""
        self.lambda_proj = nn.Linear(dim, self.num_heads, bias=False, **factory_kwargs)

    def compute_lambda(self, x: Float[Tensor, "B N dim"]) -> Float[Tensor, "B H N 1"]:  # type: ignore[override]
        """Return lambda of each token and head [B, H, N, 1], between 0 and 1, in float32 or better."""
        logits = self.lambda_proj(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.sigmoid().transpose(1, 2).unsqueeze(-1)

    @classmethod
    def extra_rows(cls, head_dim: int, **settings: Any) -> float:
        return super().extra_rows(head_dim) + 1  # the head's lambda

    @classmethod
    @torch.no_grad()
    def from_standard(cls, layer: AttentionLayer, *, depth: int) -> Self:
        """Return a layer of the same function: queries copied, lambda 1/2 (sigmoid of 0), projection doubled.

        It computes (A - A / 2) V 2 W = A V W.
        """
        new = cls._with_parts_of(layer, layer.num_heads, layer.num_kv_heads)
        new.head_norm = layer.head_norm
        for name, value in layer.q_proj.named_parameters():
            twice = value.unflatten(0, (layer.num_heads, 1, layer.head_dim)).expand(-1, 2, -1, *value.shape[1:])
            getattr(new.q_proj, name).copy_(twice.flatten(0, 2))
        new.lambda_proj.weight.zero_()
        new.proj.weight *= 2
        return new
