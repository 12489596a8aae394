"""Which objects are in an image, asked of image-text models: POPE's questions (arXiv 2305.10355), by similarity.

POPE asks a model that answers in words. A CLIP has scores: these metrics say how well they separate objects that are in
an image from objects that are not, and need a threshold only for POPE's five.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diffvision.data.images.folders import TEMPLATES, EvaluationFolder
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.per_sample import Metrics, PerSample
from diffvision.evaluation.prompts import Prompts, read_templates


def objects(features: Features, folder: EvaluationFolder, options: Options) -> Metrics:
    """Return auc, ap, paired_acc, paired_ties, and POPE's accuracy, precision, recall, f1, yes_ratio.

    `presence_metrics` defines them. An object's score is the cosine similarity of the image and the object's vector,
    the normalised mean of its prompts' unit vectors.
    """
    asked = features.pairs(folder, options.split, encode_texts=False)
    if len(asked.images) < 2:
        raise ValueError(
            f"evaluation folder {folder.name!r} has 1 image in split {options.split!r}: give at least 2, since each "
            "half sets the other's threshold"
        )
    names = sorted(set(asked.captions))
    templates = read_templates(options) or folder.templates or list(TEMPLATES)
    vectors = features.classes(Prompts(names, templates, None).texts())
    row = {name: number for number, name in enumerate(names)}
    scores = (asked.images[asked.owner] * vectors[[row[name] for name in asked.captions]]).sum(dim=1)
    return presence_metrics(*_split_by_presence(scores, asked.owner))


def presence_metrics(present: Tensor, absent: Tensor, owner: Tensor) -> Metrics:
    """Return metrics of the scores of Q pairs of objects, one in the image and one not.

    auc, ap: area under the ROC curve and average precision over all 2Q questions, with yes as the positive class.
    paired_acc: fraction of pairs whose present object scores higher, ties counting as wrong; paired_ties: that of ties.
    accuracy, precision, recall, f1, yes_ratio: as in POPE, answering yes above a threshold. Images are split into two
    halves (even, odd); each half's threshold is the one with the highest accuracy on the other half. (Choosing it by F1
    would answer yes to everything if scores are weak, the failure that POPE found.)

    Args:
        present, absent: float [Q].
        owner: int64 [Q], the image of each pair.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    scores, units = torch.cat([present, absent]), torch.cat([owner, owner])
    truth = torch.arange(len(scores)) < len(present)
    yes = torch.zeros_like(truth)
    for half in (0, 1):
        measured = units % 2 == half
        yes[measured] = scores[measured] > best_threshold(scores[~measured], truth[~measured])
    hits, answered = int((yes & truth).sum()), int(yes.sum())
    return {
        "auc": float(roc_auc_score(truth.numpy(), scores.numpy())),
        "ap": float(average_precision_score(truth.numpy(), scores.numpy())),
        "paired_acc": PerSample(present > absent, owner),
        "paired_ties": PerSample(present == absent, owner),
        "accuracy": PerSample(yes == truth, units),
        "precision": hits / answered if answered else math.nan,
        "recall": PerSample(yes[truth], owner),
        "f1": 2 * hits / (answered + len(present)),
        "yes_ratio": PerSample(yes, units),
    }


def best_threshold(scores: Tensor, truth: Tensor) -> float:
    """Return the threshold of the highest accuracy, halfway between two scores; of several the middle one.

    Args:
        scores: float [N].
        truth: bool [N]; yes is right above the threshold.
    """
    values = scores.double().unique()
    cuts = torch.cat([values[:1] - 1, (values[:-1] + values[1:]) / 2, values[-1:] + 1])
    ordered, order = scores.double().sort()
    # Below a cut, each no is right and each yes is wrong.
    right_below = torch.cat([torch.zeros(1), (~truth[order]).double().cumsum(0) - truth[order].double().cumsum(0)])
    gained = right_below[torch.searchsorted(ordered, cuts)]
    best = (gained == gained.max()).nonzero()[:, 0]
    return float(cuts[best[len(best) // 2]])


def _split_by_presence(scores: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the scores of captions into pairs of a present and an absent object; return also each pair's image index.

    Of each image's captions, which are consecutive, the first half names present objects and the second absent ones.
    """
    counts = owner.bincount()
    present, absent = torch.cat([per_image.view(2, -1) for per_image in scores.split(counts.tolist())], dim=1)
    return present, absent, torch.arange(len(counts)).repeat_interleave(counts // 2)
