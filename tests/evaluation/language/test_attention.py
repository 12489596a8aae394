"""Captured attention: unchanged while only read; outliers and quantised logits by hand."""

import math

import pytest
import torch
from torch import nn

from diffvision.analysis.capture import Scores, captured
from diffvision.evaluation.language.low_bit import quantise_logits
from diffvision.evaluation.language.outliers import outliers
from diffvision.models import language

ROWS = torch.randint(512, (3, 20), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_reading_changes_nothing(tiny):
    calls = []
    whole = tiny.double()(ROWS)
    with captured(tiny, calls.append):
        assert torch.equal(tiny(ROWS), whole)
    assert [call.name for call in calls] == ["blocks.0.attn", "blocks.1.attn"]
    with captured(tiny, lambda call: call.scores()):
        torch.testing.assert_close(tiny(ROWS), whole, atol=1e-10, rtol=1e-10)
    assert torch.equal(tiny(ROWS), whole)
    assert len(calls) == 2
    scores = calls[0].scores()
    torch.testing.assert_close(scores.maps(), tiny.blocks[0].attn.attention_maps(4 * tiny.embed(ROWS), is_causal=True))
    if not scores.is_rowwise:
        with pytest.raises(ValueError, match="row"):
            scores.last_query()
        return
    torch.testing.assert_close(scores.last_query().compute_weights(), scores.compute_weights()[:, :, -1:])


@torch.no_grad()
def test_a_mask_is_obeyed(tiny):
    layer, x, mask = tiny.blocks[0].attn, tiny.embed(ROWS), torch.rand(3, 1, 20, 20) > 0.5
    whole = layer(x, attn_mask=mask, is_causal=True)
    with captured(layer, lambda call: call.scores()):
        torch.testing.assert_close(layer(x, attn_mask=mask, is_causal=True), whole, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_reading_keeps_what_dex_has_learned():
    model = language.create("transformer-debug", variant="dex", vocab_size=512).double()
    for block in model.blocks:
        nn.init.normal_(block.attn.dex)
    whole = model(ROWS)
    with captured(model, lambda call: call.scores()):
        torch.testing.assert_close(model(ROWS), whole, atol=1e-10, rtol=1e-10)


@torch.no_grad()
def test_outliers_pool_layers_heads_and_maps(tiny):
    metrics = outliers(tiny, ROWS, top=(1, 3, 10_000), batch_size=2)
    logits, states, x = [], [], tiny.embed(ROWS)
    lower = torch.ones(20, 20, dtype=torch.bool).tril()
    for block in tiny.blocks:
        q, k, _ = block.attn._project(4 * x, 4 * x)
        scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) / 2  # one key head for two, D = 4
        logits.append(scores[..., lower].flatten())
        x = block(x)
        states.append(x.flatten())
    for kind, values in (("attention_logits", logits), ("hidden_states", states)):
        ordered = torch.cat(values).abs().sort(descending=True).values
        assert metrics[f"{kind}/top_1"] == pytest.approx(ordered[0].item(), rel=1e-5)
        assert metrics[f"{kind}/top_3"] == pytest.approx(ordered[2].item(), rel=1e-5)
        assert math.isnan(metrics[f"{kind}/top_10000"])
        assert metrics[f"{kind}/median"] == pytest.approx(torch.cat(values).abs().median().item(), rel=1e-3)


LOGITS = torch.tensor([[7.0, -3.4, 100.0], [0.4, 0.6, 1.4]]).view(1, 1, 1, 2, 3)
ALLOWED = torch.tensor([[True, True, False], [True, True, True]])


def test_quantised_logits_by_hand():
    """Four bits: 15 levels from -a to a, a the largest that may be attended to: 7, so the levels are whole numbers."""
    four = quantise_logits(LOGITS, ALLOWED, 4)
    assert four.flatten().tolist() == [7, -3, 7, 0, 1, 1]  # the forbidden 100 counts for nothing and is cut
    three = quantise_logits(LOGITS, ALLOWED, 3)  # levels of 7/3
    assert three[0, 0, 0].tolist()[0][:2] == pytest.approx([7, -7 / 3])
    assert three[0, 0, 0, 1].tolist() == pytest.approx([0, 0, 7 / 3])
    maps = Scores(four, ALLOWED).maps()[0, 0, 0, 1]
    e = math.e
    assert maps.tolist() == pytest.approx([1 / (1 + 2 * e), e / (1 + 2 * e), e / (1 + 2 * e)])
    assert quantise_logits(torch.zeros_like(LOGITS), ALLOWED, 8).abs().max() == 0
    assert (quantise_logits(LOGITS, ALLOWED, 16) - LOGITS)[..., :2].abs().max() < 7 / 32767
