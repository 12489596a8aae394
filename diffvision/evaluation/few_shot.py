"""Few-shot classification on frozen features, of two kinds: CLIP_benchmark's probe, and El Banani's episodes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.features import Features
from diffvision.evaluation.linear_probe import unit_features
from diffvision.evaluation.options import Options
from diffvision.evaluation.per_sample import Metrics
from diffvision.evaluation.zero_shot import classification_metrics

_PROBE_BATCH = 64
_EPISODES_AT_ONCE = 256


def fewshot_k(features: Features, folder: EvaluationFolder, options: Options) -> Metrics:
    """Return lp_acc1, lp_acc5 and lp_mean_per_class_recall of a linear classifier of `fewshot_k` images per class.

    CLIP_benchmark's `linear_probe --fewshot_k K`: unit-length features, AdamW without decay, batches of 64, the
    learning rate falling by a cosine over all steps. The drawn images and batches differ from CLIP_benchmark's.
    """
    generator = torch.Generator().manual_seed(options.seed)
    images, labels = unit_features(features, folder, options.train_split)
    chosen = draw_per_class(labels, options.fewshot_k, generator)
    test, test_labels = unit_features(features, folder, options.split)
    classes = int(max(labels.max(), test_labels.max())) + 1
    weight, bias = adamw_probe(
        images[chosen].to(features.device),
        labels[chosen].to(features.device),
        classes,
        epochs=options.fewshot_epochs,
        lr=options.fewshot_lr,
        generator=generator,
    )
    logits = F.linear(test.to(features.device), weight, bias).cpu()
    metrics = {f"lp_{name}": value for name, value in classification_metrics(logits, test_labels).items()}
    return {**metrics, "fewshot_k": options.fewshot_k}


def draw_per_class(labels: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return indexes of k samples of each class that occurs in labels [N], in random order.

    Raises:
        ValueError: a class has fewer.
    """
    counts = labels.bincount()
    short = ((counts > 0) & (counts < k)).nonzero()[:, 0]
    if len(short):
        label = int(short[0])
        raise ValueError(
            f"class {label} has {int(counts[label])} training samples, fewer than the {k} asked for: lower fewshot_k"
        )
    order = torch.randperm(len(labels), generator=generator)
    seen = F.one_hot(labels[order]).cumsum(dim=0).gather(1, labels[order][:, None])[:, 0]
    return order[seen <= k]


def adamw_probe(
    x: Tensor, y: Tensor, classes: int, *, epochs: int, lr: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return weight [classes, D] and bias [classes] after `epochs` passes of AdamW over features x [N, D]."""
    bound = x.shape[1] ** -0.5  # as nn.Linear initialises
    steps = epochs * math.ceil(len(x) / _PROBE_BATCH)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        x, y = x.clone(), y.clone()
        weight = (torch.empty(classes, x.shape[1]).uniform_(-bound, bound, generator=generator)).to(x)
        bias = (torch.empty(classes).uniform_(-bound, bound, generator=generator)).to(x)
        optimizer = torch.optim.AdamW([weight.requires_grad_(), bias.requires_grad_()], lr=lr, weight_decay=0.0)
        batches = (
            batch
            for _ in range(epochs)
            for batch in torch.randperm(len(x), generator=generator).to(x.device).split(_PROBE_BATCH)
        )
        for step, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * step / steps)) * lr
            optimizer.zero_grad()
            F.cross_entropy(F.linear(x[batch], weight, bias), y[batch]).backward()
            optimizer.step()
    return weight.detach(), bias.detach()


def fewshot_episodes(features: Features, folder: EvaluationFolder, options: Options) -> Metrics:
    """Return acc, the mean accuracy over random episodes, and acc_ci95, half of its 95% interval; see `episodes`."""
    train = features.images(folder, options.train_split)
    test = features.images(folder, options.split)
    accuracies = episodes(*train, *test, options)
    spread = accuracies.std().item() if len(accuracies) > 1 else math.nan
    return {"acc": accuracies.mean().item(), "acc_ci95": 1.96 * spread / math.sqrt(len(accuracies))}


def episodes(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, options: Options) -> Tensor:
    """Return the accuracy of each episode, [episodes], as El Banani et al. measure few-shot classification.

    An episode draws `ways` classes, `shots` training images and up to `queries` test images of each. Features are
    centred by the mean of the episode's training images and normalised; a query gets the class whose shots have the
    nearest mean (arXiv 2302.12248 and its code, lgssl/evaluation/fewshot.py, after SimpleShot; DiffCLIP follows it).

    Raises:
        ValueError: too few classes, or training images of a class, or no test image of one.
    """
    labels = train_labels.unique().tolist()
    if len(labels) < options.ways:
        raise ValueError(f"ways must be at most the {len(labels)} classes, got {options.ways}")
    support = _by_class(train_labels, labels, options.shots, "training")
    query = _by_class(test_labels, labels, 1, "test")
    generator = torch.Generator().manual_seed(options.seed)
    accuracies = []
    for start in range(0, options.episodes, _EPISODES_AT_ONCE):
        shots, queries = [], []
        for _ in range(min(_EPISODES_AT_ONCE, options.episodes - start)):
            ways = [labels[i] for i in torch.randperm(len(labels), generator=generator)[: options.ways].tolist()]
            shots.append(torch.stack([_draw(support[label], options.shots, generator) for label in ways]))
            queries.append(torch.stack([_draw(query[label], options.queries, generator) for label in ways]))
        accuracies.append(_nearest_mean(train, torch.stack(shots), test, torch.stack(queries)))
    return torch.cat(accuracies)


def _by_class(labels: Tensor, classes: list[int], least: int, split: str) -> dict[int, Tensor]:
    """Return the samples of each class."""
    members = {label: (labels == label).nonzero()[:, 0] for label in classes}
    for label, indexes in members.items():
        if len(indexes) < least:
            raise ValueError(f"class {label} must have at least {least} {split} samples, got {len(indexes)}")
    return members


def _draw(members: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` of a class's samples without repetition; where it has fewer, all of them and -1 for the rest."""
    drawn = members[torch.randperm(len(members), generator=generator)[:count]]
    return F.pad(drawn, (0, count - len(drawn)), value=-1)


def _nearest_mean(train: Tensor, shots: Tensor, test: Tensor, queries: Tensor) -> Tensor:
    """Return the accuracies [E] of episodes; shots [E, W, K] and queries [E, W, Q] are rows of features or -1."""
    shot_features, query_features = train[shots], test[queries.clamp(min=0)]
    mean = shot_features.mean(dim=(1, 2), keepdim=True)
    prototypes = F.normalize(shot_features - mean, dim=-1).mean(dim=2)  # [E, W, D]
    query_features = F.normalize(query_features - mean, dim=-1)
    distances = torch.cdist(query_features.flatten(1, 2), prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distances.argmin(dim=-1).view_as(queries)
    is_query = queries >= 0
    right = (nearest == torch.arange(queries.shape[1])[:, None]) & is_query
    return right.sum(dim=(1, 2)) / is_query.sum(dim=(1, 2))
