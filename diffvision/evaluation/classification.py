"""A classifier's accuracy, as timm's validate.py measures it."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from diffvision.data.images.folders import EvaluationFolder
from diffvision.data.images.sources import class_prompts
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.samples import PerSample
from diffvision.evaluation.zero_shot import classification_metrics, classification_samples


def classification(features: Features, folder: EvaluationFolder, options: Options) -> dict[str, float]:
    """Return acc1, acc5 and mean_per_class_recall of a timm model's classifier on a split's images.

    Raises:
        ValueError: a model without a linear classifier (OpenCLIP's classify by text: zero_shot), or whose classes are
            fewer than the labels of the folder.
    """
    return classification_metrics(*_logits(features, folder, options))


def classifier_samples(features: Features, folder: EvaluationFolder, options: Options) -> dict[str, PerSample]:
    """Return the metrics of `classification` image by image."""
    return classification_samples(*_logits(features, folder, options))


def _logits(features: Features, folder: EvaluationFolder, options: Options) -> tuple[Tensor, Tensor]:
    """Return logits [N, C] of a split's images, and their labels [N]."""
    head = features.model.get_classifier() if hasattr(features.model, "get_classifier") else None
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{type(features.model).__name__} has no linear classifier: evaluate a timm classifier, or ask "
            "for zero_shot (with texts) or linear_probe"
        )
    images, labels = features.images(folder, options.split)
    labels = _numbered_as(features.model, folder, labels)
    _warn_of_more_outputs(features.model, head.out_features, folder)
    if labels.max() >= head.out_features:
        raise ValueError(
            f"evaluation folder {folder.name!r} has the label {labels.max()}, but the model tells "
            f"{head.out_features} classes apart: give a checkpoint that was trained on these classes"
        )
    with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
        batches = images.to(features.device, head.weight.dtype).split(features.batch_size)
        return torch.cat([head(batch).float().cpu() for batch in batches]), labels


def _warn_of_more_outputs(model: nn.Module, outputs: int, folder: EvaluationFolder) -> None:
    """Warn where the model has more outputs than the folder classes, and no names say which of them these are."""
    if not _label_names(model) and 0 < len(folder.classnames or ()) < outputs:
        warnings.warn(
            f"the model tells {outputs} classes apart, and evaluation folder {folder.name!r} has "
            f"{len(folder.classnames)}: they are taken for the first outputs, which is wrong unless the model was "
            "trained on them as its first",
            stacklevel=2,
        )


def _label_names(model: nn.Module) -> list[str]:
    return class_prompts((getattr(model, "pretrained_cfg", None) or {}).get("label_names") or [])


def _numbered_as(model: nn.Module, folder: EvaluationFolder, labels: Tensor) -> Tensor:
    """Return labels in the order of the model's classes, where the model and the folder both name theirs."""
    names = _label_names(model)
    if not names or not folder.classnames or names == folder.classnames:
        return labels
    if unknown := [name for name in folder.classnames if name not in names]:
        raise ValueError(
            f"evaluation folder {folder.name!r} has classes that the model does not have: {', '.join(unknown[:5])}; "
            f"the model's are {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        )
    return torch.tensor([names.index(name) for name in folder.classnames])[labels]
