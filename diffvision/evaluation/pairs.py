"""Two images and two captions per sample, one caption for each image: Winoground's scores, one of which is MMVP-VLM's.

Sources: Thrush et al. 2022 (arXiv 2204.03162) for the three scores, Tong et al. 2024 (arXiv 2401.06209) for MMVP-VLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.composition import ROUNDING
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.per_sample import Metrics, PerSample, by_kind, count_each

MMVP_OF_DIFFCLIP = (
    "Orientation and Direction",
    "Presence of Specific Features",
    "State and Condition",
    "Positional and Relational Context",
    "Color and Appearance",
    "Structural Characteristics",
    "Viewpoint and Perspective",
)
"""The kinds of MMVP-VLM over which DiffCLIP's figure 4 takes the mean."""
MMVP = {*MMVP_OF_DIFFCLIP, "Quantity and Count", "Texts"}


def pairs(features: Features, folder: EvaluationFolder, options: Options) -> Metrics:
    """Return text_score, image_score and group_score over all samples and by kind, and ties; see `pair_scores`.

    By chance these are 1/4, 1/4 and 1/6. Where the kinds are the nine of MMVP-VLM, mean_of_7_kinds_image_score is the
    mean over those that DiffCLIP reports.
    """
    both = features.pairs(folder, options.split)
    kinds = both.kinds[::2]
    right = pair_scores(inner_products(both.images, both.texts))
    ties = right.pop("ties")
    samples: Metrics = {}
    for name, of_samples in right.items():
        samples |= by_kind(name, of_samples, kinds)
        if name == "image_score" and set(kinds) == MMVP:
            samples["mean_of_7_kinds_image_score"] = _mean_over_kinds(of_samples, kinds, MMVP_OF_DIFFCLIP)
    samples["ties"] = count_each(ties)
    return samples


def inner_products(images: Tensor, texts: Tensor) -> Tensor:
    """Return inner products [S, 2, 2] of caption c and image t of each sample at [:, c, t].

    Args:
        images: [2S, D], the two of a sample next to each other.
        texts: [2S, D], in the same way.
    """
    rows = [[(texts[caption::2] * images[image::2]).sum(dim=1) for image in (0, 1)] for caption in (0, 1)]
    return torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)


def pair_scores(scores: Tensor) -> dict[str, Tensor]:
    """Return whether each sample is right, bool [S], by Winoground's definitions; a tie, up to `ROUNDING`, is wrong.

    text_score: each image scores higher with its caption than with the other. image_score: each caption scores higher
    with its image than with the other. group_score: both. ties: two of the scores that these compare are equal.

    Args:
        scores: [S, 2, 2] of caption c and image t at [:, c, t]; caption i is of image i.
    """
    right = scores.diagonal(dim1=1, dim2=2)
    over_caption, over_image = right - scores[:, [1, 0], [0, 1]], right - scores[:, [0, 1], [1, 0]]
    text, image = (over_caption > ROUNDING).all(dim=1), (over_image > ROUNDING).all(dim=1)
    ties = ((over_caption.abs() <= ROUNDING) | (over_image.abs() <= ROUNDING)).any(dim=1)
    return {"text_score": text, "image_score": image, "group_score": text & image, "ties": ties}


def _mean_over_kinds(right: Tensor, kinds: Sequence[str], wanted: Sequence[str]) -> PerSample:
    """Return the mean over the wanted kinds."""
    units = torch.tensor([number for number, kind in enumerate(kinds) if kind in wanted])
    classes = torch.tensor([wanted.index(kind) for kind in kinds if kind in wanted])
    return PerSample(right[units], units, classes)
