"""The decoder: sizes that match, its parts against plain formulas, documents, initialisation, and checkpoints."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.models import language
from diffvision.models.language import SIZES, LanguageConfig, LanguageModel
from diffvision.nn import ATTENTION

NAMES = ["transformer-debug", "diff-debug", "diffv2-debug"]
TINY = {"vocab_size": 50, "dim": 32, "depth": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 40, "max_length": 64}


@pytest.mark.quick("debug", "1m")
@pytest.mark.parametrize("size", SIZES)
def test_the_models_of_a_size_match(size):
    with torch.device("meta"):
        models = [language.create(f"{family}-{size}") for family in language.FAMILIES]
    counts = [sum(p.numel() for p in model.parameters()) for model in models]
    # V1's lambda vectors and head norms: 384 parameters, which count at the smallest size.
    assert max(counts) <= (1.0035 if size == "nano" else 1.001) * min(counts)
    standard, v1, v2, *_ = (model.config for model in models)
    assert (standard.variant, v1.variant, v2.variant) == ("standard", "v1", "v2")
    assert standard.num_heads == 2 * v1.num_heads == v2.num_heads
    assert standard.head_dim == v1.head_dim == v2.head_dim
    assert standard.num_heads * standard.head_dim == standard.dim


# arXiv 2410.05258 tables 9 and 10: width, layers, differential heads, size of a head, parameters.
PAPER = {
    "830m": (1536, 24, 8, 96, 8.3e8),
    "1.4b": (2048, 24, 8, 128, 1.4e9),
    "2.8b": (2560, 32, 10, 128, 2.8e9),
    "6.8b": (4096, 32, 16, 128, 6.8e9),
    "13.1b": (5120, 40, 20, 128, 1.31e10),
    "3b": (3072, 28, 12, 128, 3.5e9),  # "3B" is its name in the paper
}


@pytest.mark.quick("3b")
@pytest.mark.parametrize("size", PAPER)
def test_the_paper_s_sizes(size):
    with torch.device("meta"):
        model = language.create(f"diff-{size}")
    own, (*sizes, parameters) = model.config, PAPER[size]
    assert [own.dim, own.depth, own.num_heads, own.head_dim] == sizes
    assert (own.vocab_size, own.tied) == (100_288, True)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.015)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 0}, "vocab_size .*16,777,216.*0"),
        ({"variant": "v9"}, "variant .*'v9'"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_kv_heads .*1, 3.*2"),
        ({"head_dim": 7}, "head_dim .*7"),
        ({"rotary_theta": "big"}, "rotary_theta .*'big'"),
        ({"norm_eps": 0.0}, "norm_eps .*0.0"),
        ({"variant": "v2", "lambda_init": 0.8}, "lambda_init .*0.8.*'v2'"),
        ({"variant": "gda", "signal_ratio": 1.5}, "signal_ratio .*1.5"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        LanguageConfig(**{**TINY, **values})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", ATTENTION)
def test_equals_the_formula(variant, tied):
    """The whole pass, written out around the attention layer, which has its own tests."""
    config = LanguageConfig(**TINY, variant=variant, tied=tied, num_kv_heads=1, norm_eps=1e-3)
    model = LanguageModel(config, dtype=torch.float64)
    tokens = torch.randint(50, (2, 9))

    def norm(x, layer):
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * layer.weight

    x = model.embed.weight[tokens]
    for block in model.blocks:
        x = x + block.attn(norm(x, block.norm1), is_causal=True)
        y, mlp = norm(x, block.norm2), block.mlp
        gate = y @ mlp.gate.weight.T
        x = x + (gate * gate.sigmoid() * (y @ mlp.up.weight.T)) @ mlp.down.weight.T
    weight = model.embed.weight if tied else model.head.weight
    torch.testing.assert_close(model(tokens), norm(x, model.norm) @ weight.T)
    assert model.head_weight is weight
    assert all(
        block.attn.rotary == 10_000.0 and not any(p.dim() == 0 for p in block.parameters()) for block in model.blocks
    )
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


def test_depth_counts_from_zero_and_settings_arrive():
    layers = language.create("diff-debug").attention_layers()
    assert [round(layer.lambda_init, 4) for layer in layers] == [0.2, 0.3555]
    model = language.create("diff-debug", lambda_init=0.5, head_norm=False, rotary_theta=640_000.0, norm_eps=1e-6)
    assert [layer.lambda_init for layer in model.attention_layers()] == [0.5, 0.5]
    assert isinstance(model.blocks[0].attn.head_norm, torch.nn.Identity)
    assert (model.blocks[1].attn.rotary, model.norm.eps) == (640_000.0, 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_documents_do_not_see_each_other(name):
    """Each document in a packed row as alone at its place; and a change in one leaves the others as they were."""
    model = language.create(name).eval()
    tokens = torch.randint(4096, (2, 24))
    documents = torch.tensor([[0] * 10 + [1] * 6 + [2] * 8, [5] * 24])
    packed = model(tokens, documents=documents)
    torch.testing.assert_close(packed[1], model(tokens[1:])[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(packed[0, :10], model(tokens[:1, :10])[0], rtol=0, atol=1e-5)
    changed = tokens.clone()
    changed[0, :10] = torch.randint(4096, (10,))
    torch.testing.assert_close(model(changed, documents=documents)[0, 10:], packed[0, 10:], rtol=0, atol=1e-5)
    torch.testing.assert_close(packed[0, 16:], model(tokens[:1, 16:])[0], rtol=0, atol=1e-5)


def test_too_long_a_sequence_is_one_error():
    model = LanguageModel(LanguageConfig(**TINY))
    with pytest.raises(ValueError, match="max_length"):
        model(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(ValueError, match="documents with a cache"):
        model.hidden(torch.zeros(1, 2, dtype=torch.long), documents=torch.zeros(1, 2), cache=model.new_cache(1, 4))


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_initialised_by_width_and_depth(name):
    model = language.create(name, depth=8, dim=160)
    expected = (2 / (5 * 160)) ** 0.5
    for block in model.blocks:
        for parameter, std in (
            (block.attn.q_proj.weight, expected),
            (block.mlp.up.weight, expected),
            (block.attn.proj.weight, expected / 4),
            (block.mlp.down.weight, expected / 4),
        ):
            assert parameter.std().item() == pytest.approx(std, rel=0.05)
        assert (block.norm1.weight == 1).all()
    assert model.embed.weight.std().item() == pytest.approx(expected, rel=0.02)
    if name == "diff-debug":
        vectors = torch.cat([getattr(b.attn, f"lambda_{n}") for b in model.blocks for n in ("q1", "k1", "q2", "k2")])
        assert vectors.std().item() == pytest.approx(0.1, rel=0.15)
        assert (model.blocks[0].attn.head_norm.weight == 1).all()
    if name == "diffv2-debug":
        assert model.blocks[0].attn.lambda_proj.weight.std().item() == pytest.approx(expected, rel=0.15)
    loss = F.cross_entropy(model(torch.randint(4096, (2, 64))).flatten(0, 1), torch.randint(4096, (128,)))
    assert 8.2 < loss.item() < 8.9  # log(4096) = 8.32


def test_weights_that_are_not_their_configuration_s(tmp_path):
    model = language.create("diff-debug")
    language.save(model, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())

    def write(**changed):
        (tmp_path / "config.json").write_text(json.dumps({**values, **changed}))

    # Other weights, other sizes, settings of another version, another kind of model.
    changes = {"variant": "standard", "vocab_size": 300, "depth": 3, "activation": "silu", "diffvision": "vit"}
    for name, value in changes.items():
        write(**{name: value})
        with pytest.raises(ValueError, match=str(tmp_path)):
            language.load(tmp_path)
    write()
    with pytest.raises(ValueError, match="the tokenizer has 257 tokens"):
        language.save(LanguageModel(LanguageConfig(**TINY)), tmp_path / "other", train_tokenizer(["ab cd"], 257))
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="is damaged"):
        language.load(tmp_path)
    save_file({"embed.weight": torch.zeros(4096, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is missing"):
        language.load(tmp_path)


def test_the_tokenizer_of_a_checkpoint(tmp_path):
    """In its folder, beside a .ckpt file, else where the training had it, if it is still there."""
    run, words = tmp_path / "run", tmp_path / "words"
    run.mkdir()
    words.mkdir()
    path, own, trained = run / "last.ckpt", run / "tokenizer.json", words / "tokenizer.json"
    for recorded in (None, {}, {"tokenizer": None}, {"tokenizer": str(words)}, {"tokenizer": "gpt2"}):
        torch.save({"weight": torch.zeros(2)} if recorded is None else {"diffvision": recorded}, path)
        assert language.find_tokenizer(path) is None
    trained.write_text("{}")
    for named in (words, trained):
        torch.save({"diffvision": {"model": "diff-3m", "tokenizer": str(named)}}, path)
        assert language.find_tokenizer(str(path)) == trained
    assert language.find_tokenizer(run) is None
    own.write_text("{}")
    assert language.find_tokenizer(path) == language.find_tokenizer(run) == own
    own.unlink()
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt"):
        language.find_tokenizer(run / "nothing.ckpt")
    path.write_bytes(b"none")
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged"):
        language.find_tokenizer(path)
