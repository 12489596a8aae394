"""Lambda of every differential layer, by name. Curves of it over a run are in `curves`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, captured, diff_llama_lambda, run_towers
from diffvision.nn import AttentionLayer


def layer_lambdas(model: nn.Module, batch: Mapping[str, Tensor] | None = None) -> dict[str, float]:
    """Return lambda of each differential layer by its module's name, in the model's order; empty where there is none.

    Args:
        model: a timm, OpenCLIP or language model, or any module that holds layers of `diffvision.nn` or transformers'
            V1 (DiffLlama) or V2.
        batch: `image` [B, 3, h, w] and/or `text` [B, L], or a language model's `tokens` [B, N]. Where lambda depends on
            the token (V2) it is the mean over a tower's tokens and heads; layers that such a batch does not reach are
            left out. V1 needs no batch.

    Raises:
        ValueError: a layer's lambda depends on the token, and no batch was passed.
    """
    lambdas: dict[str, float] = {}
    by_token: dict[nn.Module, str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, AttentionLayer):
            lambdas |= {name + part: lam.mean().item() for part, lam in layer.lambdas().items()}
            if layer.lambda_by_token:
                lambdas[name] = math.nan  # keeps the model's order
                by_token[layer] = name
        elif hasattr(layer, "layer_idx") and hasattr(layer, "lambda_q1"):
            lambdas[name] = diff_llama_lambda(layer).item()
        elif hasattr(layer, "layer_idx") and hasattr(layer, "lambda_proj"):
            lambdas[name] = math.nan
            by_token[layer] = name
    if not by_token:
        return lambdas
    if batch is None:
        raise ValueError(f"lambda of {', '.join(sorted(by_token.values()))} depends on the token: give a batch")
    reached: dict[str, Tensor] = {}

    def see(call: Call) -> None:  # during the forward pass: only then does a sharded layer have its weights
        if call.layer in by_token and call.lam is not None:
            reached[by_token[call.layer]] = call.lam.mean()

    with torch.no_grad(), captured(model, see):
        run_towers(model, batch)
    lambdas |= {name: value.item() for name, value in reached.items()}
    return {name: value for name, value in lambdas.items() if not math.isnan(value) or name in reached}
