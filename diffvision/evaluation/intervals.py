"""95% intervals of a share, and of differences between two models, paired over samples or over seeds.

Paired: both models saw the same samples. The interval is a bootstrap over units (the images or documents that samples
belong to). McNemar's exact test gives the probability of so uneven a disagreement between two equally good models.
Over seeds: Welch's t interval of the difference of two means. Where all runs saw the same samples, it is widened to the
bootstrap over seeds and samples.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from diffvision.evaluation.per_sample import PerSample

LEVEL = 0.95  # of all intervals
RESAMPLES, SEED = 10_000, 0
FEWEST_SAMPLES = 10
"""Units (images, documents) that an interval needs: with 10 the bootstrap of two equal models' losses excludes zero in
one case of ten, with 3 in one of four, and with equal differences its width is zero whatever their number."""
FEWEST_SEEDS = 3
RULE = (
    "Higher or lower: the interval excludes zero. n.s. (not significant): it includes zero, which does not show that "
    "the models are equal."
)
PAIRED_RULE = f"{RULE} Unclear: the interval excludes zero, but McNemar's p is 0.05 or more."
"""What `Difference.verdict` says, for the notes below a table."""
_CELLS = 4_000_000  # of one table of draws


@dataclass(frozen=True)
class Difference:
    """The difference between a model's metric and the first model's.

    Attributes:
        value: the model's metric minus the first model's.
        low, high: 95% interval; None where none can be given.
        method: "paired" (over samples), "seeds", "seeds and samples", or why there is no interval, such as "too few
            seeds (2 < 3)".
        p: of McNemar's exact test, where every sample is right or wrong and is a unit by itself.
    """

    value: float
    low: float | None = None
    high: float | None = None
    method: str = ""
    p: float | None = None

    @property
    def word(self) -> str:
        """Say "higher", "lower", "unclear" or "not significant", or nothing where there is no interval.

        A difference is "not significant" if its interval includes zero, which does not show that the models are equal.
        It is "unclear" if the interval excludes zero and McNemar's p is 0.05 or more, because the bootstrap interval of
        few samples is too narrow.
        """
        if self.low is None or self.high is None or not math.isfinite(self.low + self.high):
            return ""
        if self.low <= 0 <= self.high:
            return "not significant"
        if self.p is not None and self.p >= 1 - LEVEL:
            return "unclear"
        return "higher" if self.low > 0 else "lower"

    @property
    def verdict(self) -> str:
        """The word as tables show it: "n.s." if not significant, and with McNemar's p where it decides."""
        return {"not significant": "n.s.", "unclear": f"unclear (p {self.p or 0:.2g})"}.get(self.word, self.word)


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share.

    Args:
        right: number of successes.
        total: number of trials; at least 1.

    Source: Wilson 1927.
    """
    from scipy.stats import binomtest

    interval = binomtest(right, total).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def difference(
    first: Sequence[float],
    other: Sequence[float],
    of_first: Sequence[PerSample] = (),
    of_other: Sequence[PerSample] = (),
    *,
    largest: float = math.inf,
) -> Difference:
    """Return the difference of two models' metrics.

    Args:
        first: the metric of each of the first model's runs.
        other: of the other model's.
        of_first: the same sample by sample; empty where that is not known.
        of_other: of the other model's.
        largest: no difference is larger, and the interval ends there: 1 for shares.
    """
    value = statistics.mean(other) - statistics.mean(first)
    if len(first) > 1 and len(other) > 1:
        fewest = min(len(first), len(other))
        if fewest < FEWEST_SEEDS:
            return Difference(value, method=f"too few seeds ({fewest} < {FEWEST_SEEDS})")
        if len({*first}) == len({*other}) == 1:
            return Difference(value, method="no spread across seeds")
        low, high = welch_interval(first, other)
        method = "seeds"
        if _are_crossed(first, other, of_first, of_other):
            method = "seeds and samples"
            crossed = crossed_interval(of_first, of_other)
            low, high = min(low, crossed[0]), max(high, crossed[1])
        return Difference(value, max(low, -largest), min(high, largest), method)
    if len(first) > 1 or len(other) > 1:
        return Difference(value, method="one of the two has a single seed")
    if not of_first or not of_other:
        return Difference(value, method="no result by sample")
    return _paired_difference(value, of_first[0], of_other[0])


def _paired_difference(value: float, first: PerSample, other: PerSample) -> Difference:
    """Return the difference of two runs that saw the same samples."""
    if not first.is_like(other):
        return Difference(value, method="not the same samples")
    p, units = mcnemar(first, other), len(first.units.unique())
    if units < FEWEST_SAMPLES:
        return Difference(value, method=f"too few independent samples ({units} < {FEWEST_SAMPLES})", p=p)
    return Difference(value, *bootstrap_interval(first, other), "paired", p)


def _are_crossed(
    first: Sequence[float], other: Sequence[float], of_first: Sequence[PerSample], of_other: Sequence[PerSample]
) -> bool:
    """Return whether the two models have as many runs, all of which saw the same samples, and enough of them."""
    if not len(first) == len(other) == len(of_first) == len(of_other):
        return False
    one, *others = [*of_first, *of_other]
    return len(one.units.unique()) >= FEWEST_SAMPLES and all(one.is_like(run) for run in others)


def mcnemar(first: PerSample, other: PerSample) -> float | None:
    """Return the two-sided p of McNemar's exact test; None for losses, and where several samples are of one unit.

    Source: McNemar 1947; the exact test is the sign test of the samples on which one of the two is right.
    """
    if first.values.dtype.is_floating_point or len(first.units.unique()) < len(first.units):
        return None
    only_first = int((first.values & ~other.values).sum())
    only_other = int((other.values & ~first.values).sum())
    from scipy.stats import binomtest

    trials = only_first + only_other
    return 1.0 if not trials else float(binomtest(only_other, trials, 0.5).pvalue)


def bootstrap_interval(first: PerSample, other: PerSample) -> tuple[float, float]:
    """Return the percentile interval of the difference of two metrics, over units drawn with replacement.

    Where the metric is a mean over classes, units are drawn within each class.

    Source: Efron and Tibshirani 1993, chapter 13; Koehn 2004 for the pairing.
    """
    return crossed_interval([first], [other])


def crossed_interval(first: Sequence[PerSample], other: Sequence[PerSample]) -> tuple[float, float]:
    """Return the percentile interval of the difference of two models' means over seeds, on the same samples.

    Seeds and units are both drawn with replacement. A drawn unit is the same for all runs, and runs of the two models
    are drawn in pairs. It is conservative: the noise of a single run on a single unit counts up to three times.

    Args:
        first: the metric sample by sample of each of the first model's runs.
        other: of the other model's, as many.

    Source: Owen 2007, "The pigeonhole bootstrap".
    """
    generator = np.random.default_rng(SEED)
    runs = [*first, *other]
    one = runs[0]
    values = [run.values.double().numpy() for run in runs]
    counts = [
        np.ones(len(values[0])) if run.weights is None else run.weights.double().numpy()
        for run in (runs if one.ratio else runs[:1])
    ]
    classes = np.zeros(len(values[0]), dtype=int) if one.classes is None else one.classes.numpy()
    means = np.zeros((len(runs), RESAMPLES))
    present = np.unique(classes)
    for label in present:
        members = classes == label
        units = np.unique(one.units.numpy()[members], return_inverse=True)[1]
        sums = np.stack([np.bincount(units, row[members]) for row in (*values, *counts)])
        means += _draw_means(sums, len(runs), generator) / len(present)
    if one.exponential:
        means = np.exp(np.minimum(means, 700))
    differences = means[len(first) :] - means[: len(first)]
    seeds = len(first)
    drawn = generator.multinomial(seeds, [1 / seeds] * seeds, size=RESAMPLES).T / seeds
    low, high = np.nanquantile((drawn * differences).sum(0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean_interval(samples: PerSample) -> tuple[float, float]:
    """Return the percentile interval of a metric, over units drawn with replacement."""
    return bootstrap_interval(samples._replace(values=torch.zeros_like(samples.values)), samples)


def _draw_means(sums: np.ndarray, runs: int, generator: np.random.Generator) -> np.ndarray:
    """Return the means of all runs over drawn units, [runs, RESAMPLES].

    Args:
        sums: of each unit: the values of every run, and their weights, one row if all have the same: [rows, units].
            Equal units are drawn together.
    """
    kinds, repeats = np.unique(sums, axis=1, return_counts=True)
    share, total = repeats / repeats.sum(), int(repeats.sum())
    rows = max(1, _CELLS // len(repeats))
    means = []
    for start in range(0, RESAMPLES, rows):
        draws = generator.multinomial(total, share, size=min(rows, RESAMPLES - start))
        drawn = kinds @ draws.T
        with np.errstate(invalid="ignore"):  # a draw in which nothing counts is NaN
            means.append(drawn[:runs] / drawn[runs:])
    return np.concatenate(means, axis=1)


def welch_interval(first: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return Welch's t interval of the difference of two means over seeds."""
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # SciPy warns where one of the two has no spread
        interval = ttest_ind(other, first, equal_var=False).confidence_interval(LEVEL)
    return float(interval.low), float(interval.high)


# ---- of all metrics of a model -------------------------------------------------------------------------------------

PARTS = ("_low", "_high", "_difference", "_difference_low", "_difference_high", "_mcnemar_p")
"""What is added to a metric's name by `with_intervals` and `differences`."""


def with_intervals(results: Mapping[str, PerSample | float]) -> dict[str, float]:
    """Return the metrics, with the interval of each mean over samples as NAME_low and NAME_high.

    It is Wilson's for a share of samples that are right or wrong, each a unit by itself, and a bootstrap's over units
    for any other mean, of `FEWEST_SAMPLES` units or more.
    """
    metrics: dict[str, float] = {}
    for name, result in results.items():
        if not isinstance(result, PerSample):
            metrics[name] = result
            continue
        metrics[name] = result.mean()
        units = len(result.units.unique())
        if result.values.dtype == torch.bool and result.classes is None and units == len(result.units):
            low, high = wilson_interval(int(result.values.sum()), len(result.values))
        elif result.classes is None and units >= FEWEST_SAMPLES:
            low, high = mean_interval(result)
        else:
            continue
        metrics |= {f"{name}_low": low, f"{name}_high": high}
    return metrics


def differences(first: Mapping[str, PerSample | float], other: Mapping[str, PerSample | float]) -> dict[str, float]:
    """Return the paired differences of a model's metrics from those of the first model on the same samples.

    Returns:
        For each metric that is a mean over samples, NAME_difference with its bootstrap interval NAME_difference_low and
        NAME_difference_high, and NAME_mcnemar_p; no interval of fewer than `FEWEST_SAMPLES` units, and nothing for
        metrics of other samples.
    """
    metrics: dict[str, float] = {}
    for name, result in other.items():
        before = first.get(name)
        if not isinstance(result, PerSample) or not isinstance(before, PerSample) or not before.is_like(result):
            continue
        found = difference([before.mean()], [result.mean()], [before], [result])
        parts = {"difference": found.value, "difference_low": found.low, "difference_high": found.high}
        parts |= {"mcnemar_p": found.p}
        metrics |= {f"{name}_{part}": value for part, value in parts.items() if value is not None}
    return metrics
