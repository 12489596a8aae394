"""Language models as transformers' own: logits, caches, padding, beams, folders, tokenizers, and what is refused."""

import ast
import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

import diffvision  # noqa: E402
from diffvision import cli, open_model  # noqa: E402
from diffvision.data.text import tokenizers as own_tokenizers  # noqa: E402
from diffvision.data.text.chat import TEMPLATES  # noqa: E402
from diffvision.export.export_commands import export  # noqa: E402
from diffvision.models import language  # noqa: E402
from diffvision.models.language.generation import generate  # noqa: E402
from diffvision.models.language.hugging_face import as_native, as_transformers  # noqa: E402

PACKAGE = Path(language.__file__).parents[2]
CLASSES = {"standard": "LlamaForCausalLM", "v1": "DiffLlamaForCausalLM", "v2": "DiffLlamaV2ForCausalLM"}
CLOSE = {"rtol": 0, "atol": 1e-5}  # of logits up to about 10


@pytest.fixture
def host(model):
    return as_transformers(model, pad_token_id=0)


def _padded(rows):
    longest = max(map(len, rows))
    tokens = torch.tensor([[5] * (longest - len(row)) + row for row in rows])
    return tokens, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


@torch.no_grad()
def test_logits_are_the_model_s_there_and_back(model, host, tmp_path):
    assert type(host).__name__ == CLASSES[model.config.variant]
    tokens = torch.randint(97, (2, 20))
    theirs, ours = host(tokens).logits, model(tokens)
    assert (theirs - ours).abs().max() <= 2e-6 * ours.abs().max()
    torch.testing.assert_close(as_native(host)(tokens), ours, **CLOSE)
    first = host(tokens[:, :11], use_cache=True)
    last = host(tokens[:, 11:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, last.logits], 1), ours, **CLOSE)
    host.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(host)
    assert torch.equal(again(tokens).logits, theirs)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
def test_greedy_generation_of_padded_rows_is_ours(cache, model, host):
    rows = [torch.randint(97, (length,)).tolist() for length in (9, 4, 1)]
    tokens, mask = _padded(rows)
    made = host.generate(tokens, attention_mask=mask, max_new_tokens=10, do_sample=False, **cache)
    assert made[:, 9:].tolist() == generate(model, rows, max_new_tokens=10)


def test_beams_follow_their_cache(host):
    tokens = torch.randint(97, (2, 6))
    settings = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 6, "num_beams": 3}
    assert torch.equal(*(host.generate(tokens, use_cache=use, **settings) for use in (True, False)))


@pytest.mark.parametrize("tied", [True, False])
def test_dtype_and_ties_stay(tied, make_model, tmp_path):
    model = make_model("diff-debug", tied=tied).bfloat16()
    language.save(model, tmp_path / "ours", _words(tmp_path / "words.json", "</s>"))
    export(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    host = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert (host.lm_head.weight is host.model.embed_tokens.weight) is tied
    assert host.dtype == open_model(tmp_path / "theirs").module.embed.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("method", ["v1", "v2", "dex"])
def test_adapted_models(method, make_model):
    model = diffvision.adapt(make_model("transformer-debug", num_kv_heads=None), method).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lambda", "dex")):
                parameter.normal_(std=0.1)
        tokens = torch.randint(97, (2, 12))
        torch.testing.assert_close(as_transformers(copy.deepcopy(model))(tokens).logits, model(tokens), **CLOSE)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("gated-debug", {}, "variant='gated'"),
        ("diff-debug", {"variant_by_layer": "1*standard"}, "variant_by_layer='1*standard'"),
        ("diff-debug", {"lambda_init": 0.8}, "lambda_init=0.8"),
        ("diff-debug", {"norm_eps": 1e-6}, "norm_eps=1e-06"),
        ("diff-debug", {"head_norm": False}, "head_norm=False"),
        ("diffv2-debug", {"head_norm": True}, "head_norm=True"),
        ("transformer-debug", {"num_heads": 3}, "num_heads=3"),
    ],
)
def test_what_no_class_holds_is_refused_and_leaves_nothing(name, settings, named, tmp_path, capsys):
    language.save(language.create(name, vocab_size=97, **settings), tmp_path / "ours")
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert named in error
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trusted"), [("diff-debug", False), ("diffv2-debug", True)])
def test_a_program_without_diffvision_loads_the_folder(name, trusted, make_model, tmp_path):
    model = make_model(name)
    as_transformers(model).save_pretrained(tmp_path)
    assert bool(list(tmp_path.glob("*.py"))) == trusted
    program = f"""import sys
sys.modules["diffvision"] = None  # cannot be imported
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code={trusted})
print(type(model).__name__, model(torch.arange(5)[None]).logits.shape)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{CLASSES[model.config.variant]} torch.Size([1, 5, 97])"


def _words(path, *ends):
    """A tokenizer.json of two words and ends of a document."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {name: index for index, name in enumerate(["a", "b", *ends])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(ends))
    own_tokenizers.Tokenizer(backend, ends[-1]).save(path)
    return path


def _end(folder):
    return transformers.AutoTokenizer.from_pretrained(folder).eos_token


def test_export_finds_the_end_of_a_document(tmp_path, make_model):
    """The one that tokenizer_config.json names, else the first of the names that our own tokenizers look for."""
    model = make_model("diff-debug")
    for names, expected in ((["</s>"], "</s>"), (["<|endoftext|>", "</s>", "<stop>"], "<stop>")):
        folder = tmp_path / expected[1:-1].strip("/")
        language.save(model, folder, _words(folder / "tokenizer.json", *names))  # where it lies already
        assert own_tokenizers.load_tokenizer(folder).eos == expected
        export(str(folder), str(folder / "theirs"))
        assert _end(folder / "theirs") == expected
        assert json.loads((folder / "theirs" / "config.json").read_text())["eos_token_id"] == len(names) + 1
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not JSON"):
        export(str(folder), str(folder / "again"))


def test_export_of_a_training_run_has_its_tokenizer(tmp_path, make_model):
    model, words = make_model("diff-debug"), _words(tmp_path / "words" / "tokenizer.json", "</s>")
    path, content = tmp_path / "last.ckpt", {"hyper_parameters": {"config": dataclasses.asdict(model.config)}}
    content["state_dict"] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(content, path)
    export(str(path), str(tmp_path / "named"), tokenizer=str(words.parent))
    assert _end(tmp_path / "named") == "</s>"
    with pytest.warns(UserWarning, match=r"no tokenizer next to .*last\.ckpt"):
        export(str(path), str(tmp_path / "none"))
    assert not (tmp_path / "none" / "tokenizer.json").exists()
    (tmp_path / "bad.json").write_text("{}")
    for wrong, error in (("nothing", FileNotFoundError), ("bad.json", ValueError)):
        with pytest.raises(error, match=wrong):
            export(str(path), str(tmp_path / "wrong"), tokenizer=str(tmp_path / wrong))


def test_a_special_token_s_name_in_a_text_is_text_to_an_exported_tokenizer_too(tmp_path, make_model):
    own = own_tokenizers.train_tokenizer(["a cat and a dog <| end of text |>"] * 20, 300)
    model = make_model("diff-debug", vocab_size=300)
    language.save(model, tmp_path / "ours", own)
    export(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "again")
    text = f"a cat{own.eos} and a dog"
    ids, short = own.encode(text), own.encode("a cat")
    assert own.eos_id not in ids
    for folder in (tmp_path / "theirs", tmp_path / "again"):
        assert own_tokenizers.load_tokenizer(folder).encode(text) == ids
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer(text).input_ids == tokenizer.encode(text) == ids
        padding = [own.eos_id] * (len(ids) - len(short))
        assert tokenizer([text, "a cat"], padding=True).input_ids == [ids, padding + short]
        assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.decode([*padding, *short, own.eos_id], skip_special_tokens=True) == "a cat"
        assert tokenizer.decode([*short, own.eos_id]) == f"a cat{own.eos}"
        ended = transformers.AutoTokenizer.from_pretrained(folder, add_eos_token=True)  # by its post-processor
        assert ended(text).input_ids == [*ids, own.eos_id]
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        chat = {"conversation": [{"role": "user", "content": "a cat"}], "return_dict": False}
        whole = tokenizer.apply_chat_template(**chat, tokenizer_kwargs={"split_special_tokens": False})
        assert whole == [*short, own.eos_id]
    host = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")

    def end_it(tokens, scores):
        return scores.index_fill(1, torch.tensor([own.eos_id]), float("inf") if tokens.shape[1] > len(short) else -10)

    made = host.generate(torch.tensor([short]), max_new_tokens=9, do_sample=False, logits_processor=[end_it])
    assert (made.shape[1], made[0, -1]) == (len(short) + 2, own.eos_id)


@pytest.mark.parametrize(
    ("template", "ends"),
    [("chatml", ["<|endoftext|>", "<|im_end|>"]), ("question", ["<|endoftext|>"]), (None, ["<|endoftext|>"])],
)
def test_a_turn_s_end_ends_a_generation(template, ends, tmp_path, make_model):
    """Of a base model's tokenizer, whose end of a document is another token than the one that ends an answer."""
    names = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    language.save(make_model("diffv2-debug"), tmp_path / "ours", _words(tmp_path / "ours" / "tokenizer.json", *names))
    if template is not None:
        (tmp_path / "ours" / "chat_template.jinja").write_text(TEMPLATES[template])
    export(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    ids = [2 + names.index(name) for name in ends]
    host = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert host.model.embed_tokens.padding_idx is None  # by which the end token's row would get no gradient
    assert host.generation_config.eos_token_id == host.config.eos_token_id == (ids if len(ids) > 1 else ids[0])
    for spec in (tmp_path / "ours", tmp_path / "theirs", f"hf:{tmp_path / 'theirs'}"):
        assert set(open_model(spec).ends) == set(ids)


def test_no_other_module_imports_it_at_once():
    """transformers is an extra: without it everything else must work."""
    theirs = "diffvision.models.language.hugging_face"
    eager = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{name}" for name in names)]
            if any(name.split(".")[0] == "transformers" or name == theirs for name in names):
                eager.add(path.relative_to(PACKAGE).as_posix())
    language = ("modeling_diffllama_v2", "hugging_face")
    ours = ("timm_llava", "transformers_names", "vision_language")
    files = (*ours, *(f"language/{name}" for name in language))
    assert eager == {f"models/{name}.py" for name in files}
