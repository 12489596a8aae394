"""Small language models of every family, whose likeliest tokens differ from position to position."""

import pytest
import torch

from diffvision.models import language


def small_model(name, **overrides):
    """A model of 97 tokens with large weights."""
    values = {"vocab_size": 97, "max_length": 256, "num_kv_heads": 1, "tied": False, **overrides}
    model = language.create(name, **values).eval()
    with torch.no_grad():
        model.embed.weight.normal_()
        for parameter in model.blocks.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    return model


@pytest.fixture
def make_model():
    return small_model


@pytest.fixture(params=["transformer-debug", "diff-debug", "diffv2-debug"])
def model(request):
    return small_model(request.param)
