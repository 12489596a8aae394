"""V2 as a Llama: transformers' kernels, caches and modes of generation, without a line of ours in the loop."""

import json

import pytest
import torch
import transformers
from language_fixtures import small_model
from transformers import AutoModelForCausalLM

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.export.export_commands import export
from diffvision.models import language
from diffvision.models.language.generation import generate
from diffvision.models.language.hugging_face import as_transformers
from diffvision.models.language.modeling_diffllama_v2 import DiffLlamaV2ForCausalLM
from diffvision.opening import open_model


@pytest.fixture(scope="module")
def ours():
    return small_model("diffv2-debug", tied=False)


@pytest.fixture
def theirs(ours):
    return as_transformers(ours)


@pytest.mark.quick("eager", "sdpa")
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention"])
def test_every_kernel_gives_our_logits(kernel, ours, theirs):
    assert isinstance(theirs, DiffLlamaV2ForCausalLM)
    theirs.set_attn_implementation(kernel)
    tokens = torch.randint(97, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)


MODES = {
    # transformers 5.12 fails without an end token; this one is outside the vocabulary.
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "eos_token_id": 97},
    "early exit": {"assistant_early_exit": 1},
    "chunked prefill": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_generation_gives_our_tokens(mode, ours, theirs):
    tokens = torch.randint(97, (1 if mode in ("prompt lookup", "early exit") else 3, 12))
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **MODES[mode]}
    out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    assert out[:, 12:].tolist() == generate(ours, tokens, max_new_tokens=16)


def test_a_row_of_several_documents_is_each_of_them(ours, theirs):
    """Positions that begin anew are another document: what packed training and varlen kernels pass."""
    first, second = torch.randint(97, (1, 9)), torch.randint(97, (1, 14))
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    with torch.no_grad():
        packed = theirs(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([ours(first), ours(second)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_gradients_reach_every_weight(theirs):
    theirs.train()
    theirs.gradient_checkpointing_enable()
    tokens = torch.randint(97, (2, 20))
    theirs(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in theirs.parameters())


def test_half_precision_and_the_chat_template_come_along(tmp_path):
    train_tokenizer(["ab ab cd"], 300).save(tmp_path / "tokenizer.json")
    template = "{% for m in messages %}<|endoftext|>{{ m.content }}{% endfor %}"
    settings = {"eos_token": "<|endoftext|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = small_model("diffv2-debug", vocab_size=300).bfloat16()
    language.save(model, tmp_path / "ours", tmp_path / "tokenizer.json")
    export(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").dtype == torch.bfloat16
    assert open_model(tmp_path / "theirs").module.embed.weight.dtype == torch.bfloat16
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=True, return_dict=False)
    assert ids == [0, *tokenizer("ab")["input_ids"]]
