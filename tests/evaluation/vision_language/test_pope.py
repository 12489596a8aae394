"""POPE's three ways to read an answer, and its metrics on answers whose counts are known."""

import math

import pytest

from diffvision.evaluation.intervals import differences, with_intervals
from diffvision.evaluation.per_sample import means
from diffvision.evaluation.vision_language.pope import parse, parse_llava, parse_lmms_eval, pope

# An answer, and what ours, LLaVA's and lmms-eval's programs read in it.
READINGS = [
    ("Yes", True, True, True),
    ("no", False, False, False),
    (" NO \n", False, True, False),
    ("No, there is no dog.", False, False, None),
    ("Yes, and there is no doubt", True, False, None),
    ("There is a dog. No cat.", False, True, None),
    ("I do not know", None, False, None),
    ("It could be yes or no.", None, False, None),
    ("", None, True, None),
    ("Nothing, yesterday", None, True, None),
]


@pytest.mark.parametrize(("answer", "ours", "llava", "lmms_eval"), READINGS)
def test_each_parser_reads_as_its_program_does(answer, ours, llava, lmms_eval):
    assert (parse(answer), parse_llava(answer), parse_lmms_eval(answer)) == (ours, llava, lmms_eval)


def test_metrics_of_known_counts():
    answers = ["yes", "yes", "no", "maybe", "yes", "no", "no", "Yes."]
    truth = [True] * 4 + [False] * 4
    metrics = means(pope(answers, truth, range(8)))
    assert metrics["precision"] == metrics["recall"] == metrics["f1"] == 2 / 4
    assert (metrics["accuracy"], metrics["yes_ratio"], metrics["unparsed"]) == (4 / 8, 4 / 8, 1 / 8)
    # LLaVA's takes "maybe" for a yes.
    assert metrics["llava/yes_ratio"] == metrics["llava/accuracy"] == 5 / 8
    assert metrics["llava/f1"] == pytest.approx(6 / 9)
    # lmms-eval's leaves "maybe" out of the recall, and "Yes." out of the precision.
    theirs = {name: metrics[f"lmms_eval/{name}"] for name in ("precision", "recall", "f1")}
    assert theirs == pytest.approx(dict.fromkeys(theirs, 2 / 3))
    assert (metrics["lmms_eval/accuracy"], metrics["lmms_eval/yes_ratio"]) == (4 / 8, 3 / 8)


def test_who_never_says_yes_has_no_precision():
    never = means(pope(["no"] * 20, [True, False] * 10, range(20)))
    assert (never["accuracy"], never["f1"], never["yes_ratio"]) == (0.5, 0, 0)
    assert math.isnan(never["precision"])


def test_two_models_are_compared_on_the_same_questions():
    truth, images = [True, False] * 30, [number // 6 for number in range(60)]
    first = pope(["yes"] * 60, truth, images)
    other = pope(["yes" if right or number % 10 == 1 else "no" for number, right in enumerate(truth)], truth, images)
    found = differences(first, other)
    assert found["accuracy_mcnemar_p"] == pytest.approx(2 * 0.5**24)
    assert found["f1_difference"] == pytest.approx(60 / 66 - 2 / 3)
    assert found["f1_difference_low"] > 0
    interval = with_intervals(first)
    assert interval["accuracy_low"] == pytest.approx(0.3773, abs=1e-4)  # Wilson's, of 30 of 60
    # Each image has as many questions of either answer, so that F1 is the same in every draw of images.
    assert interval["f1_low"] == pytest.approx(interval["f1_high"]) == pytest.approx(2 / 3)
