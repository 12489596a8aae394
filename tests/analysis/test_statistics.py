"""Statistics of maps, against cases that can be worked out by hand."""

import math

import pytest
import torch

from diffvision.analysis import statistics

EVEN = torch.full((4, 4), 0.25)
ONE = torch.eye(4)


def test_shares_are_magnitudes():
    maps = torch.tensor([[0.6, -0.2, 0.0], [0.0, 0.0, 0.0], [0.5, 0.3, 0.2]])
    torch.testing.assert_close(
        statistics.normalize_rows(maps), torch.tensor([[0.75, 0.25, 0.0], [0.0, 0.0, 0.0], [0.5, 0.3, 0.2]])
    )


def test_entropy_from_one_token_to_all_alike():
    assert statistics.entropy(EVEN).tolist() == pytest.approx([math.log(4)] * 4)
    assert statistics.entropy(ONE).tolist() == [0, 0, 0, 0]
    half = torch.tensor([[0.5, -0.5, 0.0, 0.0]])  # two magnitudes alike
    assert statistics.entropy(half).item() == pytest.approx(math.log(2))
    assert statistics.relative_entropy(half).item() == pytest.approx(0.5)
    assert statistics.relative_entropy(EVEN).tolist() == pytest.approx([1] * 4)


def test_a_causal_row_is_compared_with_what_it_may_attend_to():
    even = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
    first, *others = statistics.relative_entropy(even, causal=True).tolist()
    assert math.isnan(first)
    assert others == pytest.approx([1, 1, 1])
    last = statistics.relative_entropy(even[2:], causal=True)  # the last two of four queries
    assert last.tolist() == pytest.approx([1, 1])


def test_ranks_of_maps_worked_out_by_hand():
    assert statistics.effective_rank(EVEN).item() == pytest.approx(1, abs=1e-4)
    assert statistics.effective_rank(ONE).item() == pytest.approx(4)
    two = torch.diag(torch.tensor([1.0, 1.0, 0.005, 0.0]))
    parts = [1 / 2.005, 1 / 2.005, 0.005 / 2.005]
    assert statistics.effective_rank(two).item() == pytest.approx(math.exp(-sum(p * math.log(p) for p in parts)))
    assert statistics.effective_rank(torch.zeros(3, 3)).item() == 0
    assert statistics.numerical_rank(torch.stack([EVEN, ONE, two, 0 * two])).tolist() == [1, 4, 2, 0]
    assert statistics.numerical_rank(two, tolerance=0.001).item() == 3


def test_row_sums_and_negative_entries():
    difference = ONE - 0.8 * EVEN
    assert statistics.row_sums(difference).tolist() == pytest.approx([0.2] * 4)
    assert statistics.negative_share(difference).item() == 12 / 16
    assert statistics.negative_share(difference.tril(), causal=True).item() == pytest.approx(6 / 10)


def test_redundancy_is_one_for_heads_that_are_alike():
    assert statistics.head_redundancy(torch.stack([EVEN, 2 * EVEN])).item() == pytest.approx(1)
    shifted = torch.roll(ONE, 1, 0)
    assert statistics.head_redundancy(torch.stack([ONE, shifted])).item() == 0
    # cosines: 1 for the pair of ones, 0 and 0 for the others; over three pairs
    assert statistics.head_redundancy(torch.stack([ONE, shifted, ONE])).item() == pytest.approx(1 / 3)
    assert statistics.head_redundancy(torch.stack([ONE, -ONE])).item() == pytest.approx(-1)
    assert math.isnan(statistics.head_redundancy(ONE[None]).item())


def test_mass_counts_both_signs_and_rms_all_rows_of_a_head():
    assert statistics.rms(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist() == pytest.approx([math.sqrt(12.5), 0])
    maps = torch.tensor([[0.5, -0.3, 0.2], [0.0, 0.0, 1.0]])
    assert statistics.share_on_keys(maps, torch.tensor([1.0, 0.0, 0.0])).tolist() == pytest.approx([0.5, 0])
    assert statistics.share_on_keys(maps, torch.tensor([0.0, 1.0, 0.5])).tolist() == pytest.approx([0.4, 0.5])
    assert statistics.largest_column(maps).item() == pytest.approx(0.6)  # the last column: (0.2 + 1) / 2
    assert statistics.largest_column(EVEN).item() == 0.25
