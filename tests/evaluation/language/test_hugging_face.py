"""Hugging Face models in the evaluations: captured, pruned, rounded and measured as ours."""

import pytest
import torch
from language_fixtures import make_llama

from diffvision.analysis.capture import captured
from diffvision.evaluation.language.cache_pruning import cache_pruning
from diffvision.evaluation.language.low_bit import SCHEMES, low_bit
from diffvision.evaluation.language.outliers import decoder_layers, outliers
from diffvision.evaluation.language.perplexity import perplexity
from diffvision.evaluation.language.pruning import Compress, pruned_attention
from diffvision.models.convert.transformers import from_hugging_face
from diffvision.models.language import LanguageModel

transformers = pytest.importorskip("transformers")
ROWS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_reading_changes_nothing_and_evaluations_take_them(llama):
    whole = llama(ROWS).logits
    calls = []
    with captured(llama, calls.append):
        torch.testing.assert_close(llama(ROWS).logits, whole, atol=1e-4, rtol=1e-4)
    maps = llama.config.model_type == "diffllama"
    assert [call.scores().logits.shape for call in calls] == [(2, 4 - 2 * maps, 1 + maps, 12, 12)] * 2
    assert (calls[0].lam is not None) == maps
    with captured(llama, SCHEMES["logits_4"]):
        assert not torch.allclose(llama(ROWS).logits, whole, atol=1e-2)
    torch.testing.assert_close(llama(ROWS).logits, whole)
    assert len(calls) == len(decoder_layers(llama)) == 2
    states = llama(ROWS, output_hidden_states=True).hidden_states[1]
    assert outliers(llama, ROWS)["hidden_states/top_1"] >= states.abs().max().item() * 0.999
    loss = llama(ROWS, labels=ROWS).loss.item()
    assert perplexity(llama, list(ROWS), window=32)["nll"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(("name", "method"), [("Llama", "snap"), ("DiffLlama", "diff"), ("DiffLlama", "knorm")])
@torch.no_grad()
def test_pruned_as_ours(name, method):
    """Whose keys are captured for each query head: the heads of a group have one kept set all the same."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    theirs = make_llama(name, vocab_size=97, hidden_size=32, rms_norm_eps=1e-5, **heads)
    ours_config, state = from_hugging_face(theirs.config.to_dict(), theirs.state_dict())
    ours = LanguageModel(ours_config).eval()
    ours.load_state_dict(state)
    tokens, prompts = torch.randint(97, (3, 30), generator=torch.Generator().manual_seed(0)), torch.tensor([20, 9, 24])
    pruned = {}
    for label, one in (("ours", ours), ("theirs", theirs)):
        with pruned_attention(one, Compress(method, 0.6, 4), prompts):
            out = one(tokens)
        pruned[label] = getattr(out, "logits", out)
    torch.testing.assert_close(pruned["theirs"], pruned["ours"], rtol=0, atol=1e-3)
    assert not torch.allclose(pruned["ours"][0, 20:], ours(tokens)[0, 20:], atol=0.1)
    assert cache_pruning(theirs, tokens, continuation=9, ratios=(0.5,))


@torch.no_grad()
def test_values_are_rounded_too_and_halves_of_them_refused(llama):
    """All but DiffLlama, whose attention is asked for twice, with half of the values each time."""
    if llama.config.model_type == "diffllama":
        with pytest.raises(ValueError, match="DiffLlamaAttention"):
            low_bit(llama, ROWS)
    else:
        assert low_bit(llama, ROWS, schemes=["pv_fp8"])["relative_l1/pv_fp8"] > 0
