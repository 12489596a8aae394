"""Replacement of other libraries' differential attention by our operation, with their parameters and names.

A model keeps its parameters (the same objects), its state_dict and its hooks: the class of a module is changed to a
subclass that replaces the computation between the projections.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from timm.layers import DiffAttention as TimmDiffAttention
from timm.models.vision_transformer import DiffParallelScalingBlock
from torch import Tensor, nn

from diffvision import ops
from diffvision.nn.attention import boolean_mask

_LLAMA = "transformers.models.diffllama.modeling_diffllama"


def replace_attention(model: nn.Module) -> nn.Module:
    """Make the differential attentions of a model compute by `ops.diff_attention`, in place, and return the model.

    Supported are timm's `DiffAttention` (`vit_dwee_*`, `vit_dlittle_*`) and `DiffParallelScalingBlock` (`vit_dpwee_*`),
    and transformers' `DiffLlamaAttention`. An optimizer created earlier stays valid, because the parameters are the
    same. Masks may only say where to attend, and add no bias.

    Raises:
        ValueError: the model has none of them.
    """
    known = _list_known()
    modules = list(model.modules())
    for module in modules:
        if type(module) in known:
            module.__class__ = known[type(module)]
    if not any(isinstance(module, tuple(known.values())) for module in modules):
        names = sorted({type(module).__name__ for module in modules if "ttention" in type(module).__name__})
        raise ValueError(
            f"{type(model).__name__} has attention layers {', '.join(names) or 'none'}: give a model with timm's "
            "DiffAttention or transformers' DiffLlamaAttention"
        )
    return model


def _list_known() -> dict[type[nn.Module], type[nn.Module]]:
    known: dict[type[nn.Module], type[nn.Module]] = {
        TimmDiffAttention: TimmAttention,
        DiffParallelScalingBlock: TimmParallelBlock,
    }
    if _LLAMA in sys.modules:  # otherwise no model can have it
        theirs = sys.modules[_LLAMA].DiffLlamaAttention
        known[theirs] = _llama_attention(theirs)
    return known


def _timm_heads(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Compute what timm's two modules share: [B, N, dim] each -> [B, N, dim], after the norm and its factor."""
    paired = (layer.num_heads, 2, layer.head_dim)
    out = ops.diff_attention(
        layer.q_norm(q.unflatten(-1, paired)).permute(0, 2, 3, 1, 4),
        layer.k_norm(k.unflatten(-1, paired)).permute(0, 2, 3, 1, 4),
        v.unflatten(-1, (layer.num_heads, 2 * layer.head_dim)).transpose(1, 2),
        layer._compute_lambda().to(q.dtype),
        causal=is_causal,
        mask=boolean_mask(mask),
        dropout=layer.attn_drop_p if layer.training else 0.0,
    )
    out = ops.rms_norm(out, layer.sub_norm.weight, layer.sub_norm.eps) * (1 - layer.lambda_init)
    return out.transpose(1, 2).flatten(2)


class TimmAttention(TimmDiffAttention):
    """timm's `DiffAttention`, by our operation."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens [B, N, dim] to [B, N, dim]; attn_mask as in `AttentionLayer.forward`."""
        q, k, v = self.qkv(x).chunk(3, dim=2)
        heads = _timm_heads(self, q, k, v, attn_mask, is_causal)
        return self.proj_drop(self.proj(self.norm(heads)))


class TimmParallelBlock(DiffParallelScalingBlock):
    """timm's block of attention and MLP side by side, by our operation."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens [B, N, dim] to [B, N, dim]; attn_mask as in `AttentionLayer.forward`."""
        mlp, q, k, v = self.in_proj(self.in_norm(x)).split(self.in_split, dim=-1)
        if self.mlp_bias is not None:
            mlp = mlp + self.mlp_bias
        heads = _timm_heads(self, q, k, v, attn_mask, is_causal)
        both = torch.cat((heads, self.mlp_drop(self.mlp_act(mlp))), dim=-1)
        return x + self.drop_path(self.ls(self.out_proj(both)))


@cache
def _llama_attention(theirs: Any) -> type[nn.Module]:
    """Make the subclass of DiffLlamaAttention; its heads i and i + H are the two maps and value halves of head i."""

    class LlamaAttention(theirs):
        """transformers' `DiffLlamaAttention`, by our operation."""

        def forward(
            self,
            hidden_states: Tensor,
            position_embeddings: tuple[Tensor, Tensor],
            attention_mask: Tensor | None = None,
            past_key_values: Any = None,
            **kwargs: Any,
        ) -> tuple[Tensor, None]:
            """Compute as transformers does with sdpa: no attention weights are returned."""
            split = (*hidden_states.shape[:-1], -1, self.head_dim)
            q = self.q_proj(hidden_states).view(split).transpose(1, 2)
            k = self.k_proj(hidden_states).view(split).transpose(1, 2)
            v = self.v_proj(hidden_states).view(split).transpose(1, 2)
            q, k = sys.modules[_LLAMA].apply_rotary_pos_emb(q, k, *position_embeddings)
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
            first, second = (
                torch.dot(a.float(), b.float()).exp()
                for a, b in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
            )
            mask, causal = _llama_mask(attention_mask, k.shape[2])
            out = ops.diff_attention(
                q.unflatten(1, (2, -1)).transpose(1, 2),
                k.unflatten(1, (2, -1)).transpose(1, 2),
                v.unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4).flatten(3),
                first - second + self.lambda_init,
                causal=causal,
                mask=mask,
                scale=self.scaling,
            )
            out = (1 - self.lambda_init) * self.groupnorm(out)
            return self.o_proj(out.transpose(1, 2).flatten(2)), None

    return LlamaAttention


def _llama_mask(mask: Tensor | None, keys: int) -> tuple[Tensor | None, bool]:
    """Return mask and causal from a mask of transformers.

    That is None for causal, [B, N] with 0 for padding, or [B, 1, M, N] that includes causality, boolean or with the
    lowest number where not to attend.
    """
    if mask is None:
        return None, True
    if mask.ndim == 2:
        return mask[:, None, None, -keys:].bool(), True
    mask = mask[..., :keys]
    return (mask if mask.dtype == torch.bool else mask == 0), False
