"""Greedy answers: what ends them, the same one by one and in a batch, and files that a run resumes from."""

import dataclasses
import json

import pytest
import torch

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.evaluation.language import generations
from diffvision.evaluation.language.generations import Prompt, generate_rows, room_for, stop_at
from diffvision.models import language
from diffvision.opening import Model

NEW = 12


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["abcdefghij klm nop qrs tuv wxyz"], 260)
    module = language.create("diff-debug", vocab_size=tokenizer.vocab_size, max_length=64).eval()
    torch.nn.init.normal_(module.embed.weight, std=1.0)
    return Model("small", "language", module, tokenizer=tokenizer, max_length=64)


@pytest.fixture(scope="module")
def llama(model):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=model.tokenizer.vocab_size, max_position_embeddings=64, initializer_range=1.0, **sizes
    )
    module = transformers.LlamaForCausalLM(config).eval()
    module.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0, eos_token_id=[0, 1])
    return Model("llama", "transformers", module, tokenizer=model.tokenizer, max_length=64)


def prompts_of(model, *texts):
    return [Prompt(f"row {number}", model.tokenizer.encode(text)) for number, text in enumerate(texts)]


def greedy(model, tokens, count):
    """One forward pass a token, without a cache."""
    new = []
    for _ in range(count):
        out = model.module(torch.tensor([[*tokens, *new]]))
        new.append(int(getattr(out, "logits", out)[0, -1, : model.tokenizer.vocab_size].argmax()))
        if new[-1] in (0, 1):
            return new[:-1]
    return new


@pytest.mark.parametrize("host", ["model", "llama"])
def test_outputs_are_the_likeliest_tokens_up_to_what_ends_them(host, request):
    model = request.getfixturevalue(host)
    prompts = prompts_of(model, "abc def", "klm", "wxyz qrs tuv")
    with torch.no_grad():
        texts = [model.tokenizer.decode(greedy(model, prompt.tokens, NEW)) for prompt in prompts]
    rows = generate_rows(model, prompts, max_new_tokens=NEW, batch_size=2)
    assert [row.output for row in rows] == texts
    assert [row.id for row in rows] == ["row 0", "row 1", "row 2"]
    assert {row.stopped_by for row in rows} <= {"length", "end"}
    stop = next(text[4:6] for text in texts if len(text) > 8)  # of one row at least
    stopped = generate_rows(model, prompts, max_new_tokens=NEW, stops=("never", stop), batch_size=3)
    for row, text, free in zip(stopped, texts, rows, strict=True):
        assert row.output == text.partition(stop)[0]
        assert row.stopped_by == ("stop" if stop in text else free.stopped_by)
        assert (row.tokens < free.tokens) if stop in text[:-4] else (row.tokens <= free.tokens)
    assert model.module.generation_config.temperature == 5 if host == "llama" else True


def test_a_run_that_was_ended_generates_what_is_missing(model, tmp_path, monkeypatch):
    file, prompts = tmp_path / "new" / "a.jsonl", prompts_of(model, "abc", "def", "klm", "wxyz")
    settings = {"max_new_tokens": 4, "batch_size": 1, "file": file, "settings": "v1"}
    whole = generate_rows(model, prompts, **settings)
    lines = file.read_text().splitlines(keepends=True)
    assert [json.loads(line)["id"] for line in lines] == ["row 3", "row 0", "row 1", "row 2"]
    file.write_text("".join(lines[:2]) + lines[2][:30])  # killed while it wrote the third
    calls = []
    real = generations.continued
    monkeypatch.setattr(
        generations, "continued", lambda model, rows, **given: calls.append(rows) or real(model, rows, **given)
    )
    assert generate_rows(model, prompts, **settings) == whole
    assert calls == [[prompts[1].tokens], [prompts[2].tokens]]
    assert sorted(file.read_text().splitlines(keepends=True)) == sorted(lines)
    assert generate_rows(model, prompts[1:3], **settings) == whole[1:3]
    assert len(calls) == 2


def test_files_of_something_else_are_refused(model, tmp_path):
    file, prompts = tmp_path / "a.jsonl", prompts_of(model, "abc", "def")
    settings = {"max_new_tokens": 2, "file": file}
    generate_rows(model, prompts, **settings, settings="one")
    with pytest.raises(ValueError, match=r"line 1 of .*a\.jsonl is of another"):
        generate_rows(model, prompts, **settings, settings="other")
    other = [dataclasses.replace(prompts[0], tokens=prompts[1].tokens)]
    with pytest.raises(ValueError, match=r"row 'row 0' of .*a\.jsonl is"):
        generate_rows(model, other, **settings, settings="one")
    with pytest.raises(ValueError, match="two rows have the id 'row 1'"):
        generate_rows(model, [*prompts, prompts[1]], max_new_tokens=2)
    file.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(ValueError, match=r"line 1 of .*a\.jsonl is no row"):
        generate_rows(model, prompts, **settings)
    file.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 of .*a\.jsonl is no row"):
        generate_rows(model, prompts, **settings)
    assert room_for(model, 24) == 40
    with pytest.raises(ValueError, match="new_tokens is 64, and small reads"):
        room_for(model, 64)


def test_the_first_stop_string_counts():
    assert stop_at("one\nQ: two #D", ("#D", "Q:")) == 4
    assert stop_at("one", ("Q:",)) is None
