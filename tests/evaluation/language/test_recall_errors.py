"""Classes of answers by hand, rates against needle retrieval's, and what two models' answers are compared by."""

import pytest
import torch
from language_fixtures import Copier

from diffvision.data.datasets.needle_text import FORMS
from diffvision.evaluation.intervals import differences, with_intervals
from diffvision.evaluation.language import recall_errors as module
from diffvision.evaluation.language.needle import needle
from diffvision.evaluation.language.recall_errors import ANSWERS, classify, recall_errors
from diffvision.opening import Model

SETTINGS = {"lengths": (60,), "depths": (0.0, 1.0), "samples": 4, "form": FORMS["synthetic"]}


@pytest.fixture
def answering(words, monkeypatch):
    """Return a model that answers as a `Copier` does."""

    def continue_greedily(model, prompts, *, max_new_tokens, stops):
        rows = [[*prompt] for prompt in prompts]
        for row in rows:
            for _ in range(max_new_tokens):
                row.append(int(model.module(torch.tensor([row]))[0, -1].argmax()))
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]

    monkeypatch.setattr(module, "continue_greedily", continue_greedily)
    return lambda blind=None: Model("oracle", "language", Copier(4096, blind=blind), tokenizer=words, max_length=128)


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (" 42;", "correct"),
        ("42", "correct"),
        (" 17; # Oslo 42", "distracted"),
        (" 55;", "fabricated"),
        (" 4", "malformed"),
        (" 423;", "malformed"),
        (" 42nd", "malformed"),
        (" 42,500", "malformed"),
        (" 042", "malformed"),
        (" Rome 42;", "malformed"),
        ("", "malformed"),
    ],
)
def test_an_answer_is_one_of_four_things(output, answer):
    context = "# Rome 42; apple moon; # Oslo 17;"
    assert classify(output, 42, context, FORMS["synthetic"]) == answer


def test_an_oracle_is_right_and_a_blind_model_distracted_or_inventing(answering, words):
    """The rate of right answers is that of needle retrieval, which decides it without decoding."""
    model = answering()
    results = recall_errors(model, facts=(1, 3), **SETTINGS)
    assert results["correct"].mean() == 1
    assert results["3x1/correct_of_copied"].mean() == 1
    assert "1x1/correct_of_copied" not in results  # there is no other number to copy
    blind = answering(words.encode(" 42")[0])
    rates = with_intervals(recall_errors(blind, facts=(3,), **SETTINGS | {"samples": 15}))
    found = needle(blind.module, words, needles=3, **SETTINGS | {"samples": 15})
    assert rates["correct"] == pytest.approx(found["accuracy"])
    assert rates["3x1/correct/60"] == rates["3x1/correct"] == rates["correct"]
    assert sum(rates[answer] for answer in ANSWERS) == pytest.approx(1)
    assert rates["malformed"] == 0
    # The number is one of three of 90 by chance: the right one in 1/90, another one in 2/90.
    assert rates["distracted_low"] < 2 / 90 < rates["distracted_high"]
    assert rates["fabricated"] > 0.9


def test_two_models_are_paired_on_the_same_contexts_alone(answering, words):
    good = recall_errors(answering(), facts=(2,), **SETTINGS)
    bad = recall_errors(answering(words.encode(" 42")[0]), facts=(2,), **SETTINGS)
    paired = differences(good, bad)
    assert paired["correct_difference"] == bad["correct"].mean() - 1
    assert paired["correct_mcnemar_p"] == pytest.approx(2 * 0.5 ** int(8 * (1 - bad["correct"].mean())))
    other = recall_errors(answering(), facts=(2,), **SETTINGS, seed=1)
    assert differences(good, other) == {}
