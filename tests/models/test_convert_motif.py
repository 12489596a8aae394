"""Motif's layout against its forward pass, written here from the equations, head by head and without our layers."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffvision.models import language
from diffvision.models.convert import convert
from diffvision.models.convert.motif import from_motif, to_motif
from diffvision.models.convert.transformers import to_hugging_face
from diffvision.models.language import LanguageConfig, LanguageModel
from diffvision.models.language.generation import generate
from diffvision.opening import open_model

SHAPE = {
    "model_type": "Motif",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "hidden_act": "poly_norm",
    "use_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
}
V1 = {**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}
V1_GROUPED = {**V1, "num_key_value_heads": 4, "tie_word_embeddings": False}
GDA = {**SHAPE, "num_attention_heads": 10, "num_noise_heads": 2, "num_key_value_heads": 4, "k_ratio": 1}
GDA_GROUPED = {**GDA, "num_attention_heads": 16, "num_noise_heads": 4, "tie_word_embeddings": False}
CASES = [
    pytest.param(V1, id="v1"),
    pytest.param(V1_GROUPED, id="v1-grouped"),
    pytest.param(GDA, id="gda"),
    pytest.param(GDA_GROUPED, id="gda-grouped"),
]


def _shapes(values):
    """The names and shapes of a MotifForCausalLM's weights."""
    width, hidden, size = values["hidden_size"], values["intermediate_size"], values["head_dim"]
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    signal = heads - values.get("num_noise_heads", heads // 2)
    shapes = {"model.embed_tokens.weight": (values["vocab_size"], width), "model.norm.weight": (width,)}
    if not values.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (values["vocab_size"], width)
    for layer in range(values["num_hidden_layers"]):
        parts = {
            "input_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (heads * size, width),
            "self_attn.k_proj.weight": (kv_heads * size, width),
            "self_attn.v_proj.weight": (kv_heads * size, width),
            "self_attn.o_proj.weight": (width, 2 * signal * size),
            "self_attn.lambda_q1": (size,),
            "self_attn.lambda_k1": (size,),
            "self_attn.lambda_q2": (size,),
            "self_attn.lambda_k2": (size,),
            "self_attn.subln.weight": (2 * size,),
            "post_attention_layernorm.weight": (width,),
            "mlp.gate_proj.weight": (hidden, width),
            "mlp.up_proj.weight": (hidden, width),
            "mlp.down_proj.weight": (width, hidden),
            "mlp.act_fn.weight": (3,),
            "mlp.act_fn.bias": (1,),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _weights(values, dtype=torch.float32):
    """Random weights of a size that makes every part matter."""
    state = {}
    for name, shape in _shapes(values).items():
        mean, std = (0.0, 0.2) if len(shape) == 2 else (0.0, 0.4) if "lambda" in name or "bias" in name else (1.0, 0.3)
        state[name] = (torch.randn(shape, dtype=torch.float64) * std + mean).to(dtype)
    return state


def _rms(x, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def _rotated(x, theta):
    """x [N, D]: the pair (i, i + D / 2) turned by position * theta^(-2i / D)."""
    count, size = x.shape
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(count, dtype=torch.float64), frequencies)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def _attention(x, part, values, layer):
    """One sequence x [N, width]; q heads lie as [group, signal ... signal noise], kv heads as signal, noise, ..."""
    size, eps, theta = values["head_dim"], values["attn_rms_norm_eps"], values["rope_theta"]
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    noise = values.get("num_noise_heads", heads // 2)
    group = heads // noise
    q = [_rotated(head, theta) for head in (x @ part["self_attn.q_proj.weight"].T).split(size, -1)]
    k = [_rotated(head, theta) for head in (x @ part["self_attn.k_proj.weight"].T).split(size, -1)]
    v = (x @ part["self_attn.v_proj.weight"].T).split(size, -1)
    start = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
    one = (part["self_attn.lambda_q1"] * part["self_attn.lambda_k1"]).sum().exp()
    two = (part["self_attn.lambda_q2"] * part["self_attn.lambda_k2"]).sum().exp()
    lam = one - two + start
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)

    def softmax(query, key):
        return (query @ key.T / math.sqrt(size)).masked_fill(future, -torch.inf).softmax(-1)

    out = []
    for index in range(noise):
        pair = 2 * (index // (noise // (kv_heads // 2)))
        value = torch.cat((v[pair], v[pair + 1]), -1)
        subtracted = softmax(q[index * group + group - 1], k[pair + 1]) @ value
        for signal in range(group - 1):
            head = softmax(q[index * group + signal], k[pair]) @ value - lam * subtracted
            out.append(_rms(head, eps) * part["self_attn.subln.weight"] * (1 - start))
    return torch.cat(out, -1) @ part["self_attn.o_proj.weight"].T


def _feed_forward(x, part):
    gate, (cube, square, linear) = x @ part["mlp.gate_proj.weight"].T, part["mlp.act_fn.weight"]
    act = cube * _rms(gate**3, 1e-6) + square * _rms(gate**2, 1e-6) + linear * _rms(gate, 1e-6)
    gated = (act + part["mlp.act_fn.bias"]) * (x @ part["mlp.up_proj.weight"].T)
    return gated @ part["mlp.down_proj.weight"].T


def _motif(values, state, tokens):
    """The logits of one sequence of tokens, in float64."""
    x = state["model.embed_tokens.weight"][tokens].double()
    for layer in range(values["num_hidden_layers"]):
        prefix, eps = f"model.layers.{layer}.", values["rms_norm_eps"]
        part = {name.removeprefix(prefix): w.double() for name, w in state.items() if name.startswith(prefix)}
        x = x + _attention(_rms(x, eps) * part["input_layernorm.weight"], part, values, layer)
        x = x + _feed_forward(_rms(x, eps) * part["post_attention_layernorm.weight"], part)
    x = _rms(x, values["rms_norm_eps"]) * state["model.norm.weight"].double()
    return x @ state.get("lm_head.weight", state["model.embed_tokens.weight"]).double().T


def _ours(values, state):
    config, weights = from_motif(values, state)
    model = LanguageModel(config)
    model.load_state_dict(weights)
    return model.eval()


def _folder(path, values, state, shards=1):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**values, "auto_map": {"AutoConfig": "configuration_motif.C"}}))
    if shards == 1:
        save_file(state, path / "model.safetensors")
        return path
    places = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(state)}
    for file in set(places.values()):
        save_file({name: state[name] for name in state if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


@pytest.mark.parametrize("values", CASES)
def test_computes_what_motif_does(values):
    state = _weights(values, torch.float64)
    model, tokens = _ours(values, state).double(), torch.randint(61, (2, 30))
    model.load_state_dict(from_motif(values, state)[1])  # in float64 all the way
    with torch.no_grad():
        logits = model(tokens)
    expected = torch.stack([_motif(values, state, row) for row in tokens])
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("values", CASES)
def test_generates_what_motif_does(values):
    """Greedy, with a cache here and whole sequences there, from a prompt of several tokens."""
    state = _weights(values)
    tokens, model = torch.randint(61, (9,)), _ours(values, state)
    expected = tokens
    for _ in range(20):
        expected = torch.cat((expected, _motif(values, state, expected)[-1].argmax()[None]))
    assert generate(model, tokens[None], max_new_tokens=20) == [expected[9:].tolist()]
    cache = model.new_cache(1, 29)
    with torch.no_grad():
        parts = [model.logits(model.hidden(part[None], cache=cache)) for part in expected.split([9, 1, 1, 18])]
        torch.testing.assert_close(torch.cat(parts, 1), model(expected[None]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("values", CASES)
def test_there_and_back(values):
    state = _weights(values)
    config, ours = from_motif(values, state)
    settings, back = to_motif(config, ours)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], weight) for name, weight in state.items())
    assert from_motif(settings, back)[0] == config
    kept = ("num_attention_heads", "num_key_value_heads", "num_noise_heads", "head_dim", "rope_theta")
    assert [settings.get(name) for name in kept] == [values.get(name) for name in kept]


def test_the_names_of_the_large_model():
    """A public log of its conversion to another format has 643 tensors for its 40 layers."""
    config = LanguageConfig(
        vocab_size=61, dim=32, depth=40, num_heads=32, num_kv_heads=8, head_dim=8, mlp_dim=40, variant="gda",
        signal_ratio=4, activation="poly_norm", lambda_init="depth-1", tied=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LanguageModel(config)
    values, state = to_motif(config, model.state_dict())
    assert len(state) == 643
    assert {name: tuple(weight.shape) for name, weight in state.items()} == _shapes(values)
    shape = ("num_attention_heads", "num_noise_heads", "num_key_value_heads")
    assert [values[name] for name in shape] == [40, 8, 16]


def test_an_unsaid_tie_is_read_from_the_weights():
    state = _weights(V1)
    silent = {name: value for name, value in V1.items() if name != "tie_word_embeddings"}
    assert from_motif(silent, state)[0].tied
    assert not from_motif(silent, {**state, "lm_head.weight": torch.zeros(61, 32)})[0].tied
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        from_motif(V1, {**state, "lm_head.weight": torch.zeros(61, 32)})


@pytest.mark.parametrize(("values", "shards"), [(V1, 1), (GDA_GROUPED, 3)])
def test_a_folder_opens_and_converts(values, shards, tmp_path, monkeypatch, capsys):
    """In the dtype of the file, as `hf:PATH` and as a path, without the code that its configuration names."""
    monkeypatch.chdir(tmp_path)
    state = _weights(values, torch.bfloat16)
    _folder(tmp_path / "motif", values, state, shards)
    convert("motif", "ours", to="language")
    convert("ours", "back", to="motif")
    assert "motif is motif, a folder of Motif-2.6B or Motif-2-12.7B" in capsys.readouterr().out
    back = load_file("back/model.safetensors")
    assert all(torch.equal(back[name], weight) for name, weight in state.items())
    written = json.loads(Path("back/config.json").read_text())
    assert (written["architectures"], written["dtype"]) == (["MotifForCausalLM"], "bfloat16")
    loaded, tokens = language.load("ours"), torch.randint(61, (1, 12))
    expected = _motif(values, state, tokens[0])
    for spec in ("hf:motif", "motif", "local-dir:motif", "ours"):
        model = open_model(spec)
        assert (model.host, model.name, model.max_length) == ("language", spec.rpartition(":")[2], 64)
        assert {weight.dtype for weight in model.module.parameters()} == {torch.bfloat16}
        with torch.no_grad():
            assert torch.equal(model.module(tokens), loaded(tokens))
            torch.testing.assert_close(model.module.double()(tokens)[0], expected, rtol=0, atol=1e-4)


def test_exported_for_transformers(tmp_path):
    """As our class of that library, whose configuration has the settings that Motif brought."""
    transformers = pytest.importorskip("transformers")
    from diffvision.models.language.transformers import DiffTransformerForCausalLM

    model, tokens = _ours(GDA_GROUPED, _weights(GDA_GROUPED)), torch.randint(61, (1, 12))
    DiffTransformerForCausalLM.from_diffvision(model).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.to_diffvision().config == model.config
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "llama"}, "type 'llama' is not Motif"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512, .* give Motif-2"),
        ({"use_sliding_window": True}, "use_sliding_window=True, not False"),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "set use_sliding_window=false"),
        (
            {"sliding_window": 8, "use_sliding_window": None},
            "sliding_window=8: set use_sliding_window",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn', not 'default'"),
        ({"hidden_act": "silu"}, "hidden_act='silu', not 'poly_norm'"),
        ({"attn_rms_norm_eps": 1e-6}, "attn_rms_norm_eps=1e-06, not 1e-05"),
        ({"k_ratio": 2}, "k_ratio=2, not 1"),
        ({"use_bias": True}, "use_bias=True, not False"),
        ({"num_noise_heads": 3}, "num_attention_heads=10, not a multiple of num_noise_heads=3"),
        ({"num_noise_heads": 10}, "num_attention_heads=10, not a multiple of num_noise_heads=10"),
        (
            {"num_noise_heads": None, "num_attention_heads": 9},
            "num_attention_heads=9, not a multiple of num_noise_heads=0",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3, whose half must divide 2 noise heads"),
        ({"num_key_value_heads": 6}, "num_key_value_heads=6, whose half must divide 2 noise heads"),
        ({"hidden_size": None}, "configuration lacks hidden_size"),
        ({"num_noise_heads": -1}, "num_noise_heads=-1: set a number"),
        ({"num_hidden_layers": 4}, "num_hidden_layers=4 and weights of 3 layers"),
    ],
)
def test_what_ours_cannot_be(changed, message):
    with pytest.raises(ValueError, match=message):
        from_motif({**GDA, **changed}, _weights(GDA))


def test_folders_that_are_not_whole_are_refused(tmp_path):
    state = _weights(GDA)
    lacking = {name: weight for name, weight in state.items() if name != "model.layers.1.mlp.act_fn.bias"}
    with pytest.raises(ValueError, match=r"lacks .*layers\.1\.mlp\.act_fn"):
        open_model(f"hf:{_folder(tmp_path / 'lacking', GDA, lacking)}")
    alphas = {"model.layers.0.self_attn.q_proj_alpha": torch.ones(1)}
    with pytest.raises(ValueError, match="with 1 unknown weights"):
        open_model(f"hf:{_folder(tmp_path / 'more', GDA, {**state, **alphas})}")
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.q_proj\.weight"):
        open_model(str(_folder(tmp_path / "other", {**GDA, "num_attention_heads": 8}, state)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "v2", "lambda_init": "depth"}, "no model of variant 'v2'"),
        ({"lambda_init": "depth"}, "lambda_init='depth', not 'depth-1'"),
        ({"activation": "silu"}, "activation='silu', not 'poly_norm'"),
        ({"head_norm": False}, "head_norm=False, not True"),
    ],
)
def test_what_motif_cannot_be(settings, message):
    config, state = from_motif(V1, _weights(V1))
    with pytest.raises(ValueError, match=message):
        to_motif(LanguageConfig(**{**vars(config), **settings}), state)


def test_diffllama_has_silu():
    config, state = from_motif(V1, _weights(V1))
    with pytest.raises(ValueError, match="activation='poly_norm'"):
        to_hugging_face(config, state)


# ---- released weights ----------------------------------------------------------------------------------------------


@pytest.mark.weights
@pytest.mark.parametrize("name", ["Motif-2.6B", "Motif-2.6b-v1.1-LC", "Motif-2-12.7B-Base"])
def test_released_weights(name):
    """Against the equations, a layer at a time in float64; and it knows a capital. 12.7B takes some 80 GB of memory."""
    folder = Path(os.environ.get("DIFFVISION_WEIGHTS", "/nonexistent")) / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"no {folder}: put the folder of Motif-Technologies/{name} there, and its parent into the variable")
    model = open_model(f"hf:{folder}")
    tokens = torch.tensor(model.tokenizer.encode("The capital of France is"))
    values = {"attn_rms_norm_eps": 1e-5, **json.loads((folder / "config.json").read_text())}
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    state = {key: weight for file in folder.glob("model*.safetensors") for key, weight in load_file(file).items()}
    expected = _motif(values, state, tokens)
    with torch.no_grad():
        logits = model.module.float()(tokens[None])[0].double()
    assert (logits - expected).abs().max() < 1e-3 * expected.std()
    assert "Paris" in model.tokenizer.decode(generate(model.module, tokens[None], max_new_tokens=8)[0])
