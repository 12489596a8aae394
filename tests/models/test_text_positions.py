"""A start from weights with captions of another length: against torch's interpolation and Long-CLIP's formula."""

from types import SimpleNamespace

import open_clip
import pytest
import torch
import torch.nn.functional as F

from diffvision.models.text_positions import check_context_length, stretch_positions
from diffvision.opening import open_model
from diffvision.training.clip import ContrastiveModule


@pytest.fixture
def start(tmp_path):
    """A model's name, a file of its weights, and its 24 positions."""
    state = open_clip.create_model("DiffCLIP-debug").state_dict()
    torch.save(state, tmp_path / "start.pt")
    return "DiffCLIP-debug", str(tmp_path / "start.pt"), positions(state)


def positions(state):
    return state["positional_embedding"]


def made(start, length, how=None):
    module = ContrastiveModule(start[0], pretrained=start[1], context_length=length, context_positions=how)
    assert module.tokenizer(["a dog " * 99]).shape == (1, length)
    assert module(text=["a dog " * 99, "a dog"])["text_features"].shape == (2, 64)
    return positions(module.model.state_dict())


@pytest.mark.parametrize("how", [None, "interpolate", "stretch", "first"])
def test_positions_of_the_same_length_are_unchanged(start, how):
    assert torch.equal(made(start, 24, how), start[2])


def test_interpolation_is_torchs(start):
    expected = F.interpolate(start[2].T[None], size=40, mode="linear", align_corners=False)[0].T
    assert torch.equal(made(start, 40), expected)
    assert torch.equal(made(start, 40, "interpolate"), expected)
    shorter = F.interpolate(start[2].T[None], size=9, mode="linear", align_corners=False)[0].T
    assert torch.equal(made(start, 9, "interpolate"), shorter)
    assert torch.equal(made(start, 9, "first"), start[2][:9])
    assert torch.equal(made(start, 36, "stretch"), stretch_positions(start[2], 36))


def test_stretching_is_long_clips_formula():
    old = torch.randn(77, 5)
    new = stretch_positions(old, 248)
    assert torch.equal(new[:20], old[:20])
    for n in range(20, 248):
        at, quarter = divmod(n - 20, 4)
        if at < 56:
            expected = (4 - quarter) / 4 * old[20 + at] + quarter / 4 * old[21 + at]
        else:  # beyond the last position their code goes on in a straight line
            expected = old[76] + quarter / 4 * (old[76] - old[75])
        assert torch.allclose(new[n], expected, atol=1e-6)
    assert torch.equal(stretch_positions(old, 100), new[:100])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"context_length": 9}, "context_positions"),
        ({"context_length": 9, "context_positions": "stretch"}, "context_length"),
        ({"context_length": 37, "context_positions": "stretch"}, "context_length"),
        ({"context_length": 40, "context_positions": "first"}, "context_positions"),
        ({"context_length": 2}, "context_length"),
        ({"context_length": 10**8}, "context_length"),
        ({"context_positions": "first"}, "context_positions"),
    ],
)
def test_bad_lengths_are_named(start, settings, named):
    with pytest.raises(ValueError, match=named):
        ContrastiveModule(start[0], pretrained=start[1], **settings)


def test_weights_of_longer_captions_are_not_cut_silently(start, tmp_path):
    longer = ContrastiveModule(start[0], context_length=40)
    torch.save(longer.model.state_dict(), tmp_path / "longer.pt")
    with pytest.raises(ValueError, match="context_positions"):
        ContrastiveModule(start[0], pretrained=str(tmp_path / "longer.pt"))
    opened = open_model(start[0], str(tmp_path / "longer.pt"))
    assert torch.equal(positions(opened.module.state_dict()), positions(longer.model.state_dict()))
    assert opened.tokenizer(["a dog " * 99]).shape == (1, 40)
    assert opened.config["text_cfg"]["context_length"] == 40


def test_a_runs_checkpoint_is_to_be_exported_first(start, tmp_path):
    state = {f"model.{name}": value for name, value in torch.load(start[1]).items()}
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="local-dir"):
        ContrastiveModule(start[0], pretrained=str(tmp_path / "last.ckpt"), context_length=40)


def test_the_limit_is_the_tokenizers_or_the_text_towers():
    tokenizer = SimpleNamespace(tokenizer=SimpleNamespace(model_max_length=512))
    tower = SimpleNamespace(text=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=300)))
    check_context_length(512, tokenizer, None)
    check_context_length(10**6, SimpleNamespace(), None)
    for limit, model in ((512, None), (300, tower)):
        with pytest.raises(ValueError, match=f"context_length must be at most {limit}"):
            check_context_length(limit + 1, tokenizer, model)
