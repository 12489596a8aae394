"""Against transformers' own models: logits and greedy generation on converted weights, both ways."""

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diffvision.models.convert.transformers import from_hugging_face, to_hugging_face
from diffvision.models.language import LanguageConfig, LanguageModel
from diffvision.models.language.generation import generate
from diffvision.models.language.modeling_diffllama_v2 import DiffLlamaV2Config, DiffLlamaV2ForCausalLM

THEIRS = {
    "diffllama": (DiffLlamaConfig, DiffLlamaForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "diffllama_v2": (DiffLlamaV2Config, DiffLlamaV2ForCausalLM),
}
SHAPE = {"vocab_size": 97, "dim": 48, "depth": 3, "num_heads": 4, "head_dim": 12, "mlp_dim": 80, "max_length": 128}


def _scattered(model):
    """Random weights of a size that makes every part matter, norms and lambda too."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
            else:
                parameter.normal_(mean=0.0 if "lambda" in name else 1.0, std=0.3)
    return model.eval()


def _ours(variant, kv_heads, tied):
    own = LanguageConfig(**SHAPE, variant=variant, num_kv_heads=kv_heads, tied=tied, rotary_theta=5000.0)
    return _scattered(LanguageModel(own))


def _config_and_state(**changed):
    model = LanguageModel(LanguageConfig(**{**SHAPE, "variant": "v1", **changed}))
    return model.config, model.state_dict()


def _theirs(values, state=None):
    values = dict(values)
    make_config, make = THEIRS[values.pop("model_type")]
    model = make(make_config(**values, attn_implementation="eager", pad_token_id=0)).eval()
    if state is not None:
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= ({"lm_head.weight"} if values["tie_word_embeddings"] else set())
    return model


def _assert_same(ours, theirs):
    tokens = torch.randint(1, 97, (2, 40))
    with torch.no_grad():
        own, other = ours(tokens), theirs(tokens).logits
    assert own.std() > 0.5  # so that 1e-5 is a small part
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    greedy = theirs.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert generate(ours, tokens, max_new_tokens=20) == greedy[:, 40:].tolist()


@pytest.mark.parametrize("variant", ["v1", "standard", "v2"])
@pytest.mark.parametrize(("kv_heads", "tied"), [(4, True), (2, False)])
def test_both_ways_and_back(variant, kv_heads, tied):
    """All but V1's head norm comes back bit for bit; its weight stays in the output projection."""
    model = _ours(variant, kv_heads, tied)
    state = model.state_dict()
    values, exported = to_hugging_face(model.config, state)
    _assert_same(model, _theirs(values, exported))
    config, back = from_hugging_face(values, exported)
    assert config == LanguageConfig(**{**vars(model.config), "num_kv_heads": None if kv_heads == 4 else kv_heads})
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        if variant == "v1" and "head_norm" in name:
            assert (back[name] == 1).all()
        elif not (variant == "v1" and "attn.proj" in name):
            assert torch.equal(back[name], tensor), name

    theirs = _scattered(_theirs(values))
    ours = LanguageModel(config).eval()
    ours.load_state_dict(from_hugging_face(theirs.config.to_dict(), theirs.state_dict())[1])
    _assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt2"}, "model_type .*'gpt2'"),
        ({"attention_bias": True}, "attention_bias .*True"),
        ({"hidden_act": "gelu"}, "hidden_act .*'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type .*'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type .*'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type .*'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor .*0.5"),
        ({"max_position_embeddings": None, "rms_norm_eps": None}, "lacks max_position_embeddings, rms_norm_eps"),
        ({"num_attention_heads": 7}, "num_attention_heads .*2.*7"),
        ({"num_key_value_heads": 1}, "num_key_value_heads .*2.*1"),
        ({"num_key_value_heads": 6}, "num_attention_heads .*6.*8"),
        ({"num_hidden_layers": 10**9}, "depth .*1000000000"),
        ({"num_hidden_layers": 4}, "num_hidden_layers .*3.*4"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": [1]}}, "rope_theta"),
    ],
)
def test_what_ours_cannot_be(changed, message):
    values, state = to_hugging_face(*_config_and_state())
    with pytest.raises(ValueError, match=message):
        from_hugging_face({**values, **changed}, state)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}])
def test_reads_settings_of_transformers_4(scaling):
    """Which had the base of the angles outside, and no scaling as None."""
    model = _ours("standard", 2, False)
    values, state = to_hugging_face(model.config, model.state_dict())
    theta = values.pop("rope_parameters")["rope_theta"]
    config, _ = from_hugging_face({**values, "rope_theta": theta, "rope_scaling": scaling}, state)
    assert config == model.config


def test_a_width_that_the_heads_do_not_divide_is_saved(tmp_path):
    values, state = to_hugging_face(*_config_and_state(variant="v2", dim=64, num_heads=3, head_dim=16))
    model = _theirs(values, state)
    model.save_pretrained(tmp_path)
    again = DiffLlamaV2ForCausalLM.from_pretrained(tmp_path)
    assert again.config.num_attention_heads == 6
