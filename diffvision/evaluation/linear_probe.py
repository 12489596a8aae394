"""Logistic regression on frozen features."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.output_files import bar
from diffvision.evaluation.per_sample import Metrics
from diffvision.evaluation.zero_shot import classification_metrics

VALIDATION_SPLITS = ("val", "valid", "validation")
_FIRST_COSTS = [10.0**power for power in range(-6, 7, 2)]
_TOLERANCE = 1e-6
_ROUND = 20  # iterations between looks at the gradient
_SCALE = 1e12  # torch's L-BFGS learns nothing of curvatures below 1e-10, as those of a small objective are


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

    def fit(x: Tensor, y: Tensor, cost: float) -> tuple[Tensor, Tensor]:
        return logistic_regression(x.to(features.device), y.to(features.device), classes, cost)

    cost = options.probe_cost or choose_cost(
        fit, *(_split(*train, seed=options.seed) if held is None else (train, held))
    )
    if held is not None:
        train = (torch.cat([train[0], held[0]]), torch.cat([train[1], held[1]]))
    logits = linear(test.to(features.device), *fit(*train, cost)).cpu()
    return {**classification_metrics(logits, labels), "cost": cost}


def unit_features(features: Features, folder: EvaluationFolder, split: str) -> tuple[Tensor, Tensor]:
    """Return unit-length features [N, D] and labels [N] of a split."""
    images, labels = features.images(folder, split)
    return F.normalize(images, dim=-1), labels


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return logits [N, C] of features [N, D]."""
    return x @ weight.T + bias


def logistic_regression(
    x: Tensor, y: Tensor, classes: int, cost: float, max_iter: int = 10_000
) -> tuple[Tensor, Tensor]:
    """Return weight [classes, D] and bias [classes] that minimise cost * (summed cross-entropy) + |weight|^2 / 2.

    scikit-learn's objective and its `C`, by L-BFGS from zero on the device of x [N, D]. It is computed in float64 and
    returned in the dtype of x. It ends where the objective is at most a millionth above its minimum; a fit that has
    not converged after `max_iter` iterations gives a warning.
    """
    # Lightning validates in inference mode, where nothing can be differentiated.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        # Centred, since a common offset of the features makes the fit slow; the bias has no penalty and absorbs it.
        dtype, mean = x.dtype, x.double().mean(dim=0)
        x, y = x.double() - mean, y.clone()
        weight = torch.zeros(classes, x.shape[1], dtype=x.dtype, device=x.device, requires_grad=True)
        bias = torch.zeros(classes, dtype=x.dtype, device=x.device, requires_grad=True)
        # The objective is divided by the samples, so that the tolerance means the same for any number of them.
        penalty = 1 / (cost * len(x))
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=_ROUND, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = _SCALE * (F.cross_entropy(linear(x, weight, bias), y) + penalty / 2 * weight.square().sum())
            value.backward()
            return value

        for _ in range(0, max_iter, _ROUND):
            optimizer.step(loss)
            value = loss().item() / _SCALE
            of_weight, of_bias = (torch.linalg.vector_norm(leaf.grad).item() / _SCALE for leaf in (weight, bias))
            # The penalty gives the weight's curvature; the bias is taken to be at most 1 from its best.
            above = of_weight**2 / (2 * penalty) + of_bias
            if above <= _TOLERANCE * value:
                break
        else:
            warnings.warn(
                f"logistic regression of cost {cost:g} has not converged in {max_iter} iterations: the gradient's norm "
                f"is {math.hypot(of_weight, of_bias):.1e} and the objective, {value:.1e}, up to {above:.1e} above its "
                "minimum; give a smaller probe_cost",
                stacklevel=2,
            )
        return weight.detach().to(dtype), (bias - weight @ mean).detach().to(dtype)


def choose_cost(
    fit: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]],
    train: tuple[Tensor, Tensor],
    held: tuple[Tensor, Tensor],
) -> float:
    """Return the cost with the best accuracy on the held-out samples `held`; the smallest cross-entropy breaks ties.

    Powers of 100 from 1e-6 to 1e6 are tried, then the interval around the best is halved down to an eighth of a
    decade (CLIP, arXiv 2103.00020, appendix A.3).
    """
    scores: dict[float, tuple[float, float]] = {}

    def score(cost: float) -> tuple[float, float]:
        """Return the held-out accuracy and negative loss at one cost, computed once."""
        if cost not in scores:
            weight, bias = fit(*train, cost)
            logits = linear(held[0].to(weight), weight, bias).cpu()
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
