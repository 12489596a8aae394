"""Hugging Face models among ours: the same evaluations, their attention captured."""

import json
import subprocess
import sys

import pytest
import torch

from diffvision.analysis.capture import captured
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.evaluation.language.hugging_face import HuggingFaceTokenizer, load_hugging_face
from diffvision.evaluation.language.outliers import decoder_layers, outliers
from diffvision.evaluation.language.perplexity import perplexity
from diffvision.evaluation.language.quantization import quantised_attention
from diffvision.models import language

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
    with quantised_attention(model, 2):
        assert not torch.allclose(model(ROWS).logits, whole, atol=1e-2)


@torch.no_grad()
def test_evaluations_take_them(model):
    loss = model(ROWS, labels=ROWS).loss.item()
    assert perplexity(model, list(ROWS), window=32)["nll"] == pytest.approx(loss, rel=1e-5)
    assert len(decoder_layers(model)) == 2
    states = model(ROWS, output_hidden_states=True).hidden_states[1]
    assert outliers(model, ROWS)["hidden_states/top_1"] >= states.abs().max().item() * 0.999


LOADED = """
import sys
from diffvision.evaluation.language.hugging_face import load_hugging_face
model, tokenizer = load_hugging_face(sys.argv[1])
print(type(model).__name__, tokenizer.eos_id)
"""


def test_our_own_export_opens_in_a_new_process(tmp_path):
    """Nothing has registered our classes there, and nobody answers transformers' question."""
    from diffvision.models.language.transformers import export

    model = language.create("diff-debug", vocab_size=300, max_length=64)
    language.save(model, tmp_path / "ours", train_tokenizer(["a cat and a dog"], 300))
    export(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    command = [sys.executable, "-c", LOADED, str(tmp_path / "theirs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout.split()) == (0, ["DiffTransformerForCausalLM", "0"]), done.stderr


def test_no_code_of_a_folder_is_run(tmp_path):
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none_of_ours", "auto_map": classes}))
    (tmp_path / "code.py").write_text("raise SystemExit(3)")
    with pytest.raises(ValueError, match="has code of its own for its causal language model"):
        load_hugging_face(str(tmp_path))


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>"])
def test_a_special_token_s_name_in_a_text_is_text(end, tmp_path):
    """As in our own tokenizers: bits per byte of the same text are of the same tokens."""
    own = train_tokenizer(["a cat and a dog"], 300)
    own.save(tmp_path)
    host = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>", additional_special_tokens=["</s>"]
    )
    text = f"a cat{end} and a dog"
    ids = HuggingFaceTokenizer(host).encode(text)
    assert ids == own.encode(text)
    assert own.eos_id not in ids
    assert own.decode(ids) == text
