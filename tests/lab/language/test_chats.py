"""How models are asked: by plain text, or by a chat template, with our tokenizers and transformers'."""

import pytest
import torch

from diffvision.data.text.chat import CHAT_TEMPLATE
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.lab.faithfulness.judges import InProcess
from diffvision.lab.language.chats import asking, chat_of, has_template, template_text
from diffvision.models import language
from diffvision.opening import open_model

TEMPLATE = (
    "{% for m in messages %}{{ '->' if m.role == 'assistant' else '<|' + m.role + '|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}->{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE


@pytest.fixture
def folder(tmp_path):
    """A saved language model, whose tokenizer has a chat template."""
    tokenizer = train_tokenizer(["<|user|> Who is it? -> It is Ann."], 300)
    torch.manual_seed(0)
    module = language.create("diff-debug", vocab_size=tokenizer.vocab_size, max_length=128)
    language.save(module, tmp_path / "model", tokenizer)
    (tmp_path / "model" / CHAT_TEMPLATE).write_text(TEMPLATE)
    return tmp_path / "model"


def test_a_prompt_is_plain_text_or_a_message(folder, tmp_path):
    model = open_model(folder)
    decoded = {chat: model.tokenizer.decode(asking(model, chat)("Who?")) for chat in (None, "tokenizer", "question")}
    assert decoded[None].endswith("Who?")
    assert decoded["tokenizer"] == "<|user|>Who?->"
    assert decoded["question"] == "Question: Who?\nAnswer:"
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert model.tokenizer.decode(asking(model, str(tmp_path / "mine.jinja"))("Who?")) == "[Who?]"


def test_transformers_tokenizers_have_the_same_chats(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    config = transformers.LlamaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                      intermediate_size=16)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    fast.save_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match="the tokenizer of hf has no chat"):
        chat_of(open_model(f"hf:{tmp_path / 'hf'}"), "tokenizer")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "hf")
    ours, theirs = open_model(folder), open_model(f"hf:{tmp_path / 'hf'}")
    for chat in ("tokenizer", "question"):
        assert asking(theirs, chat)("Who?") == asking(ours, chat)("Who?")
    with pytest.raises(ValueError, match="no chat template 'none'"):
        chat_of(theirs, "none")


def test_a_template_that_fails_says_so(folder):
    (folder / CHAT_TEMPLATE).unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        chat_of(open_model(folder), "tokenizer")
    (folder / CHAT_TEMPLATE).write_text(NO_SYSTEM)
    written = chat_of(open_model(folder), "tokenizer")
    with pytest.raises(ValueError, match="chat tokenizer cannot ask"):
        written([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])


@pytest.mark.parametrize(("template", "roles"), [(TEMPLATE, "<|system|>"), (NO_SYSTEM, "<|user|>"), (None, "")])
def test_a_judge_is_asked_in_its_own_form(folder, template, roles):
    (folder / CHAT_TEMPLATE).unlink()
    if template is not None:
        (folder / CHAT_TEMPLATE).write_text(template)
    model = open_model(folder)
    text = model.tokenizer.decode(InProcess(model, 8)._tokens("Is it Ann?"))
    assert text.startswith(roles)
    assert text.endswith("Is it Ann?->" if roles else "Is it Ann?")


def test_the_template_is_that_of_the_tokenizer_that_is_used(folder, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    monkeypatch.chdir(folder)  # which has another template
    model = open_model(folder, tokenizer=str(tmp_path / "other"))
    assert not has_template(model)
    (tmp_path / "other" / CHAT_TEMPLATE).write_text("?{{ messages[0].content }}")
    assert model.tokenizer.decode(asking(model, "tokenizer")("Who?")) == "?Who?"
    assert template_text(model, "tokenizer") == "?{{ messages[0].content }}"
    assert template_text(model, None) is None


def test_a_template_that_trains_nothing_can_ask(folder):
    """One whose prompt for an answer is not what stands before an answer, as where thoughts are left out."""
    (folder / CHAT_TEMPLATE).write_text("{{ messages[-1].content }}{% if add_generation_prompt %}<think>{% endif %}")
    model = open_model(folder)
    assert model.tokenizer.decode(asking(model, "tokenizer")("Who?")) == "Who?<think>"
