"""What works with a Llama model of transformers works with ours: inputs, outputs, caches, embeddings, heads, PEFT."""

import json

import pytest
import torch
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")

from diffvision.analysis.capture import captured  # noqa: E402
from diffvision.models import language  # noqa: E402
from diffvision.models.language.transformers import DiffTransformerConfig, DiffTransformerForCausalLM  # noqa: E402

NAMES = ["transformer-debug", "diff-debug", "diffv2-debug"]
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture
def host(model):
    return DiffTransformerForCausalLM.from_diffvision(model, pad_token_id=0)


@pytest.fixture
def tokens():
    return torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def padded(tokens):
    """A mask of padding at the left of the second row."""
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    return mask


def _characters():
    """A tokenizer of 97 characters."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:96], "\u0120"]  # the space
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def test_generation_stops_at_a_string(host, tokens):
    settings = {"attention_mask": torch.ones_like(tokens[:1]), "max_new_tokens": 12, "do_sample": False}
    tokenizer, whole = _characters(), host.generate(tokens[:1], **settings)[0, 9:].tolist()
    stop = tokenizer.convert_ids_to_tokens(whole[4:6])
    made = host.generate(tokens[:1], stop_strings=["".join(stop)], tokenizer=tokenizer, **settings)[0, 9:].tolist()
    assert made == whole[:6]


@torch.no_grad()
def test_embeddings_in_place_of_tokens(host, tokens, padded):
    expected = host(tokens, attention_mask=padded).logits
    embeds = host.get_input_embeddings()(tokens)
    assert torch.equal(host(inputs_embeds=embeds, attention_mask=padded).logits, expected)
    made = host.generate(tokens, attention_mask=padded, max_new_tokens=4, do_sample=False)
    embedded = host.generate(inputs_embeds=embeds, attention_mask=padded, max_new_tokens=4, do_sample=False)
    assert torch.equal(embedded, made[:, 9:])


@torch.no_grad()
def test_what_llama_ignores_is_ignored(host, tokens):
    places = torch.arange(9)
    out = host(tokens, position_ids=places[None], cache_position=places, token_type_ids=torch.zeros_like(tokens))
    torch.testing.assert_close(out.logits, host(tokens).logits, **CLOSE)


@torch.no_grad()
def test_position_ids_move_tokens(host, tokens):
    """The same distances are the same logits, others are not; positions that begin anew part two documents."""
    expected = host(tokens).logits
    torch.testing.assert_close(host(tokens, position_ids=torch.arange(9)[None] + 5).logits, expected, **CLOSE)
    assert (host(tokens, position_ids=torch.arange(0, 18, 2)[None]).logits - expected).abs().max() > 1e-2
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    out = host(tokens, position_ids=packed, use_cache=False).logits
    torch.testing.assert_close(out[:, 4:], host(tokens[:, 4:]).logits, **CLOSE)
    torch.testing.assert_close(out[:, :4], expected[:, :4], **CLOSE)


@torch.no_grad()
def test_masks_of_four_axes(host, tokens, padded):
    allowed = padded[:, None, None].bool() & torch.ones(9, 9).tril().bool()
    expected = host(tokens, attention_mask=padded).logits
    for mask in (allowed, torch.where(allowed, 0.0, -torch.inf), torch.where(allowed, 0.0, torch.finfo().min)):
        out = host(tokens, attention_mask=mask).logits
        torch.testing.assert_close(out[0], expected[0], **CLOSE)
        torch.testing.assert_close(out[1, 4:], expected[1, 4:], **CLOSE)


@torch.no_grad()
def test_hidden_states_are_those_between_the_blocks(host, tokens):
    seen = []
    for block in host.model.blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    out = host(tokens, output_hidden_states=True)
    assert [list(state.shape) for state in out.hidden_states] == [[2, 9, 64]] * 3
    assert torch.equal(out.hidden_states[0], host.get_input_embeddings()(tokens))
    assert torch.equal(out.hidden_states[1], seen[0])
    assert torch.equal(host.lm_head(out.hidden_states[2]), out.logits)  # of the last, the final norm's
    assert host(tokens).hidden_states is None


@torch.no_grad()
def test_attentions_are_the_differences_of_the_maps(host, tokens, padded):
    calls = []
    with captured(host, lambda call: calls.append(call.scores().applied())):
        host(tokens, attention_mask=padded)
    out = host(tokens, attention_mask=padded, output_attentions=True)
    heads = host.config.num_attention_heads
    assert [list(attention.shape) for attention in out.attentions] == [[2, heads, 9, 9]] * 2
    for attention, call in zip(out.attentions, calls, strict=True):
        torch.testing.assert_close(attention, call, **CLOSE)
    torch.testing.assert_close(out.logits, host(tokens, attention_mask=padded).logits, **CLOSE)
    host.set_attn_implementation("eager")
    eager = host(tokens, attention_mask=padded, output_attentions=True)
    assert all(map(torch.equal, eager.attentions, out.attentions))
    made = host.generate(
        tokens, max_new_tokens=3, do_sample=False, output_attentions=True, return_dict_in_generate=True
    ).attentions
    assert [list(step[0].shape) for step in made] == [[2, heads, 9, 9], [2, heads, 1, 10], [2, heads, 1, 11]]


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_are_added(tied, tokens, tmp_path, make_model):
    host = DiffTransformerForCausalLM.from_diffvision(make_model("diff-debug", tied=tied))
    with torch.no_grad():
        before = host(tokens).logits
    assert host.resize_token_embeddings(100).weight.shape == (100, 64)
    assert host.config.vocab_size == 100
    with torch.no_grad():
        after = host(tokens).logits
    torch.testing.assert_close(after[..., :97], before, **CLOSE)
    assert (host.lm_head.weight is host.get_input_embeddings().weight) is tied
    host(torch.full((1, 4), 99), labels=torch.full((1, 4), 99)).loss.backward()
    assert host.get_input_embeddings().weight.grad[99].any()
    host.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, after)
    assert torch.equal(again.to_diffvision()(tokens), after)
    replaced = torch.nn.Embedding(100, 64)
    again.set_input_embeddings(replaced)
    assert again.get_input_embeddings() is again.model.embed is replaced


def test_the_decoder_and_heads_by_auto_classes(host, tokens, tmp_path):
    host.save_pretrained(tmp_path / "whole")
    hidden = host(tokens, output_hidden_states=True).hidden_states[-1]
    model = transformers.AutoModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(model(tokens).last_hidden_state, hidden)
    model.save_pretrained(tmp_path / "decoder")
    if host.config.tie_word_embeddings:
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "decoder")
        assert torch.equal(again(tokens).logits, host(tokens).logits)
    kinds = {"SequenceClassification": (2, 3), "TokenClassification": (2, 9, 3), "QuestionAnswering": (2, 9)}
    for name, shape in kinds.items():
        auto = getattr(transformers, f"AutoModelFor{name}")
        head = auto.from_pretrained(tmp_path / "whole", num_labels=3)
        out = head(tokens)
        assert getattr(out, "start_logits" if name == "QuestionAnswering" else "logits").shape == shape
        assert torch.equal(head.model.embed.weight, host.model.embed.weight)
        assert head.get_input_embeddings() is head.model.embed


def test_weights_are_drawn_after_to_empty(host):
    with torch.device("meta"):
        empty = type(host)(host.config)
    empty.to_empty(device="cpu")
    torch.nn.init.constant_(empty.model.blocks[1].mlp.down.weight, 7.0)
    empty.init_weights()
    drawn = empty.to_diffvision().state_dict()
    for name, value in language.LanguageModel(host.config.to_diffvision()).state_dict().items():
        assert drawn[name].isfinite().all(), name
        if value.numel() > 500:
            assert drawn[name].std().item() == pytest.approx(value.std().item(), rel=0.1), name


def test_gradient_checkpointing_is_set_and_unset(host, tokens):
    host.train()
    host(tokens, labels=tokens).loss.backward()
    expected = [parameter.grad.clone() for parameter in host.parameters()]
    host.zero_grad()
    host.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert [block.gradient_checkpointing for block in host.model.blocks] == [True, True]
    host(tokens, labels=tokens).loss.backward()
    for parameter, grad in zip(host.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, **CLOSE)
    host.gradient_checkpointing_disable()
    assert not any(block.gradient_checkpointing for block in host.model.blocks)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # PEFT's, in each generation
def test_peft_learns_prompts_and_prefixes(kind, host, tokens, padded, tmp_path, make_model):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(host, config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name.partition(".")[0] for name in trained] == ["prompt_encoder"]
    optimizer, losses = torch.optim.Adam(trained.values(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, attention_mask=padded, labels=tokens).loss
        loss.backward()
        assert all(p.grad.any() for p in trained.values())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval().save_pretrained(tmp_path)
    settings = {"input_ids": tokens, "attention_mask": padded, "max_new_tokens": 4, "do_sample": False}
    made = model.generate(**settings)
    again = peft.PeftModel.from_pretrained(model.get_base_model(), tmp_path)
    assert torch.equal(again.generate(**settings), made)


def test_generation_with_a_static_cache_makes_the_same(host, tokens, padded):
    settings = {"attention_mask": padded, "max_new_tokens": 8, "do_sample": False}
    made = host.generate(tokens, cache_implementation="static", **settings)
    assert torch.equal(made, host.generate(tokens, **settings))


@torch.no_grad()
def test_a_quantised_cache_is_near(host, tokens, padded):
    if not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers has no quantised cache that needs no other package")
    expected = host(tokens, attention_mask=padded, use_cache=False).logits[:, 6:]
    cache = transformers.QuantizedCache("fp8", host.config)
    host(tokens[:, :6], attention_mask=padded[:, :6], past_key_values=cache)
    out = host(tokens[:, 6:], attention_mask=padded, past_key_values=cache).logits
    assert cache.get_seq_length() == 9
    assert 0 < (out - expected).norm() < 0.15 * expected.norm()
    config = {"backend": "fp8"}
    settings = {"attention_mask": padded, "max_new_tokens": 4, "do_sample": False}
    made = host.generate(tokens, cache_implementation="quantized", cache_config=config, **settings)
    assert made.shape == (2, 13)


@torch.no_grad()
def test_a_static_cache_equals_a_growing_one(host, tokens, padded):
    """In chunks, and both its tensors of the shape that the configuration says."""
    expected = host(tokens, attention_mask=padded, use_cache=False).logits
    cache = transformers.StaticCache(config=host.config, max_cache_len=16)
    parts = [(0, 5), (5, 8), (8, 9)]
    out = [
        host(tokens[:, begin:end], attention_mask=padded[:, :end], past_key_values=cache, use_cache=True).logits
        for begin, end in parts
    ]
    torch.testing.assert_close(torch.cat(out, 1)[:, 4:], expected[:, 4:], **CLOSE)
    width = (2, host.config.num_key_value_heads, 16, host.config.head_dim)
    assert cache.layers[0].keys.shape == cache.layers[0].values.shape == width


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("length", [1, 7])
def test_a_static_cache_longer_than_an_unpadded_prompt(attention, ones, length, host, tokens):
    """transformers makes no mask for the prompt then; the empty rest of the cache is not attended to."""
    host.set_attn_implementation(attention)
    expected = host(tokens, use_cache=False).logits
    cache = transformers.StaticCache(config=host.config, max_cache_len=20)
    for _ in range(2):  # the second time in a cache that counts in a tensor
        out = [
            host(
                tokens[:, begin:end],
                attention_mask=torch.ones_like(tokens[:, :end]) if ones else None,
                past_key_values=cache,
            ).logits
            for begin, end in [(0, length), (length, 8), (8, 9)]
            if begin < end
        ]
        torch.testing.assert_close(torch.cat(out, 1), expected, **CLOSE)
        cache.reset()


@torch.no_grad()
def test_generation_of_an_unpadded_prompt_with_a_static_cache(host, tokens):
    settings = {"max_new_tokens": 8, "do_sample": False}
    made = host.generate(tokens, cache_implementation="static", **settings)
    assert torch.equal(made, host.generate(tokens, **settings))


@torch.no_grad()
@pytest.mark.parametrize("model", ["diff-debug"], indirect=True)
@pytest.mark.slow
def test_a_static_cache_under_compile(host, tokens):
    torch.compiler.reset()
    compiled = torch.compile(host, fullgraph=True, backend="aot_eager")
    expected = host(tokens, use_cache=False).logits
    cache = transformers.StaticCache(config=host.config, max_cache_len=20)
    out = [compiled(tokens[:, a:b], past_key_values=cache).logits for a, b in [(0, 8), (8, 9)]]
    torch.testing.assert_close(torch.cat(out, 1), expected, **CLOSE)


@torch.no_grad()
@pytest.mark.slow
def test_compiles_whole_with_a_mask_of_padding(host, tokens, padded):
    torch.compiler.reset()
    compiled = torch.compile(host, fullgraph=True, backend="aot_eager")
    expected = host(tokens, attention_mask=padded, use_cache=False).logits
    out = compiled(tokens, attention_mask=padded, use_cache=False).logits
    torch.testing.assert_close(out, expected, **CLOSE)


def test_folders_of_before_are_read(tmp_path, tokens, make_model):
    """They have our names in config.json, and one map's width as head_dim."""
    for name in NAMES:
        for tied in (True, False):
            folder, model = tmp_path / f"{name}-{tied}", make_model(name, tied=tied)
            folder.mkdir()
            values = {key: getattr(model.config, key) for key in model.config.__dataclass_fields__}
            values["max_position_embeddings"] = values.pop("max_length")
            values |= {"model_type": "diff_transformer", "architectures": ["DiffTransformerForCausalLM"]}
            (folder / "config.json").write_text(json.dumps(values))
            state = {f"model.{key}": value for key, value in model.state_dict().items()}
            save_file(state, folder / "model.safetensors", {"format": "pt"})
            host = transformers.AutoModelForCausalLM.from_pretrained(folder)
            assert host.to_diffvision().config == model.config
            assert torch.equal(host(tokens).logits, model(tokens))


def test_names_of_transformers_and_ours():
    config = DiffTransformerConfig.from_diffvision(language.config("diff-debug"))
    written = config.to_dict()
    assert (written["hidden_size"], written["num_hidden_layers"], written["num_attention_heads"]) == (64, 2, 2)
    assert (config.dim, config.depth, config.num_heads, config.mlp_dim) == (64, 2, 2, 171)
    assert (config.map_dim, config.head_dim) == (16, 32)
    assert DiffTransformerConfig(**written).to_diffvision() == language.config("diff-debug")
    assert DiffTransformerConfig(variant="v1", dim=64, head_dim=16).map_dim == 16
