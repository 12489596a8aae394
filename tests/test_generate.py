"""`diffvision generate` on a tiny checkpoint."""

import dataclasses
import json

import pytest
import torch

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.generate import generate_text
from diffvision.models import language

TEXT = "äöü says the cat, and the dog says: naïve café. " * 20


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer([TEXT], 300)
    assert made.vocab_size < 300  # so some of the model's tokens are none of its
    return made


@pytest.fixture
def checkpoint(tmp_path, tokenizer):
    torch.manual_seed(1)
    model = language.create("diff-debug", vocab_size=300, max_length=64)
    language.save(model, tmp_path / "model", tokenizer)
    return str(tmp_path / "model")


GREEDY = {"prompt": "the cat", "max_new_tokens": 9, "temperature": 0.0}


def test_prints_what_it_returns(checkpoint, capsys):
    drawn = {"prompt": "the cat", "max_new_tokens": 40, "temperature": 1.0}
    text = generate_text(checkpoint, **drawn)
    assert capsys.readouterr().out == f"the cat{text}\n"
    assert len(text) > 10
    assert generate_text(checkpoint, **drawn) == text
    assert generate_text(checkpoint, **drawn, seed=1) != text


def test_characters_of_several_tokens_are_printed_whole(checkpoint, tokenizer, capsys, monkeypatch):
    """A letter's bytes may be tokens of their own: what is printed is what the whole decodes to."""
    ids = tokenizer.encode("日本 café\n")
    assert any("\ufffd" in tokenizer.decode([one]) for one in ids)

    def fake(model, prompts, *, on_token, **settings):
        for one in ids:
            on_token(0, one)
            assert "\ufffd" not in capsys.readouterr().out

    monkeypatch.setattr("diffvision.models.language.generation.generate", fake)
    assert generate_text(checkpoint, prompt="x") == "日本 café\n"


def test_a_training_run_s_checkpoint_with_a_named_tokenizer(checkpoint, tmp_path, tokenizer, capsys):
    model = language.load(checkpoint)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    path = tmp_path / "last.ckpt"
    content = {"state_dict": state, "hyper_parameters": {"config": dataclasses.asdict(model.config)}}
    torch.save(content, path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json next"):
        generate_text(str(path), prompt="a")
    own = generate_text(checkpoint, **GREEDY)
    assert generate_text(str(path), **GREEDY, tokenizer=checkpoint) == own
    torch.save({**content, "diffvision": {"model": "diff-debug", "tokenizer": checkpoint}}, path)
    assert generate_text(str(path), **GREEDY) == own


def test_a_name_with_a_checkpoint_and_a_folder_of_transformers(checkpoint, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    from diffvision.export.export_commands import export

    own = generate_text(checkpoint, **GREEDY)
    named = generate_text("diff-debug", checkpoint=checkpoint, **GREEDY)
    export(checkpoint, str(tmp_path / "theirs"))
    assert named == own
    assert generate_text(str(tmp_path / "theirs"), **GREEDY) == own
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    two = transformers.LlamaConfig(vocab_size=300, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(two).save_pretrained(tmp_path / "two")
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    (tmp_path / "two" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    transformers.LlamaModel(two).save_pretrained(tmp_path / "headless")
    for model, named in (
        (f"hf:{tmp_path / 'theirs'}", "transformers"),
        ("CLIP-debug", "CLIP-debug"),
        (str(tmp_path / "two"), "layers"),
        (f"hf:{tmp_path / 'headless'}", r"lm_head\.weight"),
        ("diff-debug", "diff-debug has new weights"),
    ):
        with pytest.raises(ValueError, match=named):
            generate_text(model, prompt="a", tokenizer=checkpoint if model == "diff-debug" else None)
