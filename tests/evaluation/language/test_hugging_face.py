"""Hugging Face models among ours: the same evaluations, their attention laid open."""

import pytest
import torch

from diffvision.evaluation.language.attention import attention_seen, decoder_layers
from diffvision.evaluation.language.outliers import outliers
from diffvision.evaluation.language.perplexity import perplexity
from diffvision.evaluation.language.quantization import quantised_attention

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROWS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["Llama", "DiffLlama"])
def model(request):
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES, initializer_range=0.5)
    return getattr(transformers, f"{request.param}ForCausalLM")(config).eval()


@torch.no_grad()
def test_looking_changes_nothing(model):
    whole = model(ROWS).logits
    calls = []
    with attention_seen(model, calls.append):
        torch.testing.assert_close(model(ROWS).logits, whole, atol=1e-4, rtol=1e-4)
    maps = model.config.model_type == "diffllama"
    assert [call.logits.shape for call in calls] == [(2, 4 - 2 * maps, 1 + maps, 12, 12)] * 2
    assert (calls[0].lam is not None) == maps
    torch.testing.assert_close(model(ROWS).logits, whole)
    assert len(calls) == 2
    with quantised_attention(model, 2):
        assert not torch.allclose(model(ROWS).logits, whole, atol=1e-2)


@torch.no_grad()
def test_evaluations_take_them(model):
    loss = model(ROWS, labels=ROWS).loss.item()
    assert perplexity(model, list(ROWS), window=32)["nll"] == pytest.approx(loss, rel=1e-5)
    assert len(decoder_layers(model)) == 2
    states = model(ROWS, output_hidden_states=True).hidden_states[1]
    assert outliers(model, ROWS)["hidden_states/top_1"] >= states.abs().max().item() * 0.999
