"""Logistic regression on frozen features, by scikit-learn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.output_files import bar
from diffvision.evaluation.per_sample import Metrics
from diffvision.evaluation.zero_shot import classification_metrics

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

VALIDATION_SPLITS = ("val", "valid", "validation")
_FIRST_COSTS = [10.0**power for power in range(-6, 7, 2)]
_TOLERANCE = 1e-6


def linear_probe(features: Features, folder: EvaluationFolder, options: Options) -> Metrics:
    """Return acc1, acc5 and mean_per_class_recall of logistic regression on unit-length features, and its cost.

    L-BFGS to convergence; the cost is chosen on the folder's validation split or, where it has none, on a fifth of
    every class of the training split, and the regression is then fitted on all of both (CLIP's appendix A.3 and El
    Banani's evaluation). CLIP_benchmark's `linear_probe` is another algorithm, ten passes of AdamW (`few_shot.py` has
    it with k images a class); its `lp_acc1` is not this acc1.
    """
    train = unit_features(features, folder, options.train_split)
    test, labels = unit_features(features, folder, options.split)
    classes = int(max(train[1].max(), labels.max())) + 1
    validation = next((name for name in VALIDATION_SPLITS if name in folder.splits), None)
    held = None if validation is None else unit_features(features, folder, validation)
    cost = options.probe_cost or choose_cost(*(_split(*train, seed=options.seed) if held is None else (train, held)))
    if held is not None:
        train = (torch.cat([train[0], held[0]]), torch.cat([train[1], held[1]]))
    return {**classification_metrics(predict_logits(fit_probe(*train, cost), test, classes), labels), "cost": cost}


def unit_features(features: Features, folder: EvaluationFolder, split: str) -> tuple[Tensor, Tensor]:
    """Return unit-length features [N, D] and labels [N] of a split."""
    images, labels = features.images(folder, split)
    return F.normalize(images, dim=-1), labels


def fit_probe(x: Tensor, y: Tensor, cost: float) -> LogisticRegression:
    """Return scikit-learn's regression that minimises cost * (summed cross-entropy) + |weight|^2 / 2."""
    from sklearn.linear_model import LogisticRegression

    # Of two classes scikit-learn has one weight vector, whose penalty is twice that of softmax's two.
    of_binary = 2 if len(y.unique()) == 2 else 1
    return LogisticRegression(C=cost * of_binary, tol=_TOLERANCE, max_iter=10_000).fit(x.double().numpy(), y.numpy())


def predict_logits(probe: LogisticRegression, x: Tensor, classes: int) -> Tensor:
    """Return log probabilities [N, classes] of features [N, D]; -inf for classes without training samples."""
    logits = torch.full((len(x), classes), -math.inf)
    logits[:, torch.from_numpy(probe.classes_)] = torch.from_numpy(probe.predict_log_proba(x.double().numpy())).float()
    return logits


def choose_cost(train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> float:
    """Return the cost with the best accuracy on the held-out samples `held`; the smallest cross-entropy breaks ties.

    Powers of 100 from 1e-6 to 1e6 are tried, then the interval around the best is halved down to an eighth of a
    decade (CLIP, arXiv 2103.00020, appendix A.3).
    """
    scores: dict[float, tuple[float, float]] = {}
    classes = int(max(train[1].max(), held[1].max())) + 1

    def score(cost: float) -> tuple[float, float]:
        """Return the held-out accuracy and negative loss at one cost, computed once."""
        if cost not in scores:
            logits = predict_logits(fit_probe(*train, cost), held[0], classes)
            right = (logits.argmax(dim=1) == held[1]).double().mean().item()
            scores[cost] = (right, -F.cross_entropy(logits, held[1]).item())
        return scores[cost]

    best = max(bar(_FIRST_COSTS, "linear probe, costs"), key=score)
    for step in bar((1.0, 0.5, 0.25, 0.125), "linear probe, finer costs"):  # decades
        around = [10 ** (math.log10(best) + shift) for shift in (-step, step)]
        inside = [cost for cost in around if _FIRST_COSTS[0] <= cost <= _FIRST_COSTS[-1]]
        best = max([best, *inside], key=score)
    return best


def _split(x: Tensor, y: Tensor, *, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return four fifths of every class, and the rest, which is empty for a class of fewer than five."""
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique():
        members = (y == label).nonzero()[:, 0]
        held[members[torch.randperm(len(members), generator=generator)[: len(members) // 5]]] = True
    if not held.any():
        raise ValueError(
            "no class of the training split has 5 samples, too few to choose the probe's cost on: give probe_cost, "
            "such as 1.0"
        )
    return (x[~held], y[~held]), (x[held], y[held])
