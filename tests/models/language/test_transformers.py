"""The language models as Hugging Face ones: logits, cache, padding, generation, files, and what is refused."""

import ast
import dataclasses
import itertools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

from diffvision.data.text import tokenizers as own_tokenizers  # noqa: E402
from diffvision.models import language  # noqa: E402
from diffvision.models.language.generation import generate  # noqa: E402
from diffvision.models.language.transformers import DiffTransformerConfig, DiffTransformerForCausalLM, export  # noqa: E402

PACKAGE = Path(language.__file__).parents[2]
NAMES = ["transformer-debug", "diff-debug", "diffv2-debug"]
CLOSE = {"rtol": 0, "atol": 1e-5}
AUTO_CLASSES = {
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
}


def _padded(rows):
    longest = max(map(len, rows))
    tokens = torch.tensor([[5] * (longest - len(row)) + row for row in rows])
    return tokens, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


@torch.no_grad()
def test_logits_and_cache_equal_the_models(model):
    host, tokens = DiffTransformerForCausalLM.from_diffvision(model), torch.randint(97, (2, 20))
    expected = model(tokens)
    assert torch.equal(host(tokens, use_cache=False).logits, expected)
    assert torch.equal(host.to_diffvision()(tokens), expected)
    assert all(part is other for part, other in zip(host.to_diffvision().parameters(), model.parameters(), strict=True))
    assert torch.equal(host(tokens, logits_to_keep=3).logits, expected[:, -3:])
    assert torch.equal(host(tokens, logits_to_keep=torch.tensor([1, 7])).logits, expected[:, [1, 7]])
    first = host(tokens[:, :11], use_cache=True)
    second = host(tokens[:, 11:19], past_key_values=first.past_key_values, use_cache=True)
    last = host(tokens[:, 19:], past_key_values=second.past_key_values, return_dict=False)
    torch.testing.assert_close(torch.cat([first.logits, second.logits, last[0]], 1), expected, **CLOSE)


@torch.no_grad()
def test_padding_changes_nothing(model):
    host = DiffTransformerForCausalLM.from_diffvision(model)
    rows = [torch.randint(97, (length,)).tolist() for length in (12, 5)]
    tokens, mask = _padded(rows)
    out = host(tokens, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(out.logits[1:, 7:], model(torch.tensor(rows[1:])), **CLOSE)
    following = torch.randint(97, (2, 1))
    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    places = longer.cumsum(1)[:, -1:] - 1
    step = host(following, attention_mask=longer, past_key_values=out.past_key_values, position_ids=places)
    alone = model(torch.tensor([[*rows[1], int(following[1])]]))
    torch.testing.assert_close(step.logits[1:], alone[:, -1:], **CLOSE)
    right = host(tokens.flip(1), attention_mask=mask.flip(1)).logits
    torch.testing.assert_close(right[1:, :5], model(torch.tensor([rows[1][::-1]])), **CLOSE)


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_generation_equals_ours(model, use_cache):
    host = DiffTransformerForCausalLM.from_diffvision(model, pad_token_id=0)
    rows = [torch.randint(97, (length,)).tolist() for length in (9, 4, 1)]
    tokens, mask = _padded(rows)
    settings = {"max_new_tokens": 10, "do_sample": False, "use_cache": use_cache}
    made = host.generate(tokens, attention_mask=mask, **settings)[:, tokens.shape[1] :].tolist()
    assert made == generate(model, rows, max_new_tokens=10)
    assert len({tuple(row) for row in made}) == 3


def test_early_exit_drafts_the_same_tokens_and_leaves_the_depth(model, tmp_path):
    host, tokens = DiffTransformerForCausalLM.from_diffvision(model, pad_token_id=0), torch.randint(97, (1, 6))
    settings = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 20, "do_sample": False}
    expected, depth = host.generate(tokens, **settings), model.config.depth
    for layers in range(1, depth + 1):
        assert torch.equal(host.generate(tokens, assistant_early_exit=layers, **settings), expected)
    hook = host.model.norm.register_forward_hook(lambda *_: 1 / (host.config.num_hidden_layers - 1))
    with pytest.raises(ZeroDivisionError):
        host.generate(tokens, assistant_early_exit=1, **settings)
    hook.remove()
    assert host.config.num_hidden_layers == depth
    host.save_pretrained(tmp_path)
    assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, host(tokens).logits)


def test_continuous_batching_is_refused_before_it_generates(model):
    host = DiffTransformerForCausalLM.from_diffvision(model, pad_token_id=0)
    with pytest.raises(NotImplementedError, match=r"generate\(\) in place"):
        host.generate_batch([[1, 2, 3], [4, 5]], transformers.GenerationConfig(max_new_tokens=3, eos_token_id=-1))


@pytest.mark.parametrize("cache", [{"use_cache": False}, {}, {"cache_implementation": "static"}])
def test_generation_under_autocast(model, cache):
    host, tokens = DiffTransformerForCausalLM.from_diffvision(model, pad_token_id=0), torch.randint(97, (2, 6))
    with torch.autocast("cpu", torch.bfloat16):
        made = host.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False, **cache)
    assert made.shape == (2, 9)


def test_a_registered_attention_function_is_refused_before_it_is_left_out(model, tmp_path):
    transformers.AttentionInterface.register("mine", transformers.AttentionInterface()["sdpa"])
    DiffTransformerForCausalLM.from_diffvision(model).save_pretrained(tmp_path)
    for name in ("mine", "flex_attention"):
        with pytest.raises(ValueError, match=f"attn_implementation '{name}'"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)


def test_beams_follow_their_cache(model):
    host, tokens = DiffTransformerForCausalLM.from_diffvision(model, pad_token_id=0), torch.randint(97, (2, 6))
    made = [
        host.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, num_beams=3, use_cache=use)
        for use in (True, False)
    ]
    assert torch.equal(*made)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_through_files_and_auto_classes(name, tied, tmp_path, make_model):
    model = make_model(name, tied=tied).to(torch.bfloat16)
    DiffTransformerForCausalLM.from_diffvision(model, eos_token_id=3).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(config) is DiffTransformerConfig
    assert type(again) is DiffTransformerForCausalLM
    assert config.to_diffvision() == again.to_diffvision().config == model.config
    assert (config.eos_token_id, config.max_position_embeddings, config.tie_word_embeddings) == (3, 256, tied)
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) is tied
    assert {key: value.dtype for key, value in again.to_diffvision().state_dict().items()} == {
        key: value.dtype for key, value in model.state_dict().items()
    }
    tokens = torch.randint(97, (1, 9))
    assert torch.equal(again(tokens).logits, model(tokens))


def test_weights_load_by_the_names_in_files(make_model, tmp_path):
    """As transformers' Trainer loads them, which resumes without `from_pretrained` and only logs what is missing."""
    host, other = (DiffTransformerForCausalLM.from_diffvision(make_model("diff-debug", tied=False)) for _ in range(2))
    host.save_pretrained(tmp_path)
    for state in (load_file(tmp_path / "model.safetensors"), host.state_dict()):
        assert "<All keys matched successfully>" in str(other.load_state_dict(state, strict=True))
        assert torch.equal(other.lm_head.weight, host.lm_head.weight)


def test_a_variant_that_no_cache_serves_generates_by_whole_sequences():
    config = DiffTransformerConfig.from_diffvision(language.config("diff-debug", variant="v1_dint", vocab_size=97))
    host, tokens = DiffTransformerForCausalLM(config).eval(), torch.randint(97, (1, 6))
    assert not config.use_cache
    generated, whole = host.generate(tokens, max_new_tokens=3, do_sample=False), tokens
    for _ in range(3):
        whole = torch.cat([whole, host(whole).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, whole)
    with pytest.raises(ValueError, match="variant 'v1_dint' cannot use a cache"):
        host(tokens, use_cache=True)


def test_new_weights_are_the_models_own_draw():
    config = DiffTransformerConfig.from_diffvision(language.config("diff-debug"))
    torch.manual_seed(1)
    host = transformers.AutoModelForCausalLM.from_config(config)
    torch.manual_seed(1)
    expected = language.create("diff-debug").state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in host.to_diffvision().state_dict().items())


def test_loss_is_that_of_the_next_token_and_trains(model):
    host, tokens = DiffTransformerForCausalLM.from_diffvision(model).train(), torch.randint(97, (2, 12))
    labels = tokens.clone()
    labels[:, :4] = -100
    out = host(tokens, labels=labels)
    expected = F.cross_entropy(model(tokens)[:, 3:-1].flatten(0, 1), tokens[:, 4:].flatten())
    torch.testing.assert_close(out.loss, expected, **CLOSE)
    assert out.past_key_values is None
    host.gradient_checkpointing_enable()
    host(tokens, labels=labels).loss.backward()
    recomputed = [parameter.grad.clone() for parameter in model.parameters()]
    host.zero_grad()
    host.gradient_checkpointing_disable()
    out.loss.backward()
    for parameter, grad in zip(model.parameters(), recomputed, strict=True):
        torch.testing.assert_close(parameter.grad, grad, **CLOSE)


def test_export_writes_model_and_tokenizer(tmp_path, make_model):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "words.json"))
    model = make_model("diff-debug")
    language.save(model, tmp_path / "ours", tmp_path / "words.json")
    export(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    host = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    batch = tokenizer(["a b b", "b"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    made = host.generate(**batch, max_new_tokens=5, do_sample=False)[:, 3:].tolist()
    for row, expected in zip(made, generate(model, [[0, 1, 1], [1]], max_new_tokens=5, stop=[2]), strict=True):
        assert row[: len(expected)] == expected
    namespace = runpy.run_path(str(tmp_path / "theirs" / "modeling_diffvision.py"))  # what trust_remote_code runs
    named = {auto: namespace[name.removeprefix("modeling_diffvision.")] for auto, name in host.config.auto_map.items()}
    assert named.keys() == AUTO_CLASSES
    assert (named["AutoConfig"], named["AutoModelForCausalLM"]) == (DiffTransformerConfig, DiffTransformerForCausalLM)
    with pytest.raises(ValueError, match="no token '</s>'"):
        export(str(tmp_path / "ours"), str(tmp_path / "other"), eos="</s>")


@pytest.mark.filterwarnings("ignore:no tokenizer next to")
@pytest.mark.parametrize("settings", [{"head_norm": True}], ids=str)
def test_v2_that_is_no_llama_is_exported_with_our_classes(settings, tmp_path, make_model):
    model, tokens = make_model("diffv2-debug", **settings), torch.randint(97, (2, 9))
    language.save(model, tmp_path / "ours")
    export(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    host = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert type(host) is DiffTransformerForCausalLM
    torch.testing.assert_close(host(tokens).logits, model(tokens), **CLOSE)


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


def _words(path, *ends):
    """A tokenizer.json of two words and ends of a document."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {name: index for index, name in enumerate(["a", "b", *ends])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
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
        export(str(folder), str(folder / "theirs"))


def test_export_of_a_training_run_has_its_tokenizer(tmp_path, make_model):
    model, words = make_model("diff-debug"), _words(tmp_path / "words" / "tokenizer.json", "</s>")
    path, content = tmp_path / "last.ckpt", {"hyper_parameters": {"config": dataclasses.asdict(model.config)}}
    content["state_dict"] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({**content, "diffvision": {"model": "diff-debug", "tokenizer": str(words.parent)}}, path)
    export(str(path), str(tmp_path / "recorded"))
    assert _end(tmp_path / "recorded") == "</s>"
    torch.save(content, path)
    export(str(path), str(tmp_path / "named"), str(words.parent))
    assert _end(tmp_path / "named") == "</s>"
    with pytest.warns(UserWarning, match=r"no tokenizer next to .*last\.ckpt"):
        export(str(path), str(tmp_path / "none"))
    assert not (tmp_path / "none" / "tokenizer.json").exists()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*nothing"):
        export(str(path), str(tmp_path / "none"), str(tmp_path / "nothing"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad.json is not a file of"):
        export(str(path), str(tmp_path / "none"), str(tmp_path / "bad.json"))


OPENED_AND_SAVED = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__ == "diffvision.models.language.transformers", type(model)
assert type(model.config).__module__ == "diffvision.models.language.transformers_decoder", type(model.config)
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_a_folder_that_was_opened_and_saved_again_opens_in_a_new_process(tmp_path, make_model):
    """Whichever way it was opened; nothing is copied but the line that imports this package."""
    folders = [tmp_path / str(number) for number in range(4)]
    DiffTransformerForCausalLM.from_diffvision(make_model("diff-debug")).save_pretrained(folders[0])
    DiffTransformerForCausalLM.from_pretrained(folders[0]).save_pretrained(folders[1])
    env = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    for source, target in itertools.pairwise(folders[1:]):
        command = [sys.executable, "-c", OPENED_AND_SAVED, str(source), str(target)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
    for folder in folders:
        assert [path.name for path in folder.glob("*.py")] == ["modeling_diffvision.py"]
        assert len((folder / "modeling_diffvision.py").read_text().splitlines()) == 1
    auto_map = transformers.AutoConfig.from_pretrained(folders[0]).auto_map
    assert auto_map.keys() == AUTO_CLASSES
    assert auto_map["AutoModelForCausalLM"] == "modeling_diffvision.DiffTransformerForCausalLM"


def test_weights_of_another_variant_are_refused(tmp_path, make_model):
    host = DiffTransformerForCausalLM.from_diffvision(make_model("diff-debug", head_norm=False))
    host.config.head_norm = True
    host.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="missing:"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="missing:"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_a_file_without_the_output_projection_is_refused(tmp_path, make_model):
    """But a folder of the decoder alone never had one: it is new, and transformers warns."""
    host = DiffTransformerForCausalLM.from_diffvision(make_model("diff-debug"))
    host.save_pretrained(tmp_path / "whole")
    state = load_file(tmp_path / "whole" / "model.safetensors")
    del state["model.head.weight"]
    save_file(state, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: lm_head.weight \(1\)"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    host.model.save_pretrained(tmp_path / "decoder")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "decoder", output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    assert torch.equal(again.model.embed.weight, host.model.embed.weight)


def test_bad_input_is_refused(make_model):
    host, tokens = DiffTransformerForCausalLM.from_diffvision(make_model("diff-debug")), torch.randint(97, (1, 4))
    with pytest.raises(ValueError, match=r"must be \[1, 4\]"):
        host(tokens, attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="may hold 0 and -inf only"):
        host(tokens, attention_mask=torch.rand(1, 1, 4, 4))
    with pytest.raises(ValueError, match="input_ids or inputs_embeds, and not"):
        host()
    with pytest.raises(ValueError, match="flash_attention_2"):
        host.set_attn_implementation("flash_attention_2")
    with pytest.raises(ValueError, match="make 257, over the model's"):
        host.generate(tokens, max_new_tokens=253, pad_token_id=0)
    with pytest.raises(ValueError, match="max_length of 256"):
        host(torch.zeros(1, 257, dtype=torch.long))
    with pytest.raises(ValueError, match="labels with logits_to_keep"):
        host(tokens, labels=tokens, logits_to_keep=1)
    with pytest.raises(ValueError, match="head_dim is 15"):
        DiffTransformerConfig(head_dim=15)


def test_no_other_module_imports_it_at_once():
    """transformers is an extra: without it everything else must work."""
    theirs = "diffvision.models.language.transformers"
    eager = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{name}" for name in names)]
            if any(name.split(".")[0] == "transformers" or name == theirs for name in names):
                eager.add(path.relative_to(PACKAGE).as_posix())
    language = ("modeling_diffllama_v2", "transformers", "transformers_decoder")
    ours = ("convert/llava", "transformers_names", *(f"vision_language{end}" for end in ("", "_parts", "_processor")))
    files = ("hugging_face", *ours, *(f"language/{name}" for name in language))
    assert eager == {f"models/{name}.py" for name in files}
