"""The relevance of image patches to a caption: gradient-weighted attention, propagated through the image tower.

For each layer A <- mean over heads of (A * dS/dA)^+, R <- R + A R, where A is what multiplies the values (the
difference of the maps in differential layers), S the cosine of image and caption, and R begins as the identity. A
class-token tower's R has the answer in the class token's row; a tower that pools its patches, in the mean of the
patches' rows. One rule for both, and one backward pass.

Source: Chefer, Gur and Wolf 2021 (arXiv 2103.15679), section 3.1, rules 5 and 6; with their plain attention maps
replaced by the differential ones (an entry below zero counts where removing it would lower S).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, captured
from diffvision.analysis.maps import Patches, compute_layer_maps, find_patches
from diffvision.models.modes import evaluating


def caption_relevance(model: nn.Module, image: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the relevance of each part of an image to each caption, and the cosines of image and captions.

    Args:
        model: an OpenCLIP model whose image tower is a vision transformer of timm or OpenCLIP; its modes and gradients
            are left alone.
        image: [3, h, w], transformed as the model wants it.
        texts: [C, L] token ids.

    Returns:
        Relevance [C, rows, columns], at least 0, and the cosine of image and caption [C].

    Raises:
        ValueError: the model reads no text, or has no such image tower.
    """
    tower: Any = model
    if not hasattr(tower, "encode_text"):
        raise ValueError(f"{type(model).__name__} has no encode_text: give captions to a model that reads text")
    patches = find_patches(model, image)
    calls: list[Call] = []
    with evaluating(model):
        captions = tower.encode_text(texts, normalize=True)
        with torch.enable_grad():
            # The pixels require gradients, so that a model with frozen parameters has a graph too.
            pixels = image[None].detach().requires_grad_()
            with captured(model, calls.append):
                cosines = (tower.encode_image(pixels, normalize=True) @ captions.T)[0]
            grids = [_relevance(calls, cosine, patches) for cosine in cosines]
    return torch.stack(grids).unflatten(1, (patches.rows, patches.columns)), cosines.detach()


def _relevance(calls: list[Call], score: Tensor, patches: Patches) -> Tensor:
    """Return the relevance of each patch, [patches]."""
    projected: Any = [call.projected for call in calls]
    gradients = torch.autograd.grad(score, projected, retain_graph=True)
    identity = relevance = torch.eye(calls[0].q.shape[3], dtype=score.dtype, device=score.device)
    for call, gradient in zip(calls, gradients, strict=True):
        relevance = relevance + _weight_by_gradient(call, gradient[0]) @ relevance
    rows = slice(0, 1) if patches.pools_class else slice(patches.first, None)
    return (relevance - identity)[rows, patches.first :].mean(dim=0)


def _weight_by_gradient(call: Call, gradient: Tensor) -> Tensor:
    """Return the mean over heads of the positive part of map times gradient, [N, N].

    The gradient [N, dim] is of the heads' outputs side by side, as the output projection takes them.
    """
    layer = compute_layer_maps(call)
    weights = layer.weights.detach().requires_grad_()
    heads = layer.outputs(weights)[2]  # [H, N, V]
    width = heads.shape[0] * heads.shape[2]
    of_heads = gradient[:, :width].unflatten(-1, (heads.shape[0], heads.shape[2])).transpose(0, 1)
    (of_map,) = torch.autograd.grad(heads, weights, of_heads.to(heads.dtype))
    return (of_map * weights.detach()).clamp(min=0).mean(dim=0)
