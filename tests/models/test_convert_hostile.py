"""Files and folders that are nearly right: what `convert` makes of them must be the same function, or nothing."""

import json

import open_clip
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from diffvision.export import save_folder
from diffvision.models import language
from diffvision.models.architecture import metadata
from diffvision.models.checkpoint import read_state
from diffvision.models.convert import convert
from diffvision.models.language.configuration import LanguageConfig
from diffvision.nn import DiffAttention

WEIGHTS = DiffAttention(32, 2).state_dict()


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["module._orig_mod.", "_orig_mod.module.", "module.module."])
def test_wrappers_in_any_order(prefix, tmp_path):
    torch.save({"model_state_dict": {prefix + name: value for name, value in WEIGHTS.items()}}, tmp_path / "x.pt")
    assert read_state(tmp_path / "x.pt").keys() == WEIGHTS.keys()


def test_what_a_training_run_saved_has_the_model_s_own_names(tmp_path):
    state = {f"model.{name}": value for name, value in WEIGHTS.items()}
    torch.save({"pytorch-lightning_version": "2.6", "state_dict": state}, tmp_path / "x.ckpt")
    assert read_state(tmp_path / "x.ckpt").keys() == WEIGHTS.keys()


def test_weights_that_are_there_twice(tmp_path):
    torch.save({**WEIGHTS, "module.proj.bias": WEIGHTS["proj.bias"] + 1}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="holds weights twice, with"):
        read_state(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.0.self_attn.o_proj.weight", "look like transformers': give the folder"),
        ("blocks.0.in_proj.weight", r"look like a fused block"),
        ("blocks.0.attn.qkv.weight", r"look like plain attention, which diffvision\.adapt"),
    ],
)
def test_what_they_look_like(name, words, tmp_path):
    lambdas = ["model.layers.0.self_attn.lambda_q1", "model.layers.0.self_attn.q_proj.weight"]  # as ours are named
    beside = lambdas if "self_attn" in name else []
    save_file({one: torch.zeros(4, 4) for one in [name, *beside]}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=words):
        convert(str(tmp_path / "x.safetensors"), str(tmp_path / "y.pt"), to="timm")


def test_no_folder_is_left_on_the_way(tmp_path):
    (tmp_path / "link.pt").symlink_to("nowhere")
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    for destination, words in (
        ("a/b/y.bin", "ends in '.bin'"),
        ("x.safetensors/y.pt", "x.safetensors, which is a file: name another"),
        ("link.pt", "is there already"),
    ):
        with pytest.raises(ValueError, match=words):
            convert(str(tmp_path / "x.safetensors"), str(tmp_path / destination), to="timm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.pt", "x.safetensors"]
    convert(str(tmp_path / "x.safetensors"), str(tmp_path / "a/b/y.pt"), to="timm")
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["y.pt"]


# ---- DiffCLIP ------------------------------------------------------------------------------------------------------


def _folder(path, name="DiffCLIP-debug", text=None, **changed):
    """An OpenCLIP folder with another configuration."""
    config = open_clip.get_model_config(name) | changed
    config["text_cfg"] = {**config["text_cfg"], "vocab_size": 50, **(text or {})}
    model = open_clip.CLIP(**config)
    model.visual.preprocess_cfg = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    save_folder(model, path, config=config)
    return str(path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quick_gelu": False}, "quick_gelu is False, DiffCLIP's True"),
        ({"init_logit_bias": -10.0}, "init_logit_bias is -10.0"),
        ({"text": {"pool_type": "last"}}, r"text_cfg\.pool_type is 'last', DiffCLIP's 'argmax'"),
        (
            {"text": {"block_type": "diffvision:v1:lambda_init=0.5"}},
            "layer 0 of the text tower is v1 with lambda_init",
        ),
        ({"text": {"block_type": "diffvision:v1_head:lambda_init=0.8"}}, "of the text tower is v1_head"),
        ({"name": "DiffCLIP-GDA-debug"}, "of the image tower is gda"),
        ({"name": "DiffCLIP-DINT-debug"}, "of the image tower is v1_dint"),
    ],
)
def test_only_what_their_code_computes_becomes_theirs(given, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        convert(_folder(tmp_path / "model", **given), str(tmp_path / "x.pt"), to="diffclip")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_dints_weights_do_not_become_v1(tmp_path):
    """They have V1's names, and what was recorded with them says that they are not V1's."""
    model = timm.create_model("dint_vit_debug", depth=1)
    save_file(model.state_dict(), tmp_path / "x.safetensors", metadata=metadata(model))
    with pytest.raises(ValueError, match="variant 'v1_dint'"):
        convert(str(tmp_path / "x.safetensors"), str(tmp_path / "y.safetensors"), to="timm")
    assert not (tmp_path / "y.safetensors").exists()


def test_lambda_starts_alike_in_both_towers(tmp_path):
    convert(_folder(tmp_path / "model"), str(tmp_path / "x.pt"), to="diffclip")
    with pytest.raises(ValueError, match="layer 0 of the image tower is"):
        convert(
            str(tmp_path / "x.pt"), str(tmp_path / "y"), to="openclip", tower="diff_vit_debug_clip", lambda_init=0.3
        )


# ---- transformers' folders -----------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path):
    """A folder of transformers' layout in two shards, and its weights."""
    sizes = {"vocab_size": 97, "dim": 48, "depth": 2, "num_heads": 4, "head_dim": 12, "mlp_dim": 80, "max_length": 64}
    language.save(language.LanguageModel(LanguageConfig(**sizes, variant="standard")), tmp_path / "ours")
    convert(str(tmp_path / "ours"), str(tmp_path / "theirs"), to="huggingface")
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
    convert(str(tmp_path / "again"), str(tmp_path / "back"), to="huggingface")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-1.safetensors \(1 of 2"):
        convert(str(folder), str(tmp_path / "more"), to="language")
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is damaged, or no index of shards"):
        convert(str(folder), str(tmp_path / "more"), to="language")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_hidden_layers": 10**9}, "depth is 1000000000: it must be a whole number from 1 to 4,096"),
        ({"num_attention_heads": "4"}, "num_attention_heads='4': set a number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5': set a number"),
        ({"rope_parameters": "default"}, "has 'default' for its rotary embedding"),
        ({"rope_parameters": {"rope_theta": [1]}}, r"rope_theta=\[1\]: write a number"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"has quantised weights \(fp8\)"),
    ],
)
def test_a_hostile_configuration(changed, words, llama, tmp_path):
    _settings(llama[0], **changed)
    with pytest.raises(ValueError, match=words):
        convert(str(llama[0]), str(tmp_path / "again"), to="language")


def test_several_dtypes_become_the_configuration_s(llama, tmp_path):
    folder, weights = llama
    mixed = {name: value.half() if "layers.0" in name else value for name, value in weights.items()}
    for dtype in ("float16", "float32"):
        _settings(folder, dtype=dtype)
        save_file(mixed, folder / "model.safetensors")
        convert(str(folder), str(tmp_path / dtype), to="language")
        model = language.load(tmp_path / dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    save_file(
        {n: v.to(torch.float8_e4m3fn) if v.dim() == 2 else v for n, v in weights.items()}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match="quantised weights"):
        convert(str(folder), str(tmp_path / "eight"), to="language")


def test_tokenizers_of_a_folder(llama, tmp_path, capsys):
    folder, _ = llama
    convert(str(folder), str(tmp_path / "none"), to="language")
    assert "has no tokenizer.json, so none has none" in capsys.readouterr().out
    for name, words in (("small", ["the", "cat"]), ("large", [f"word{number}" for number in range(200)])):
        (tmp_path / name).mkdir()
        words = WordLevel({word: number for number, word in enumerate(["<|endoftext|>", *words])})
        Tokenizer(words).save(str(tmp_path / name / "tokenizer.json"))
    (folder / "tokenizer.json").write_text("{bad")
    with pytest.raises(ValueError, match=r"tokenizer.json is damaged, or no"):
        convert(str(folder), str(tmp_path / "damaged"), to="language")
    with pytest.raises(ValueError, match="tokens and the model 97"):
        convert(
            str(folder), str(tmp_path / "other"), to="language", tokenizer=str(tmp_path / "large" / "tokenizer.json")
        )
    small = tmp_path / "small" / "tokenizer.json"
    convert(str(folder), str(tmp_path / "given"), to="language", tokenizer=str(small))
    assert (tmp_path / "given" / "tokenizer.json").read_bytes() == small.read_bytes()
    with pytest.raises(ValueError, match=r"give a tokenizer\.json that"):
        convert(str(tmp_path / "given"), str(tmp_path / "x"), to="huggingface", tokenizer=str(small))


def test_a_tied_head_that_is_another(llama, tmp_path):
    folder, weights = llama
    _settings(folder, tie_word_embeddings=True)
    head = weights["model.embed_tokens.weight"] + 1
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="tie_word_embeddings=True, but"):
        convert(str(folder), str(tmp_path / "again"), to="language")


def test_timm_loads_what_a_training_s_weights_become(tmp_path):
    """bfloat16 too, bit for bit."""
    model = timm.create_model("diff_vit_debug").bfloat16()
    state = {f"model._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save({"pytorch-lightning_version": "2.6", "state_dict": state}, tmp_path / "x.ckpt")
    convert(str(tmp_path / "x.ckpt"), str(tmp_path / "theirs.pt"), to="timm")
    convert(str(tmp_path / "theirs.pt"), str(tmp_path / "ours.safetensors"), to="diffvision")
    back = load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())
