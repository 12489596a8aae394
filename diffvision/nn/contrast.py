"""Visual-Contrast Attention: two differential stages through a few pooled tokens, for the patches of an image.

It attends over a grid and nothing else, so it is not in `diffvision.nn.ATTENTION`, whose layers take any sequence.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from diffvision import ops
from diffvision.nn.attention import AttentionLayer, Cache, HeadNorm, Rotation
from diffvision.nn.lambda_init import resolve_lambda_init

_VECTORS = ("q1", "k1", "q2", "k2")


class VisualContrastAttention(AttentionLayer):
    """VCA: the patches' queries, pooled to m x m, read all tokens twice; every token reads the difference.

        t = pooled queries of the patches [n, dim], n = m^2           t+ = t + e+    t- = t + e-    e+, e- learned
        stage 1: u = RMSNorm((softmax(t+ k') - lambda_1 softmax(t- k')) v) * (1 - lambda_init)
        stage 2: [a+, a-] = softmax(q [t+, t-]')                      one softmax over 2n tokens (`joint`)
                 head = RMSNorm((a+ - lambda_2 a-) u) * (1 - lambda_init)
        heads side by side + depthwise 3 x 3 convolution of v on the grid (zeros for prefix tokens) -> projection

    Each lambda is exp(q1 . k1) - exp(q2 . k2) + lambda_init with four vectors per lambda. The cost is O(N n) for N
    tokens. Queries are pooled over the patches alone; keys and values include the prefix tokens (class, registers).
    Masks, patch dropout and any other tokens than a whole grid's are refused. Because of the norm between the stages no
    single map from tokens to tokens multiplies the values, so there are no attention maps to inspect.

    The arguments that are not named here are those of `AttentionLayer`.

    Args:
        num_heads: heads, as many as the plain layer's.
        contrast_size: m. The models take half the edge of the grid that they are made for, at least 2: 7 for 14 x 14,
            as in the paper. It stays for images of other sizes, and so do e+ and e-.
        joint: whether stage 2 has one softmax over t+ and t- together, as in the released code, which gave the
            reported numbers; False takes two softmaxes and their difference, as in the paper.
        depth: index of the layer from 0, for `lambda_init="depth"`.
        lambda_init: a float, or "depth" for `depth_lambda_init(depth)`, as released.
        attn_drop: must be 0: the released code has this dropout and does not apply it.

    Raises:
        ValueError: contrast_size is below 1, attn_drop is not 0, or sizes do not divide.

    Source: arXiv 2511.00833. The authors' repository (LeapLabTHU/LinearDiff) was not available. Two re-implementations
    that name it were read and agree with the equations above in pooling, stages, norms (eps 1e-5), factor, convolution
    and initial values (e+, e- from N(0, 1), lambda's vectors from N(0, 0.1)); both have the joint softmax. They differ
    in dropout of the maps, which one applies and the other says is not applied in the released classifier.
    """

    variant, query_maps, key_maps, value_maps = "vca", 1, 1, 1
    cacheable, needs_grid, recorded = False, True, ("lambda_init", "joint")
    no_maps = (
        "Visual-Contrast Attention has no map from tokens to tokens: its two stages read through pooled tokens, with a "
        "norm between them"
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        contrast_size: int = 7,
        joint: bool = True,
        depth: int = 0,
        lambda_init: float | Literal["depth"] = "depth",
        qkv_bias: bool = False,
        proj_bias: bool = True,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if attn_drop:
            raise ValueError(f"attn_drop must be 0 with Visual-Contrast Attention, got {attn_drop}")
        if contrast_size < 1:
            raise ValueError(f"contrast_size, the side of the pooled queries, must be at least 1, got {contrast_size}")
        self.contrast_size, self.joint = contrast_size, joint
        self.lambda_init = resolve_lambda_init(lambda_init, depth)
        self._grid: tuple[int, int] | None = None
        self._prefix_tokens = 0
        super().__init__(
            dim,
            num_heads,
            head_norm=True,
            qkv_bias=qkv_bias,
            proj_bias=proj_bias,
            qk_norm=qk_norm,
            proj_drop=proj_drop,
            device=device,
            dtype=dtype,
        )

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        """Make e+ and e-, the norm of stage 1, the convolution and the vectors of both lambdas."""
        self.contrast_embed = nn.Parameter(torch.empty(2, self.contrast_size**2, dim, **factory_kwargs))  # e+, e-
        self.contrast_norm = HeadNorm(self.value_dim, eps=1e-5, **factory_kwargs)
        self.local = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, **factory_kwargs)
        for stage in (1, 2):
            for name in _VECTORS:
                vector = nn.Parameter(torch.empty(self.head_dim, **factory_kwargs))
                self.register_parameter(f"lambda{stage}_{name}", vector)

    def reset_parameters(self) -> None:
        """Draw e+ and e- from N(0, 1), and the lambda vectors from N(0, 0.1)."""
        nn.init.normal_(self.contrast_embed)
        for vector in self._lambda_vectors():
            nn.init.normal_(vector, std=0.1)

    def set_grid(self, grid: tuple[int, int], prefix_tokens: int = 0) -> None:
        """Set the layout of the tokens: `prefix_tokens`, then the patches of a grid (height, width) row by row."""
        self._grid, self._prefix_tokens = (int(grid[0]), int(grid[1])), prefix_tokens

    def compute_lambdas(self) -> tuple[Float[Tensor, 1], Float[Tensor, 1]]:
        """Return the lambdas of both stages, in float32 whatever the parameters' dtype."""
        one, two = self._lambda_vectors()[:4], self._lambda_vectors()[4:]
        return self._lambda(*one), self._lambda(*two)

    def lambdas(self) -> dict[str, Tensor]:
        """Return the lambdas of both stages by name."""
        return {f".stage{stage}": lam for stage, lam in enumerate(self.compute_lambdas(), start=1)}

    def _lambda_vectors(self) -> list[Tensor]:
        return [getattr(self, f"lambda{stage}_{name}") for stage in (1, 2) for name in _VECTORS]

    def _lambda(self, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
        first, second = torch.dot(q1.float(), k1.float()).exp(), torch.dot(q2.float(), k2.float()).exp()
        return (first - second + self.lambda_init).view(1)

    def forward(
        self,
        x: Float[Tensor, "B N dim"],
        attn_mask: Any = None,
        is_causal: bool = False,
        *,
        context: Tensor | None = None,
        cache: Cache | None = None,
        rotation: Rotation | None = None,
        maps: list[Tensor] | None = None,
    ) -> Float[Tensor, "B N dim"]:
        """Attend within each image.

        Args:
            x: tokens [B, N, dim], N as `set_grid` says.
            attn_mask: must be None, as must be `context`, `cache`, `rotation` and `maps`.
            is_causal: must be False.
            context: must be None.
            cache: must be None.
            rotation: must be None.
            maps: must be None.

        Raises:
            ValueError: one of them is given, `set_grid` was not called, or the tokens are not those of its grid.
        """
        if is_causal or any(given is not None for given in (attn_mask, context, cache, rotation, maps)):
            raise ValueError(
                "Visual-Contrast Attention pools a whole grid: it takes no mask, context, cache, rotation or list of "
                "maps"
            )
        height, width = self._checked_grid(x.shape[1])
        q, k, v = self._project(x, x)
        first, second = self.compute_lambdas()
        factor = 1 - self.lambda_init
        tokens = self._contrast_tokens(q.squeeze(2), height, width)
        contrast = self.contrast_norm(ops.diff_attention(tokens, k, v, first), factor)
        heads = self.head_norm(self._read(q, tokens, contrast, second), factor)
        local = self.local(self._on_grid(v, height, width)).flatten(2).transpose(1, 2)
        mixed = heads.transpose(1, 2).flatten(2) + F.pad(local, (0, 0, self._prefix_tokens, 0))
        return self.proj_drop(self.proj(mixed))

    def attention_maps(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, context: Tensor | None = None
    ) -> NoReturn:
        """Raise a ValueError: there is no map from tokens to tokens."""
        raise ValueError(self.no_maps)

    def _contrast_tokens(self, q: Float[Tensor, "B H N D"], height: int, width: int) -> Float[Tensor, "B H 2 n D"]:
        """Return t+ and t-, with the queries' dtype."""
        size, on_grid = self.contrast_size, self._on_grid(q, height, width)
        if height % size or width % size:
            pooled = F.adaptive_avg_pool2d(on_grid, size)
        else:  # the same; torch has a deterministic gradient of this one on CUDA
            pooled = F.avg_pool2d(on_grid, (height // size, width // size))
        tokens: Float[Tensor, "B 2 n dim"] = pooled.flatten(2).transpose(1, 2).unsqueeze(1) + self.contrast_embed
        return tokens.to(q.dtype).unflatten(-1, (self.num_heads, self.head_dim)).permute(0, 3, 1, 2, 4)

    def _read(
        self,
        q: Float[Tensor, "B H 1 N D"],
        tokens: Float[Tensor, "B H 2 n D"],
        contrast: Float[Tensor, "B H n D"],
        lam: Tensor,
    ) -> Float[Tensor, "B H N D"]:
        """Return stage 2 before its norm."""
        if not self.joint:
            return ops.diff_attention(q.expand(-1, -1, 2, -1, -1), tokens, contrast, lam)
        values = torch.cat([contrast, (-lam * contrast).to(contrast.dtype)], dim=2)
        return ops.softmax_attention(q.squeeze(2), tokens.flatten(2, 3), values)

    def _on_grid(self, heads: Float[Tensor, "B H N D"], height: int, width: int) -> Float[Tensor, "B dim h w"]:
        """Return the patches' part of all heads as an image."""
        patches = heads[:, :, self._prefix_tokens :].transpose(2, 3).flatten(1, 2)
        return patches.unflatten(-1, (height, width))

    def _checked_grid(self, tokens: int) -> tuple[int, int]:
        if self._grid is None:
            raise ValueError("Visual-Contrast Attention does not know its grid: call set_grid((height, width)) first")
        height, width = self._grid
        if tokens != self._prefix_tokens + height * width:
            raise ValueError(
                f"Visual-Contrast Attention got {tokens} tokens, not {height} x {width} patches and "
                f"{self._prefix_tokens} prefix tokens: give all, or call set_grid"
            )
        return height, width

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, contrast_size={self.contrast_size}, lambda_init={self.lambda_init:.4g}"
