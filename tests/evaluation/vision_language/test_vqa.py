"""Short answers: what counts as the same, and the share of right ones by kind."""

import pytest

from diffvision.evaluation.per_sample import means
from diffvision.evaluation.vision_language.vqa import normalise, vqa


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("The Red Star.", "red star"),
        (" two\n", "2"),
        ("None", "0"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        (".5", ".5"),
        ("It's on a table!", "its on table"),
        ("left/right", "left right"),
        ("A.", "a"),
        ("C#", "c #"),
        ("**C++**", "c + +"),
        ("cafe\u0301", "caf\u00e9"),
        ("लड़की।", "लड़की"),
        ("", ""),
    ],
)
def test_answers_are_compared_without_what_does_not_matter(answer, normal):
    assert normalise(answer) == normal


def test_exact_match_overall_and_by_kind():
    answers = ["Two.", "three", "the blue", "red"]
    labels = [["2"], ["2"], ["blue", "azure"], ["green"]]
    metrics = means(vqa(answers, labels, ["count", "count", "colour", ""]))
    assert metrics["exact_match"] == 0.5
    assert metrics["exact_match/count"] == 0.5
    assert metrics["exact_match/colour"] == 1
    assert metrics["mean_per_kind_exact_match"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert [*means(vqa(["a cat"], [["cat"]], [""]))] == ["exact_match"]
