"""Hugging Face models among ours: the same evaluations, their attention captured."""

import pytest
import torch

from diffvision.analysis.capture import captured
from diffvision.analysis.maps import open_layers
from diffvision.evaluation.language.perplexity import perplexity

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
def test_reading_changes_nothing(model):
    whole = model(ROWS).logits
    calls = []
    with captured(model, calls.append):
        torch.testing.assert_close(model(ROWS).logits, whole, atol=1e-4, rtol=1e-4)
    maps = model.config.model_type == "diffllama"
    assert [call.scores().logits.shape for call in calls] == [(2, 4 - 2 * maps, 1 + maps, 12, 12)] * 2
    assert (calls[0].lam is not None) == maps
    torch.testing.assert_close(model(ROWS).logits, whole)
    assert len(calls) == 2


@torch.no_grad()
def test_evaluations_take_them(model):
    loss = model(ROWS, labels=ROWS).loss.item()
    assert perplexity(model, list(ROWS), window=32)["nll"] == pytest.approx(loss, rel=1e-5)


@torch.no_grad()
def test_layers_are_opened_with_their_values_where_these_are_whole(model):
    heads = []
    projection = model.model.layers[0].self_attn.o_proj
    note = projection.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
    layers = list(open_layers(model, {"tokens": ROWS[:1]}))
    note.remove()
    if model.config.model_type == "diffllama":
        assert layers[0].values is None
    else:
        out = (layers[0].applied @ layers[0].values).transpose(0, 1).flatten(1)
        torch.testing.assert_close(layers[0].norm(out), heads[0][0], atol=1e-5, rtol=1e-4)
