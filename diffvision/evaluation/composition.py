"""The right caption against wrong ones made of the same words, as CLIP_benchmark's `image_caption_selection`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.per_sample import Metrics, by_kind, count_each

ROUNDING = 1e-6
"""Cosine similarities that differ by no more are a tie: a text's features differ by as much between rows of a batch."""


def composition(features: Features, folder: EvaluationFolder, options: Options) -> Metrics:
    """Return acc, the share of images closest to the first of their captions, overall and by kind, and ties.

    acc is CLIP_benchmark's, where it is also `text_acc`; its `image_acc` is always 1 with one image to choose from. An
    exact tie counts as right. ties is the share of images whose first caption is no further than `ROUNDING` from the
    best of the others, so that rounding or the order decided.
    """
    pairs = features.pairs(folder, options.split)
    counts = pairs.owner.bincount(minlength=len(pairs.images))
    if (counts < 2).any():
        raise ValueError(
            f"evaluation folder {folder.name!r}: image {int((counts < 2).nonzero()[0, 0])} of split "
            f"{options.split!r} has fewer than 2 captions: give the right one, then wrong ones"
        )
    scores = caption_scores(pairs.images, pairs.texts, pairs.owner)
    return {**by_kind("acc", is_first_best(scores), pairs.kinds), "ties": count_each(is_first_tied(scores))}


def caption_scores(images: Tensor, texts: Tensor, owner: Tensor) -> list[Tensor]:
    """Return the scores of each image of images [N, D] with its captions, [captions] each, by inner product.

    Text t of texts [T, D] is a caption of image `owner[t]`; `owner` [T] is ascending.
    """
    counts = owner.bincount(minlength=len(images)).tolist()
    return [(image[None] @ captions.T)[0] for image, captions in zip(images, texts.split(counts), strict=True)]


def is_first_best(scores: Sequence[Tensor]) -> Tensor:
    """Return where no score is above the first one, bool [N]."""
    return torch.tensor([int(of_image.argmax()) == 0 for of_image in scores])


def is_first_tied(scores: Sequence[Tensor]) -> Tensor:
    """Return where the first score is equal to the highest of the others, up to `ROUNDING`, bool [N]."""
    return torch.stack([(of_image[0] - of_image[1:].max()).abs() <= ROUNDING for of_image in scores])
