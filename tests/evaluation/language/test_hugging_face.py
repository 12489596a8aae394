"""Hugging Face models among ours: the same evaluations, their attention captured."""

import pytest
import torch

from diffvision.analysis.capture import captured
from diffvision.evaluation.language.perplexity import perplexity

ROWS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_reading_changes_nothing(llama):
    whole = llama(ROWS).logits
    calls = []
    with captured(llama, calls.append):
        torch.testing.assert_close(llama(ROWS).logits, whole, atol=1e-4, rtol=1e-4)
    maps = llama.config.model_type == "diffllama"
    assert [call.scores().logits.shape for call in calls] == [(2, 4 - 2 * maps, 1 + maps, 12, 12)] * 2
    assert (calls[0].lam is not None) == maps
    torch.testing.assert_close(llama(ROWS).logits, whole)
    assert len(calls) == 2


@torch.no_grad()
def test_evaluations_take_them(llama):
    loss = llama(ROWS, labels=ROWS).loss.item()
    assert perplexity(llama, list(ROWS), window=32)["nll"] == pytest.approx(loss, rel=1e-5)
