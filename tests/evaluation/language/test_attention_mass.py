"""Attention on a needle and on the noise around it, as sums of maps."""

import pytest
import torch

from diffvision.analysis.maps import open_layers
from diffvision.evaluation.language.attention_mass import SPANS, attention_mass, span_masses
from diffvision.evaluation.language.needle import NeedleSample


def test_masses_are_sums_of_the_applied_maps(tiny):
    torch.manual_seed(1)
    tokens = torch.randint(512, (12,)).tolist()
    masses = span_masses(tiny, NeedleSample(tokens, (2, 5), 8, ((10, 12),)))
    layers = open_layers(tiny, {"tokens": torch.tensor([tokens[:10]])})
    rows = [layer.weights[:, -1].mean(dim=0) for layer in layers]
    row = torch.stack(rows).mean(dim=0)
    expected = torch.stack([row[0], row[2:5].sum(), row[1] + row[5:8].sum(), row[8:].sum()])
    torch.testing.assert_close(masses, expected.double(), atol=1e-6, rtol=0)


def test_shares_of_the_spans(tiny, words):
    metrics = attention_mass(tiny, words, length=80, depths=(0, 0.5), needles=2, samples=2, form="synthetic")
    assert set(metrics) == {f"{span}/{depth}" for span in SPANS for depth in ("0", "0.5")}
    for depth in ("0", "0.5"):
        assert sum(abs(metrics[f"{span}/{depth}"]) for span in SPANS) == pytest.approx(1)
