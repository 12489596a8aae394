"""Associative recall of a table of probabilities, by hand."""

import math

import pytest
import torch

from diffvision.evaluation.language.associative_recall import associative_recall, frequent_bigrams, repeated_bigrams

NEXT = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.125, 0.125, 0.75]]
LN2 = math.log(2)


def test_repeated_bigrams_of_the_row():
    tokens = torch.tensor([[1, 2, 3, 1, 2, 2, 2], [1, 1, 1, 0, 1, 2, 3]])
    assert repeated_bigrams(tokens).int().tolist() == [[0, 0, 0, 1, 0, 1], [0, 1, 0, 0, 0, 0]]


def test_recall_parts_the_loss(table):
    document = torch.tensor([0, 1, 1, 0, 1, 2])  # bigrams 01 11 10 01 12: the second 01, of 2 bits, is a hit
    metrics = associative_recall(table(NEXT), [document, torch.tensor([0, 1])], window=8)
    assert metrics["nll/ar_hit"] == pytest.approx(2 * LN2, rel=1e-6)
    assert metrics["nll/others"] == pytest.approx((2 + 1 + 2 + 2 + 2) / 5 * LN2, rel=1e-6)
    assert metrics["nll/all"] == pytest.approx(11 / 6 * LN2, rel=1e-6)
    assert metrics["ar_hit_share"] == pytest.approx(1 / 6)
    # a bigram that the training data is full of is no recall; nor is one of another window
    frequent = frequent_bigrams([torch.tensor([0, 1, 0, 1, 2])], more_than=1)
    assert len(frequent) == 1
    assert math.isnan(associative_recall(table(NEXT), [document], window=8, frequent=frequent)["nll/ar_hit"])
    assert associative_recall(table(NEXT), [document], window=2)["ar_hit_share"] == 0
