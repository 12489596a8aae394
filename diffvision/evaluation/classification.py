"""A classifier's accuracy, as timm's validate.py measures it."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from diffvision.data.images.folders import EvaluationFolder
from diffvision.data.images.image_sources import name_classes
from diffvision.evaluation.features import Features
from diffvision.evaluation.imagenet import WNID, imagenet_wnids
from diffvision.evaluation.options import Options
from diffvision.evaluation.per_sample import Metrics
from diffvision.evaluation.prompts import IMAGENET, Prompts, local_labels
from diffvision.evaluation.zero_shot import classification_samples


def classification(features: Features, folder: EvaluationFolder, options: Options) -> Metrics:
    """Return acc1, acc5 and mean_per_class_recall of a timm model's classifier on a split's images.

    Raises:
        ValueError: a model without a linear classifier (for OpenCLIP's use zero_shot), or whose classes are
            fewer than the labels of the folder.
    """
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
    outputs = _outputs(features.model, head.out_features, folder, options)
    if outputs is not None:
        labels = torch.tensor(outputs)[local_labels(labels, Prompts(folder.classnames, [], None), folder.name)]
    elif 0 < len(folder.classnames or ()) < head.out_features:
        count = len(folder.classnames or ())
        warnings.warn(
            f"model has {head.out_features} outputs, evaluation folder {folder.name!r} has {count} classes: assuming "
            f"classes 0-{count - 1}, which is wrong unless the model was trained so",
            stacklevel=2,
        )
    if labels.max() >= head.out_features:
        raise ValueError(
            f"evaluation folder {folder.name!r} has label {labels.max()}, but the model has {head.out_features} "
            "classes: give a checkpoint trained on these classes"
        )
    with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
        batches = images.to(features.device, head.weight.dtype).split(features.batch_size)
        return torch.cat([head(batch).float().cpu() for batch in batches]), labels


def _outputs(model: nn.Module, count: int, folder: EvaluationFolder, options: Options) -> list[int] | None:
    """Return which of a model's outputs each class of the folder is, by names or ImageNet's wnids; None if unknown."""
    classes = list(folder.classnames or [])
    names = name_classes((getattr(model, "pretrained_cfg", None) or {}).get("label_names") or [])
    if not classes:
        return None
    if options.classnames == IMAGENET and count == 1000 and all(map(str.isdecimal, classes)):
        return [int(name) for name in classes]
    if classes == names:  # names may occur twice
        return [*range(len(names))]
    known = {name: names.index(name) for name in names}
    if not known.keys() >= set(classes):
        known = _wnids(model, classes, count) or known
    if not known:
        return None
    if unknown := [name for name in classes if name not in known]:
        first = ", ".join([*known][:5])
        raise ValueError(
            f"evaluation folder {folder.name!r} has classes that the model lacks: {', '.join(unknown[:5])}; give a "
            f"model with them (its own: {first}{(', ...' if len(known) > 5 else '')})"
        )
    return [known[name] for name in classes]


def _wnids(model: nn.Module, classes: list[str], count: int) -> dict[str, int]:
    """Return {wnid: output} of a model of ImageNet's classes, by their number; empty unless `classes` are wnids."""
    from timm.data import infer_imagenet_subset

    subset = infer_imagenet_subset(model)
    if subset is None or not all(map(WNID.fullmatch, classes)):
        return {}
    known = imagenet_wnids(subset)
    # As many other classes as the model has outputs are those that it was trained on.
    return {} if len(classes) == count and not known.keys() >= set(classes) else known
