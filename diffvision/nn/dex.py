"""DEX: a pretrained layer's attention with a differential operation on the outputs of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffvision.nn.attention import Attention, AttentionLayer
from diffvision.nn.lambda_init import depth_lambda_init
from diffvision.nn.linear import refuse_wrapped


class DexAttention(Attention):
    """Standard attention that subtracts a learned linear map of each selected head's output from it.

        head_h <- head_h - lambda head_h W                     W [V, V], one for the layer's selected heads, from zero
        lambda = s_0 lambda_init + s_1 dex_lambda              s: the schedule; dex_lambda learned, from zero

    With W of zero the layer computes what it did before; with lambda above zero W has a gradient from the first step
    (both at zero would be a stationary point). s begins at (1, 1); a schedule sets it for each step. The operation is
    linear in the head's output, so `merge` folds it into the output projection: what was trained is a standard layer
    again, at no cost. The arguments that are not named here are those of `AttentionLayer`.

    Args:
        heads: indices of the heads that are changed; all if None. They are a buffer, which a state_dict replaces.
        depth: index of the layer from 0, for dex_lambda_init = 0.8 - 0.6 exp(-0.3 depth).

    Attributes:
        dex: W [V, V].
        dex_lambda: the learned part of lambda, [1].
        dex_schedule: s [2].
        dex_heads: which heads are changed, bool [H].

    Source: arXiv 2505.16333, equations 3 to 5 and figure 9, as docs/guides/adapt.md reads them. The paper does not say
    that W starts from zero; here it does, so that lambda may be above zero at once.
    """

    variant, mergeable, identifying_weight = "dex", True, "dex"
    new_parameters, recorded = ("dex",), ("dex_lambda_init",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        heads: Sequence[int] | None = None,
        depth: int = 0,
        head_norm: bool = False,
        **settings: Any,
    ) -> None:
        self._chosen = list(range(num_heads)) if heads is None else sorted(set(heads))
        if wrong := [head for head in self._chosen if not 0 <= head < num_heads]:
            raise ValueError(f"heads must be numbers from 0 to {num_heads - 1}, got {wrong[0]}")
        self.dex_lambda_init = depth_lambda_init(depth)
        super().__init__(dim, num_heads, num_kv_heads, head_norm=head_norm, **settings)

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        """Make W and the learned part of lambda, and the buffers of the schedule and the heads."""
        self.dex = nn.Parameter(torch.empty(self.value_dim, self.value_dim, **factory_kwargs))
        self.dex_lambda = nn.Parameter(torch.empty(1, **factory_kwargs))
        self.dex_schedule: Tensor
        self.register_buffer("dex_schedule", torch.empty(2, device=factory_kwargs["device"]))
        self.dex_heads: Tensor
        self.register_buffer(
            "dex_heads", torch.empty(self.num_heads, dtype=torch.bool, device=factory_kwargs["device"])
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set W and dex_lambda to zero, the schedule to (1, 1) and the heads as chosen."""
        self.dex.zero_()
        self.dex_lambda.zero_()
        self.dex_schedule.fill_(1.0)
        chosen = torch.zeros(self.num_heads, dtype=torch.bool)
        chosen[self._chosen] = True
        self.dex_heads.copy_(chosen)

    def current_lambda(self) -> Float[Tensor, 1]:
        """Return the scheduled and learned lambda [1], in float32 whatever the parameters' dtype."""
        init, learned = self.dex_schedule.float().split(1)
        return init * self.dex_lambda_init + learned * self.dex_lambda.float()

    def lambdas(self) -> dict[str, Tensor]:
        """Return the layer's lambda, which weights outputs of heads and not maps."""
        return {"": self.current_lambda()}

    def finish(self, heads: Tensor, factor: float | None = None) -> Tensor:
        return self.subtract_learned_part(super().finish(heads, factor))

    def subtract_learned_part(self, heads: Float[Tensor, "... H N V"]) -> Float[Tensor, "... H N V"]:
        """Subtract the learned part from the heads' outputs [..., H, N, V]."""
        share = (self.current_lambda() * self.dex_heads).to(heads.dtype)[:, None, None]
        return heads - share * (heads @ self.dex)

    @classmethod
    def from_standard(cls, layer: AttentionLayer, *, depth: int, heads: Sequence[int] | None = None) -> Self:
        """Return a layer that computes the same; `heads` are those that are changed, all if None."""
        new = cls._with_parts_of(layer, layer.num_heads, layer.num_kv_heads, depth=depth, heads=heads)
        new.q_proj, new.head_norm = layer.q_proj, layer.head_norm
        return new

    @torch.no_grad()
    def merge(self) -> Attention:
        """Return a standard layer that computes the same, with the operation within its output projection.

        Raises:
            ValueError: the output projection is wrapped in an adapter or a parametrization.
        """
        refuse_wrapped(proj=self.proj)
        merged = Attention.__new__(Attention)
        nn.Module.__init__(merged)
        merged.__dict__ |= {name: value for name, value in self.__dict__.items() if not name.startswith("_")}
        merged._modules |= self._modules
        share = (self.current_lambda() * self.dex_heads).to(self.dex)
        columns: Float[Tensor, "dim H V"] = self.proj.weight.unflatten(1, (self.num_heads, self.value_dim))
        self.proj.weight -= (torch.einsum("dhv,wv->dhw", columns, self.dex) * share[:, None]).flatten(1)
        return merged


def set_dex_schedule(model: nn.Module, init: float, learned: float) -> None:
    """Set lambda of all DEX layers to `init` times the layer's lambda_init plus `learned` times its learned part."""
    for module in model.modules():
        if isinstance(module, DexAttention):
            module.dex_schedule[0], module.dex_schedule[1] = init, learned


def set_dex_lambda(model: nn.Module, value: float) -> None:
    """Set lambda of all DEX layers of a model to a value, without their learned parts."""
    for module in model.modules():
        if isinstance(module, DexAttention):
            module.dex_schedule[0], module.dex_schedule[1] = value / module.dex_lambda_init, 0.0
