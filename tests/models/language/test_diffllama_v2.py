"""V2 as a Llama: transformers' kernels, caches and modes of generation, without a line of ours in the loop."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.models import language
from diffvision.models.language import LanguageConfig, LanguageModel
from diffvision.models.language.generation import generate
from diffvision.models.language.hugging_face import export
from diffvision.models.language.modeling_diffllama_v2 import DiffLlamaV2Config, DiffLlamaV2ForCausalLM
from diffvision.opening import open_model

SHAPE = {"vocab_size": 97, "dim": 48, "depth": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "mlp_dim": 80}


@pytest.fixture(scope="module")
def ours():
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(**SHAPE, variant="v2", max_length=128, rotary_theta=5000.0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.15)
    return model.eval()


@pytest.fixture(scope="module")
def folder(ours, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("v2")
    language.save(ours, scratch / "ours")
    with pytest.warns(UserWarning, match="no tokenizer next to"):
        export(str(scratch / "ours"), str(scratch / "theirs"))
    return scratch / "theirs"


@pytest.fixture
def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.quick("eager", "sdpa")
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention"])
def test_every_kernel_gives_our_logits(kernel, ours, theirs):
    assert isinstance(theirs, DiffLlamaV2ForCausalLM)
    theirs.set_attn_implementation(kernel)
    tokens = torch.randint(97, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)


MODES = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
    "no cache": {"use_cache": False},
    # transformers 5.12 fails without an end token; this one is outside the vocabulary.
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "eos_token_id": 97},
    "early exit": {"assistant_early_exit": 1},
    "chunked prefill": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_generation_gives_our_tokens(mode, ours, theirs):
    tokens = torch.randint(97, (1 if mode in ("prompt lookup", "early exit") else 3, 12))
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **MODES[mode]}
    if mode == "offloaded" and not torch.cuda.is_available():
        pytest.skip("offloading needs an accelerator")
    out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    assert out[:, 12:].tolist() == generate(ours, tokens, max_new_tokens=16)


def test_padded_rows_give_the_tokens_of_each_alone(ours, theirs):
    short, long = torch.randint(97, (1, 7)), torch.randint(97, (1, 12))
    both = torch.cat([torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(both)
    mask[0, :5] = 0
    out = theirs.generate(
        both, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert out[:, 12:].tolist() == [generate(ours, row, max_new_tokens=10)[0] for row in (short, long)]


def test_a_row_of_several_documents_is_each_of_them(ours, theirs):
    """Positions that begin anew are another document: what packed training and varlen kernels pass."""
    first, second = torch.randint(97, (1, 9)), torch.randint(97, (1, 14))
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    with torch.no_grad():
        packed = theirs(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([ours(first), ours(second)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_a_cache_holds_what_the_matched_llama_s_holds(theirs):
    cache = theirs(torch.randint(97, (1, 10))).past_key_values
    assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (1, 2, 10, 12)


def test_older_static_caches_get_the_positions_to_write_at(theirs):
    """Before 5.3 transformers' static caches wrote at 0 without them."""
    given = []

    class Noting(transformers.DynamicCache):
        def update(self, keys, values, layer, cache_kwargs):
            given.append(cache_kwargs["cache_position"].tolist())
            return super().update(keys, values, layer)

    cache = Noting()
    theirs(torch.randint(97, (1, 10)), past_key_values=cache, cache_position=torch.arange(10))
    theirs(torch.randint(97, (1, 1)), past_key_values=cache, cache_position=torch.tensor([10]))
    assert given == [list(range(10))] * 2 + [[10]] * 2


def test_all_that_is_split_over_devices_has_a_plan(theirs):
    plan = theirs.config.base_model_tp_plan
    linear = {
        name.removeprefix("model.").replace(".0.", ".*.").replace(".1.", ".*.")
        for name, module in theirs.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("model.")
    }
    assert linear == plan.keys() - {"embed_tokens"}  # which transformers 5.17 adds


def test_gradients_reach_every_weight(theirs):
    theirs.train()
    theirs.gradient_checkpointing_enable()
    tokens = torch.randint(97, (2, 20))
    theirs(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in theirs.parameters())


@pytest.mark.slow
def test_a_program_without_diffvision_loads_the_folder(folder):
    assert json.loads((folder / "config.json").read_text())["model_type"] == "diffllama_v2"
    program = f"""import sys
sys.modules["diffvision"] = None  # cannot be imported
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
print(type(model).__name__, model(torch.arange(5)[None]).logits.shape)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "DiffLlamaV2ForCausalLM torch.Size([1, 5, 97])"


def test_the_folder_names_the_class_of_the_decoder(folder):
    """vLLM and SGLang make it by AutoModel, whose class the folder must name."""
    assert json.loads((folder / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "modeling_diffllama_v2.DiffLlamaV2Config",
        "AutoModel": "modeling_diffllama_v2.DiffLlamaV2Model",
        "AutoModelForCausalLM": "modeling_diffllama_v2.DiffLlamaV2ForCausalLM",
    }
    decoder = transformers.AutoModel.from_pretrained(folder)
    assert type(decoder).__name__ == "DiffLlamaV2Model"


def test_an_exported_folder_opens_as_ours_again(folder, ours):
    model = open_model(folder)
    assert (model.host, model.module.config) == ("language", ours.config)
    for name, weight in ours.state_dict().items():
        assert torch.equal(model.module.state_dict()[name], weight), name


def test_half_precision_stays(ours, tmp_path):
    language.save(LanguageModel(ours.config).bfloat16(), tmp_path / "half")
    with pytest.warns(UserWarning, match="no tokenizer next to"):
        export(str(tmp_path / "half"), str(tmp_path / "theirs"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").dtype == torch.bfloat16
    assert open_model(tmp_path / "theirs").module.embed.weight.dtype == torch.bfloat16


def test_heads_that_would_not_share_a_key_are_refused():
    with pytest.raises(ValueError, match="num_attention_heads is 6"):
        DiffLlamaV2Config(num_attention_heads=6, num_key_value_heads=2, hidden_size=48)


@pytest.mark.parametrize("sizes", [{}, {"num_attention_heads": 64, "num_key_value_heads": 16}])
def test_its_defaults_are_valid_and_what_is_written_is_read_again(sizes):
    """transformers 5.17 makes the default configuration to write another one."""
    config = DiffLlamaV2Config(**sizes)
    again = DiffLlamaV2Config(**json.loads(config.to_json_string()))
    assert (again.num_attention_heads, again.num_key_value_heads) == (config.num_attention_heads, 16)


def test_a_chat_template_comes_along(ours, tmp_path):
    train_tokenizer(["ab ab cd"], 300).save(tmp_path / "tokenizer.json")
    template = "{% for m in messages %}<|endoftext|>{{ m.content }}{% endfor %}"
    settings = {"eos_token": "<|endoftext|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = LanguageConfig(**{**SHAPE, "vocab_size": 300}, variant="v2")
    language.save(LanguageModel(config), tmp_path / "ours", tmp_path / "tokenizer.json")
    export(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=True, return_dict=False)
    assert ids == [0, *tokenizer("ab")["input_ids"]]
