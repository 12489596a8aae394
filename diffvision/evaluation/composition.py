"""The right caption against wrong ones made of the same words, as CLIP_benchmark's `image_caption_selection`."""

from __future__ import annotations

import torch
from torch import Tensor

from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.samples import PerSample, each


def composition(features: Features, folder: EvaluationFolder, options: Options) -> dict[str, float]:
    """Return acc: the share of images that are closest to the first of their captions; see `selection_accuracy`."""
    return {name: samples.mean() for name, samples in composition_samples(features, folder, options).items()}


def composition_samples(features: Features, folder: EvaluationFolder, options: Options) -> dict[str, PerSample]:
    """Return the metric of `composition` image by image."""
    pairs = features.pairs(folder, options.split)
    single = pairs.owner.bincount(minlength=len(pairs.images)) < 2
    if single.any():
        raise ValueError(
            f"evaluation folder {folder.name!r}: image {int(single.nonzero()[0, 0])} of split {options.split!r} has "
            "fewer than 2 captions; composition needs the right one, and after it at least one wrong one"
        )
    return {"acc": each(selections(pairs.images, pairs.texts, pairs.owner))}


def selection_accuracy(images: Tensor, texts: Tensor, owner: Tensor) -> float:
    """Return the share of images [N, D] that score highest with the first of their captions, by inner product.

    Text t of texts [T, D] is a caption of image `owner[t]`; `owner` [T] is ascending. An exact tie counts as right,
    as in CLIP_benchmark, where this is `acc` and `text_acc`. Its `image_acc` is always 1 with one image to choose from.
    """
    return selections(images, texts, owner).sum().item() / len(images)


def selections(images: Tensor, texts: Tensor, owner: Tensor) -> Tensor:
    """Return which images score highest with the first of their captions, bool [N]; see `selection_accuracy`."""
    right, start = [], 0
    for image, count in zip(images, owner.bincount(minlength=len(images)).tolist(), strict=True):
        captions = texts[start : start + count]
        right.append(int((image[None] @ captions.T).argmax()) == 0)
        start += count
    return torch.tensor(right)
