"""The neurons that make patches outliers by norm, found from images for test-time registers (arXiv 2506.08010).

Neurons are ranked as in the paper's code (nickjiang2378/test-time-registers at 860df43): by their mean absolute
activation at outliers, in images where they are below `QUIET` at half of the tokens or more. That code has a norm, a
last layer and a number of neurons set by hand for each model; here they are measured, as `find_register_neurons` says.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffvision.analysis.sinks import OUTLIER, relative_norms
from diffvision.models.adapt import adapt, register_trunk
from diffvision.models.modes import evaluating

MIN_IMAGES = 16  # in fewer, neurons of what the images show score as high
MAX_NEURONS = 64  # the authors have 10 in CLIP's B/16 and 50 in DINOv2-L
QUIET = 0.5
LEFT = 0.05  # of the outliers


class Found(NamedTuple):
    """A model's register neurons, and what moving them changes on the images that they were found in."""

    method: str  # of `adapt`: registers=BLOCK-NEURON,...
    before: float  # share of patches that are outliers, after the block with most
    after: float
    norm: float  # the register's there, over the median: mean over images


def find_register_neurons(model: nn.Module, images: Sequence[Tensor]) -> Found:
    """Return the fewest neurons of highest score that leave at most `LEFT` of the outlier patches, by bisection.

    The model is a timm `VisionTransformer`, or OpenCLIP's with one, and is unchanged. Images are `MIN_IMAGES` or more,
    [3, h, w] of one size, as the model wants them. Outliers are over `OUTLIER` times the median norm, and neurons of
    blocks up to the first that has half as many outliers as the block with most.

    Raises:
        ValueError: too few images, no outliers or none that neurons make, or a model with registers or adapted.
    """
    trunk = register_trunk(model)
    first, size = trunk.num_prefix_tokens, len(images)
    if size < MIN_IMAGES:
        raise ValueError(f"{size} images are too few, as neurons of what they show score as high: give {MIN_IMAGES}")
    with evaluating(trunk):
        norms = _norms(trunk, images)[..., first:]
        counts = (norms > OUTLIER).sum(dim=(0, 2))
        most, block = int(counts.max()), int(counts.argmax())
        if not most:
            found = f"the largest norm of a patch is {norms.max():.2f} times the median ({size} images)"
            raise ValueError(f"{found}, and outliers are over {OUTLIER:g}: leave the model as it is")
        last = int((counts >= most / 2).nonzero()[0])
        ranked = _rank(trunk, images, norms[:, block] > OUTLIER, last)

        def measure(number: int) -> tuple[str, int, float]:
            """Return the method for so many neurons, the outliers that it leaves, and the register's norm."""
            method = "registers=" + ",".join(f"{block}-{neuron}" for block, neuron in sorted(ranked[:number]))
            moved = _norms(adapt(copy.deepcopy(trunk), method), images)
            left = (moved[..., first + 1 :] > OUTLIER).sum(dim=(0, 2)).max()
            return method, int(left), moved[:, block, first].mean().item()

        number = 1 + bisect_left(range(1, len(ranked)), True, key=lambda number: measure(number)[1] <= LEFT * most)
        method, left, register = measure(number)
    if left > LEFT * most:
        raise ValueError(f"{number} neurons moved leave {left} of {most} outliers: leave the model as it is")
    return Found(method, most / norms[:, 0].numel(), left / norms[:, 0].numel(), register)


def _norms(trunk: Any, images: Sequence[Tensor]) -> Tensor:
    """Return the norms of tokens after each block over their median, [images, blocks, N]."""
    return torch.stack([torch.stack([*map(relative_norms, _outputs(trunk, trunk.blocks, one))]) for one in images])


def _rank(trunk: Any, images: Sequence[Tensor], outliers: Tensor, last: int) -> list[tuple[int, int]]:
    """Return `MAX_NEURONS` (block, neuron) of blocks up to the last, highest first; outliers are [images, patches]."""
    scores = torch.zeros(last + 1, trunk.blocks[0].mlp.fc1.out_features)
    for image, of_image in zip(images, outliers, strict=True):
        if of_image.any():  # else they have no mean
            hidden = torch.stack(_outputs(trunk, [block.mlp.act for block in trunk.blocks[: last + 1]], image))
            is_sparse = (hidden < QUIET).float().mean(dim=1) >= 0.5
            scores += hidden[:, trunk.num_prefix_tokens :][:, of_image].abs().mean(dim=1) * is_sparse
    return [divmod(i, scores.shape[1]) for i in scores.flatten().argsort(descending=True)[:MAX_NEURONS].tolist()]


def _outputs(trunk: Any, modules: Iterable[nn.Module], image: Tensor) -> list[Tensor]:
    """Return the modules' outputs [N, C] for one image, on the CPU."""
    outputs: list[Tensor] = []
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(lambda _, __, out: outputs.append(out[0].float().cpu())))
        trunk.forward_features(image[None].to(trunk.patch_embed.proj.weight))
    return outputs
