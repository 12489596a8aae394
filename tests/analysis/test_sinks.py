"""Sinks by their kind: heads planted by hand."""

import torch

from diffvision.analysis.maps import LayerMaps
from diffvision.analysis.sinks import OUTLIER, measure_sinks, relative_norms
from diffvision.analysis.statistics import kurtosis, share_by_key, shared_fraction

N, V = 12, 8


def _layer(maps, values):
    return LayerMaps("a", maps[:, None], maps, None, values=values)


def _look_at(token, share):
    """A map [N, N] that gives a token a share of every row, and the others the rest in equal parts."""
    rows = torch.full((N, N), (1 - share) / (N - 1))
    rows[:, token] = share
    return rows


def test_each_kind_of_sink_is_recognised():
    torch.manual_seed(0)
    small, large = torch.randn(2, N, V)
    small[3] *= 0.01
    large[3] = 5.0
    maps = torch.stack([_look_at(3, 0.8), _look_at(3, 0.8), _look_at(3, 0.2), torch.eye(N)])
    sinks = measure_sinks(_layer(maps, torch.stack([small, large, small, small])))
    torch.testing.assert_close(sinks.share, torch.tensor([0.8, 0.8, 0.2, 1 / N]))
    kinds = {kind: heads.tolist() for kind, heads in sinks.kinds().items()}
    assert kinds["sink"] == [True, True, False, False]
    assert kinds["nop"] == [True, False, False, False]
    assert kinds["broadcast"][1:] == [True, False, False]
    assert sinks.value[0] < 0.1 < 1 < sinks.value[1]


def test_without_values_a_sink_is_of_no_kind():
    kinds = measure_sinks(_layer(_look_at(0, 0.9)[None], None)).kinds()
    assert {kind: heads.item() for kind, heads in kinds.items()} == {"sink": True, "nop": False, "broadcast": False}


def test_statistics_of_known_tensors():
    torch.testing.assert_close(
        share_by_key(_look_at(2, 0.5)), torch.full((N,), 0.5 / (N - 1)).index_fill(0, torch.tensor(2), 0.5)
    )
    assert shared_fraction(torch.ones(2, 5, 3)).tolist() == [1, 1]
    assert shared_fraction(torch.tensor([[1.0, 0], [-1, 0]])).item() == 0
    assert kurtosis(torch.tensor([-1.0, 1, -1, 1])).item() == 1
    hidden = torch.eye(8)
    hidden[5] *= 4
    assert (relative_norms(hidden) > OUTLIER).nonzero().tolist() == [[5]]
