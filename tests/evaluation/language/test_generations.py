"""Greedy answers: what ends them, the same one by one and in a batch."""

import pytest
import torch
from language_fixtures import make_llama

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.evaluation.language.generations import continue_greedily, max_prompt_tokens, stop_at
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
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    module = make_llama("Llama", vocab_size=model.tokenizer.vocab_size, initializer_range=1.0, **sizes)
    module.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0, eos_token_id=[0, 1])
    return Model("llama", "transformers", module, tokenizer=model.tokenizer, max_length=64)


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
    decode = model.tokenizer.decode
    prompts = [model.tokenizer.encode(text) for text in ("abc def", "klm", "wxyz qrs tuv")]
    with torch.no_grad():
        texts = [decode(greedy(model, prompt, NEW)) for prompt in prompts]
    rows = continue_greedily(model, prompts, max_new_tokens=NEW)
    assert [decode(row) for row in rows] == texts
    assert continue_greedily(model, prompts[1:2], max_new_tokens=NEW) == rows[1:2]
    stop = next(text[4:6] for text in texts if len(text) > 8)  # of one row at least
    stopped = continue_greedily(model, prompts, max_new_tokens=NEW, stops=("never", stop))
    for row, text, free in zip(stopped, texts, rows, strict=True):
        assert decode(row)[: stop_at(decode(row), (stop,))] == text.partition(stop)[0]
        assert (len(row) < len(free)) if stop in text[:-4] else (len(row) <= len(free))
    assert model.module.generation_config.temperature == 5 if host == "llama" else True


def test_room_for_new_tokens_and_the_first_stop(model):
    assert max_prompt_tokens(model, 24) == 40
    assert stop_at("one\nQ: two #D", ("#D", "Q:")) == 4
    assert stop_at("one", ("Q:",)) is None
