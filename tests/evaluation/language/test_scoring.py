"""Losses, greedy matches and constrained choices against values worked out by hand."""

import math

import pytest
import torch
from language_fixtures import Table
from torch import nn
from torch.nn import functional as F

from diffvision.evaluation.language.scoring import (
    evaluating,
    greedy_matches,
    logits_at,
    padded_batches,
    token_losses,
)

NEXT = [[0.1, 0.6, 0.3], [0.2, 0.3, 0.5], [0.7, 0.2, 0.1]]  # 0 -> 1 -> 2 -> 0


class Apart(nn.Module):
    """A model that keeps its head apart, as ours do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head_weight = self.head.weight

    def hidden(self, tokens):
        return self.embed(tokens).cumsum(1)

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def test_losses_are_the_tables():
    with evaluating(model := Table(NEXT)):
        losses = token_losses(model, torch.tensor([[0, 1, 2, 2]]))
    assert losses[0].tolist() == pytest.approx([-math.log(0.6), -math.log(0.5), -math.log(0.1)], rel=1e-6)
    assert model.training  # as before


def test_a_head_apart_gives_the_same_by_chunks_and_by_places():
    model, tokens = Apart(), torch.randint(7, (2, 9))
    whole = model(tokens)
    expected = F.cross_entropy(whole[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(token_losses(model, tokens, chunk=3), expected)
    positions = torch.tensor([[0, 4], [8, 2]])
    torch.testing.assert_close(logits_at(model, tokens, positions)[1, 0], whole[1, 8])


def test_batches_are_of_similar_length():
    rows = [[1], [2, 2, 2], [3, 3]]
    (numbers, tokens, lengths), (last, _, _) = padded_batches(rows, 2)
    assert (numbers, last) == ([1, 2], [0])
    assert tokens.tolist() == [[2, 2, 2], [3, 3, 0]]
    assert lengths.tolist() == [3, 2]


def test_a_match_is_what_greedy_decoding_would_write():
    rows = [[0, 1, 2, 0], [0, 1, 1], [2, 0, 1, 2, 2]]
    spans = [[(1, 4)], [(1, 2), (2, 3)], [(4, 5), (1, 3)]]
    assert greedy_matches(Table(NEXT), rows, spans, batch_size=2) == [[True], [True, False], [False, True]]
