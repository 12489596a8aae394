"""Statistics of heads, against what is known of a layer's maps."""

import pytest
import torch
from torch import nn

from diffvision.evaluation.language.heads import head_statistics
from diffvision.models import language

TINY = {"vocab_size": 64, "dim": 32, "depth": 2, "head_dim": 8, "mlp_dim": 16}


@pytest.fixture
def rows():
    return torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(0))


def test_the_sums_are_one_less_lambda(rows):
    torch.manual_seed(0)
    model = language.create("diff-debug", **TINY)
    metrics = head_statistics(model, rows, batch_size=2)
    for index, layer in enumerate(model.attention_layers()):
        assert metrics[f"row_sum/{index}"] == pytest.approx(1 - layer.compute_lambda().item(), abs=1e-6)
        assert metrics[f"row_sum_std/{index}"] < 1e-6
        assert 0 < metrics[f"negative/{index}"] < 0.5
        assert metrics[f"absolute/{index}"] > metrics[f"row_sum/{index}"]
        assert 0 < metrics[f"rms_min/{index}"] < metrics[f"rms/{index}"]


def test_a_lambda_of_each_token_spreads_the_sums(rows):
    torch.manual_seed(0)
    model = language.create("diffv2-debug", **TINY)
    metrics = head_statistics(model, rows)
    assert metrics["row_sum_std/0"] > 1e-3
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.lambda_proj.weight.zero_()
    assert head_statistics(model, rows)["row_sum/1"] == pytest.approx(0.5, abs=1e-6)


def test_standard_maps_sum_to_one(rows):
    metrics = head_statistics(language.create("transformer-debug", **TINY), rows)
    assert metrics["row_sum/1"] == pytest.approx(1, abs=1e-6)
    assert metrics["absolute/1"] == pytest.approx(1, abs=1e-6)
    assert metrics["negative/0"] == 0


def test_other_models_are_refused(rows):
    with pytest.raises(ValueError, match="Linear has no attention layer"):
        head_statistics(nn.Linear(2, 2), rows)
