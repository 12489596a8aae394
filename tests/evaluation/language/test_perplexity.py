"""Perplexity and loss by position of a table of probabilities, by hand."""

import math

import pytest
import torch
from language_fixtures import Table

from diffvision.evaluation.language.perplexity import perplexity, perplexity_samples, split_windows
from diffvision.evaluation.language.position_nll import position_nll

NEXT = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.125, 0.125, 0.75]]
LN2 = math.log(2)


def test_perplexity_weighs_tokens_not_documents():
    documents = [torch.tensor([0, 0, 1, 1]), torch.tensor([2, 0])]  # losses: 1, 2, 1 and 3 bits
    metrics = perplexity(Table(NEXT), documents, window=8, num_bytes=14)
    assert metrics["tokens"] == 4
    assert metrics["nll"] == pytest.approx(7 / 4 * LN2, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(2 ** (7 / 4), rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(0.5, rel=1e-6)


def test_perplexity_window_by_window():
    documents = [torch.randint(3, (9,)), torch.tensor([1]), torch.randint(3, (31,)), torch.tensor([2, 0])]
    samples = perplexity_samples(Table(NEXT), documents, window=4, batch_size=3)
    whole = perplexity(Table(NEXT), documents, window=4)
    assert samples["nll"].mean() == pytest.approx(whole["nll"], rel=1e-6)
    assert samples["perplexity"].mean() == pytest.approx(whole["perplexity"], rel=1e-6)
    assert samples["nll"].units.tolist() == [0] * 2 + [2] * 8 + [3]  # documents; one token alone is no sample
    assert samples["nll"].weights.tolist() == [4, 4] + [4] * 7 + [2] + [1]
    assert samples["nll"].values[-1].item() == pytest.approx(3 * LN2)


@pytest.mark.parametrize("window", [1, 4, 22, 100])
def test_windows_score_every_token_once(window):
    document = torch.arange(23)
    pieces = split_windows(document, window)
    assert [token for piece in pieces for token in piece[1:].tolist()] == list(range(1, 23))
    assert all(len(piece) == window + 1 for piece in pieces[:-1])
    documents = [torch.randint(3, (31,)), torch.randint(3, (5,))]
    metrics = perplexity(Table(NEXT), documents, window=window, batch_size=3)
    assert metrics == pytest.approx(perplexity(Table(NEXT), documents, window=50), rel=1e-6)  # a model without memory
    with pytest.raises(ValueError, match="window"):
        split_windows(document, 0)


def test_loss_by_position_is_the_running_mean():
    documents = [torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 1, 1, 1]), torch.tensor([2, 2])]
    metrics = position_nll(Table(NEXT), documents, length=4, batch_size=1)
    bits = [[1, 2, 1, 2], [2, 1, 1, 1]]  # the third document is too short
    means = [sum(sum(own[:p]) for own in bits) / 2 / p * LN2 for p in range(1, 5)]
    assert [metrics[f"nll/{p}"] for p in range(1, 5)] == pytest.approx(means, rel=1e-6)
    assert metrics["documents"] == 2
    few = position_nll(Table(NEXT), documents, length=4, points=2)
    assert set(few) == {"nll/1", "nll/4", "documents"}
    with pytest.raises(ValueError, match="10 tokens"):
        position_nll(Table(NEXT), documents, length=10)
