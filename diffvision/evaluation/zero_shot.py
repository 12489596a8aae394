"""Zero-shot classification, as CLIP_benchmark's `zeroshot_classification` measures it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.per_sample import Metrics, count_each, means
from diffvision.evaluation.prompts import local_labels, prompts_of


def zero_shot(features: Features, folder: EvaluationFolder, options: Options) -> Metrics:
    """Return acc1, acc5 and mean_per_class_recall of the classes' texts as a classifier of a split's images.

    A class's vector is the normalised mean of its prompts' unit vectors (`Features.classes`); an image's logits are 100
    times its cosine similarities to these vectors.
    """
    return classification_samples(*_logits(features, folder, options))


def _logits(features: Features, folder: EvaluationFolder, options: Options) -> tuple[Tensor, Tensor]:
    """Return logits [N, C] of a split's images, and their labels [N]."""
    prompts = prompts_of(folder, options)
    classifier = features.classes(prompts.texts()).to(features.device).T
    images, labels = features.images(folder, options.split)
    labels = local_labels(labels, prompts, folder.name)
    with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
        # In the batches in which the images were encoded: the last bits of a product can depend on its shape, and
        # which of two tied classes wins depends on the last bits.
        logits = [
            (100.0 * F.normalize(batch.to(features.device), dim=-1) @ classifier).cpu()
            for batch in images.split(features.batch_size)
        ]
    return torch.cat(logits), labels


def classification_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return acc1, acc5 and mean_per_class_recall of logits [N, C] float for labels [N] int64.

    acc5 is NaN with fewer than five classes. Recall is averaged over the classes that occur among the labels. Among
    equal logits the order is torch.topk's, and for the recall torch.argmax's.
    """
    return means(classification_samples(logits, labels))


def classification_samples(logits: Tensor, labels: Tensor) -> Metrics:
    """Return the metrics of `classification_metrics` sample by sample."""
    top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    return {
        "acc1": count_each(top[:, 0]),
        "acc5": count_each(top.any(dim=1)) if logits.shape[1] >= 5 else math.nan,
        "mean_per_class_recall": count_each(logits.argmax(dim=1) == labels, labels),
    }
