"""Values of a metric for each sample, with which two models are compared on the same samples."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PerSample(NamedTuple):
    """The values whose mean is a metric: whether a model is right on each sample, or its loss.

    Attributes:
        values: of the samples [N]: bool, or sums of losses.
        units: int64 [N]: the image or document that a sample belongs to. Samples of one unit are not independent.
        classes: int64 [N]: the metric is the mean of the classes' means; None: the mean of all samples.
        weights: [N]: what the values are divided by, such as the tokens of each sum; None: 1 each.
        exponential: the metric is exp of the mean.
        ratio: the weights depend on the model, such as the objects that it named, so those of two models may differ.
    """

    values: Tensor
    units: Tensor
    classes: Tensor | None = None
    weights: Tensor | None = None
    exponential: bool = False
    ratio: bool = False

    @property
    def size(self) -> int:
        """The number that the metric is averaged over, such as tokens."""
        return len(self.values) if self.weights is None else int(self.weights.sum())

    def mean(self) -> float:
        """Return the metric."""
        if self.classes is not None:
            count = self.classes.bincount()
            hits = self.classes[self.values].bincount(minlength=len(count))
            return (hits[count > 0].double() / count[count > 0]).mean().item()
        total = self.values.sum().item() / (len(self.values) if self.weights is None else self.weights.sum().item())
        return math.exp(min(total, 700)) if self.exponential else total

    def is_like(self, other: PerSample) -> bool:
        """Return whether another model's samples are the same ones, in the same order."""
        return all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in (
                (self.units, other.units),
                (self.classes, other.classes),
                *([] if self.ratio and other.ratio else [(self.weights, other.weights)]),
            )
        )


Metrics = dict[str, PerSample | float]
"""Metrics by name, sample by sample; a float for metrics that are not sample means."""
MOST_KINDS = 64
"""More kinds than these have their mean alone."""
NO_KIND = "no kind"
"""The kind of samples without one, where others have one."""


def means(results: Mapping[str, PerSample | float]) -> dict[str, float]:
    """Return each metric as one number."""
    return {name: result.mean() if isinstance(result, PerSample) else result for name, result in results.items()}


def by_kind(name: str, right: Tensor, kinds: Sequence[str]) -> dict[str, PerSample]:
    """Return the metric `name` over all samples, and where they have kinds the mean over kinds and each kind's.

    Args:
        name: such as "acc": the others are "mean_per_kind_acc" and "acc/KIND".
        right: bool [N].
        kinds: of the samples, N; "" for one that has none.
    """
    results = {name: count_each(right)}
    if any(kinds):
        named = list(dict.fromkeys(kind or NO_KIND for kind in kinds))
        classes = torch.tensor([named.index(kind or NO_KIND) for kind in kinds])
        results[f"mean_per_kind_{name}"] = count_each(right, classes)
        for number, kind in enumerate(named if len(named) <= MOST_KINDS else ()):
            units = (classes == number).nonzero()[:, 0]
            results[f"{name}/{kind}"] = PerSample(right[units], units)
    return results


def count_each(right: Tensor, classes: Tensor | None = None) -> PerSample:
    """Return the samples of a metric that counts every image once."""
    return PerSample(right, torch.arange(len(right)), classes)


def fingerprint(content: Any) -> str:
    """Return 16 hexadecimal digits of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
