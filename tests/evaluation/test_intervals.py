"""Intervals and tests against hand-computed cases, scipy's bootstrap and Welch's test, and their coverage."""

import json

import numpy as np
import pytest
import scipy.stats
import torch

from diffvision.comparison.comparison_page import write
from diffvision.comparison.result import Comparison, Row
from diffvision.evaluation.intervals import (
    Difference,
    bootstrap_interval,
    crossed_interval,
    difference,
    mcnemar,
    welch_interval,
    with_intervals,
)
from diffvision.evaluation.per_sample import PerSample, count_each


def right(text: str) -> PerSample:
    return count_each(torch.tensor([letter == "x" for letter in text]))


def test_mcnemar_by_hand():
    """Of 6 samples on which one alone is right, one is the first's: p = 2 (C(6,0) + C(6,1)) / 2^6."""
    first, other = right("xxx.x......."), right("xxxx.xxxx...")
    assert mcnemar(first, other) == pytest.approx(2 * (1 + 6) / 2**6)
    assert mcnemar(first, first) == 1.0
    losses = PerSample(torch.rand(12), torch.arange(12), weights=torch.ones(12))
    assert mcnemar(losses, losses) is None
    captions = PerSample(first.values, torch.arange(12) // 2)  # two captions of an image are not independent
    assert mcnemar(captions, captions) is None


def test_paired_bootstrap_as_scipy_computes_it():
    generator = np.random.default_rng(1)
    a, b = generator.random(300) < 0.6, generator.random(300) < 0.7
    ours, again = (bootstrap_interval(count_each(torch.tensor(a)), count_each(torch.tensor(b))) for _ in range(2))
    theirs = scipy.stats.bootstrap((b.astype(float) - a,), np.mean, method="percentile", rng=generator)
    assert ours == again == pytest.approx(tuple(theirs.confidence_interval), abs=0.006)


def test_losses_are_drawn_by_document_with_their_tokens():
    """The interval of a ratio of sums, against a plain loop over drawn documents."""
    generator = np.random.default_rng(2)
    units, weights = np.arange(60) // 3, generator.integers(1, 50, 60)
    a, b = (generator.gamma(3.0, 1.0, 60) * weights for _ in range(2))
    samples = [PerSample(torch.tensor(v), torch.tensor(units), weights=torch.tensor(weights)) for v in (a, b)]
    drawn = generator.integers(0, 20, (4000, 20))
    sums = [np.bincount(units, v)[drawn].sum(axis=1) for v in (a, b, weights)]
    for exponential in (False, True):
        means = [sums[0] / sums[2], sums[1] / sums[2]]
        means = [np.exp(mean) for mean in means] if exponential else means
        expected = np.quantile(means[1] - means[0], [0.025, 0.975])
        low, high = bootstrap_interval(*(one._replace(exponential=exponential) for one in samples))
        assert (low, high) == pytest.approx(tuple(expected), abs=0.1 * (expected[1] - expected[0]))


def test_seeds_and_pictures_are_both_drawn():
    """The interval over two factors, against a plain loop over drawn runs and drawn pictures."""
    generator = np.random.default_rng(3)
    a, b = (share + 0.1 * generator.standard_normal((5, 1)) > generator.random((5, 80)) for share in (0.4, 0.6))
    first, other = ([count_each(torch.tensor(row)) for row in rows] for rows in (a, b))
    drawn = [
        (b[seeds][:, pictures].mean() - a[seeds][:, pictures].mean())
        for seeds, pictures in ((generator.integers(0, 5, 5), generator.integers(0, 80, 80)) for _ in range(4000))
    ]
    expected = np.quantile(drawn, [0.025, 0.975])
    low, high = crossed_interval(first, other)
    assert (low, high) == pytest.approx(tuple(expected), abs=0.1 * (expected[1] - expected[0]))
    alone = bootstrap_interval(first[0], other[0])
    assert crossed_interval(first[:1] * 5, other[:1] * 5) == pytest.approx(alone)  # equal runs: pictures alone
    weighted = [
        [run._replace(values=run.values * 2.0, weights=torch.full((80,), 2.0), ratio=True) for run in runs]
        for runs in (first, other)
    ]
    assert crossed_interval(*weighted) == pytest.approx((low, high))


def test_an_interval_over_seeds_knows_of_few_samples():
    """Equal differences of all seeds say nothing about other samples: Welch's interval alone would be narrow."""
    generator = np.random.default_rng(4)
    a, b = generator.random(60) < 0.5, generator.random(60) < 0.6
    first, other = ([count_each(torch.tensor(row)) for _ in range(3)] for row in (a, b))
    first[0].values[0] ^= True
    values = [[run.mean() for run in runs] for runs in (first, other)]
    alone = difference(*values)
    both = difference(*values, first, other)
    assert (alone.method, both.method) == ("seeds", "seeds and samples")
    assert both.high - both.low > 4 * (alone.high - alone.low)
    assert difference(*values, first, other[:2]) == alone
    fewer = [run._replace(units=torch.arange(60) % 9) for run in first]
    assert difference(*values, fewer, fewer) == alone


def test_a_mean_over_classes_draws_within_each_class():
    """A class of two samples that differ in every draw alike has no spread; the other class has all of it."""
    classes = torch.tensor([0, 0, 1, 1, 1, 1])
    first = count_each(torch.tensor([False, False, True, False, True, False]), classes)
    other = count_each(torch.tensor([True, True, False, True, True, False]), classes)
    assert other.mean() - first.mean() == pytest.approx(0.5)
    low, high = bootstrap_interval(first, other)
    assert low == pytest.approx((1 - 0.75) / 2, abs=0.13)
    assert high == pytest.approx((1 + 0.75) / 2, abs=0.13)


def test_welch_as_scipy_computes_it():
    first, other = [0.91, 0.94, 0.9], [0.95, 0.99, 0.97, 0.96]
    expected = scipy.stats.ttest_ind(other, first, equal_var=False).confidence_interval(0.95)
    assert welch_interval(first, other) == pytest.approx((expected.low, expected.high))


def test_what_a_difference_is_called():
    assert Difference(0.1, 0.01, 0.2).word == "higher"
    assert Difference(0.1, 0.0, 0.2).word == "not significant"
    assert Difference(-0.15, -0.317, 0.017, p=0.04).verdict == "n.s."
    unsure = difference([0.5], [0.625], [right("x" * 20 + "." * 20)], [right("x" * 25 + "." * 15)])
    assert unsure.low > 0  # of the bootstrap
    assert unsure.p == 2 / 2**5
    assert unsure.word == "unclear"
    assert unsure.verdict == "unclear (p 0.062)"
    assert Difference(-0.133, -0.25, -0.017, p=0.01).verdict == "lower"


@pytest.mark.parametrize("units", [1, 3, 9, 10])
def test_few_samples_have_no_verdict_however_equal_their_differences(units):
    """Losses of two models that differ by the same everywhere: a bootstrap's width is zero, of any number of units."""
    losses = PerSample(torch.ones(60), torch.arange(60) % units)
    one = difference([1.0], [2.0], [losses], [losses._replace(values=2 * losses.values)])
    assert (one.word, one.low) == (("higher", 1.0) if units == 10 else ("", None))
    assert (f"({units} < 10)" in one.method) == (units < 10)
    assert ("loss_low" in with_intervals({"loss": losses})) == (units == 10)


@pytest.mark.parametrize(
    ("first", "other", "method"),
    [
        ([0.5, 0.6], [0.8, 0.9], "too few seeds (2 < 3)"),
        ([0.5, 0.6, 0.7], [0.8, 0.9], "too few seeds (2 < 3)"),
        ([0.5] * 3, [0.8] * 3, "no spread across seeds"),
        ([0.1, 0.2], [0.3], "one of the two has a single seed"),
        ([0.1], [0.3], "no result by sample"),
    ],
)
def test_values_without_an_interval_have_no_verdict(first, other, method):
    one = difference(first, other)
    assert (one.word, one.low, one.method) == ("", None, method)


def test_intervals_need_the_same_samples_and_end_at_one_for_shares():
    unequal = difference([0.5], [0.5], [right("x.")], [right("x..x")])
    assert (unequal.method, unequal.low) == ("not the same samples", None)
    one = difference([0.9, 0.95, 1.0], [0.1, 0.9, 0.05], largest=1.0)
    assert one.method == "seeds"
    assert -1.0 == one.low < one.value < one.high


def test_a_seed_that_is_nan_is_called_neither_higher_nor_lower(tmp_path):
    first, other = [0.5, 0.6, 0.7], [0.7, 0.8, float("nan")]
    one = difference(first, other)
    assert one.word == ""
    row = Row("perplexity/text/nll", None, {"a": first, "b": other}, {"b": one})
    write(Comparison("a language model", [], [row], "tokens"), tmp_path / "nan.json")
    assert json.loads((tmp_path / "nan.json").read_text())["metrics"][0]["values"]["b"] == [0.7, 0.8, None]


def test_a_mean_has_the_interval_of_its_units():
    generator = np.random.default_rng(0)
    losses = torch.tensor(generator.normal(size=200))
    contexts = torch.arange(50).repeat_interleave(4)
    answers = (torch.tensor(generator.random(50)) < 0.4).repeat_interleave(4)  # the four of a context are equal
    samples = {"loss": count_each(losses), "four": PerSample(answers, contexts), "one": count_each(answers[::4])}
    metrics = with_intervals(samples)
    theirs = scipy.stats.bootstrap((losses.numpy(),), np.mean, method="percentile").confidence_interval
    assert [metrics["loss_low"], metrics["loss_high"]] == pytest.approx([theirs.low, theirs.high], abs=0.02)
    wide, narrow = (metrics[f"{name}_high"] - metrics[f"{name}_low"] for name in ("four", "one"))
    assert wide == pytest.approx(narrow, rel=0.15)  # not half of it, as 200 independent answers would have
