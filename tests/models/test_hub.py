"""Models on the Hub in every command: as folders, of which neither pickles nor code are downloaded."""

import pytest
import timm
import torch
from huggingface_hub import constants
from language_fixtures import make_llama

from diffvision import cli
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.export.model_folders import save_folder
from diffvision.models import language
from diffvision.opening import open_model, open_native

TOKENS = torch.arange(12).reshape(1, 12)


@pytest.fixture
def llama(hub, tmp_path):
    """A Llama on the Hub, with a pickle and code next to its weights."""
    sizes = {"vocab_size": 258, "hidden_size": 32, "max_position_embeddings": 32}
    model = make_llama("Llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    model.save_pretrained(tmp_path / "llama")
    train_tokenizer(["abab"], 258).save(tmp_path / "llama")
    (tmp_path / "llama" / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "llama" / "modeling_llama.py").write_text("raise RuntimeError")
    hub.add("someone/llama", tmp_path / "llama")
    return model


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["convert", "--to", "language"], "standard"),
        (["adapt"], "v2"),
        (["adapt", "--method", "dex"], "dex"),
        (["export", "--to", "huggingface"], "standard"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
@pytest.mark.parametrize("source", ["hub", "folder"])
def test_a_llama_is_converted_adapted_and_exported(arguments, kind, source, llama, hub, tmp_path, capsys):
    command, *rest = arguments
    spec = "hf:someone/llama" if source == "hub" else f"hf:{tmp_path / 'llama'}"
    assert cli.main([command, spec, str(tmp_path / "made"), *rest]) == 0, capsys.readouterr().err
    assert command != "export" or "is llama: wrote" in capsys.readouterr().out
    model = open_model(str(tmp_path / "made")).module
    assert isinstance(model, language.LanguageModel)
    assert model.config.variant == kind
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), llama(TOKENS).logits, rtol=0, atol=1e-5)
    assert not {"pytorch_model.bin", "modeling_llama.py"} & set(hub.asked)
    assert set(hub.asked) == (
        {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} if source == "hub" else set()
    )


def test_a_timm_model_opens_by_its_id(hub, tmp_path, capsys):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5).eval()
    config = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5}
    save_folder(model, tmp_path / "vit", config=config)
    hub.add("someone/vit", tmp_path / "vit")
    images = torch.randn(2, 3, 32, 32)
    for opened in (open_model("hf-hub:someone/vit"), open_native("hf-hub:someone/vit")):
        assert opened.library == "timm"
        assert torch.equal(opened.module(images), model(images))
    assert cli.main(["adapt", "hf-hub:someone/vit", str(tmp_path / "made")]) == 0, capsys.readouterr().err
    torch.testing.assert_close(open_model(tmp_path / "made").module(images), model(images), rtol=0, atol=1e-5)


def test_a_model_that_cannot_be_had_is_one_error(hub, llama, tmp_path, monkeypatch, capsys):
    assert cli.main(["adapt", "hf-hub:someone/none", "there"]) == 1
    assert "someone/none" in capsys.readouterr().err
    assert cli.main(["convert", "hf-hub:someone/llama", str(tmp_path / "first"), "--to", "language"]) == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = ["convert", "hf-hub:someone/llama", str(tmp_path / "again"), "--to", "language"]  # from the cache
    assert cli.main(again) == 0
    assert cli.main(["adapt", "hf-hub:someone/other", str(tmp_path / "other")]) == 1
