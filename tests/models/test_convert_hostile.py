"""Files and folders that are nearly right: what `convert` makes of them must be the same function, or nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from diffvision.export.export_commands import export
from diffvision.models import language
from diffvision.models.checkpoint import read_state
from diffvision.models.convert import convert
from diffvision.models.language.configuration import LanguageConfig
from diffvision.nn import DiffAttention

pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer next to:UserWarning")
WEIGHTS = DiffAttention(32, 2).state_dict()


def test_weights_that_are_there_twice(tmp_path):
    torch.save({**WEIGHTS, "module.proj.bias": WEIGHTS["proj.bias"] + 1}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="holds weights twice, with"):
        read_state(tmp_path / "x.pt")


@pytest.fixture
def llama(tmp_path):
    """A folder of transformers' layout in two shards, and its weights."""
    sizes = {"vocab_size": 97, "dim": 48, "depth": 2, "num_heads": 4, "head_dim": 12, "mlp_dim": 80, "max_length": 64}
    language.save(language.LanguageModel(LanguageConfig(**sizes, variant="standard")), tmp_path / "ours")
    export(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    folder = tmp_path / "theirs"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(weights)}
    for file in sorted(set(where.values())):
        save_file({name: value for name, value in weights.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder, weights


def _settings(folder, **changed):
    values = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(values))


def test_what_lies_beside_the_shards_is_not_read(llama, tmp_path):
    folder, weights = llama
    save_file({"tok_embeddings.weight": torch.zeros(97, 48)}, folder / "consolidated.safetensors")
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "model-9.safetensors")  # of an older save
    convert(str(folder), str(tmp_path / "again"), to="language")
    export(str(tmp_path / "again"), str(tmp_path / "back"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-1.safetensors \(1 of 2"):
        convert(str(folder), str(tmp_path / "more"), to="language")
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is damaged, or no index of shards"):
        convert(str(folder), str(tmp_path / "more"), to="language")


def test_several_dtypes_become_the_widest(llama, tmp_path):
    folder, weights = llama
    mixed = {name: value.half() if "layers.0" in name else value for name, value in weights.items()}
    save_file(mixed, folder / "model.safetensors")
    convert(str(folder), str(tmp_path / "mixed"), to="language")
    assert {parameter.dtype for parameter in language.load(tmp_path / "mixed").parameters()} == {torch.float32}
    save_file(
        {n: v.to(torch.float8_e4m3fn) if v.dim() == 2 else v for n, v in weights.items()}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match="quantised weights"):
        convert(str(folder), str(tmp_path / "eight"), to="language")
    _settings(folder, quantization_config={"quant_method": "fp8"})
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="quantised weights"):
        convert(str(folder), str(tmp_path / "eight"), to="language")


def test_the_tokenizer_of_a_folder_comes_along(llama, tmp_path, capsys):
    folder, _ = llama
    convert(str(folder), str(tmp_path / "none"), to="language")
    assert "has no tokenizer.json, so none has none" in capsys.readouterr().out
    words = WordLevel({word: number for number, word in enumerate(["<|endoftext|>", "the", "cat"])})
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    convert(str(folder), str(tmp_path / "words"), to="language")
    assert (tmp_path / "words" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    many = Tokenizer(WordLevel({str(number): number for number in range(1000)}))
    for content, message in ((many.to_str(), "at most the model's"), ("{", "is damaged")):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            convert(str(folder), str(tmp_path / "other"), to="language")
        assert not (tmp_path / "other").exists()


def test_a_tied_head_that_is_another(llama, tmp_path):
    folder, weights = llama
    _settings(folder, tie_word_embeddings=True)
    head = weights["model.embed_tokens.weight"] + 1
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        convert(str(folder), str(tmp_path / "again"), to="language")
