"""What `diffvision match` prints, against layers, models and caches that are really built."""

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diffvision.cli import main
from diffvision.models import language
from diffvision.models.language.cache import LayerCache
from diffvision.models.language.configuration import SIZES
from diffvision.models.matching import matched
from diffvision.nn import build_attention
from diffvision.nn.transformer import DecoderBlock

CASES = [
    {"heads": 16, "head_dim": 128, "width": 2048, "kv_heads": 8},
    {"heads": 12, "head_dim": 64, "mlp": 2048},
    {"heads": 3, "head_dim": 64, "width": 192, "mlp": 600},
    {"heads": 16, "head_dim": 32, "width": 640, "kv_heads": 1, "mlp": 1000},
    {"heads": 10, "head_dim": 32, "kv_heads": 2, "signal_ratio": 5},
]


def built(one, width, device="meta"):
    ratio = {} if one.signal_ratio is None else {"signal_ratio": one.signal_ratio}
    settings = {"head_dim": one.head_dim, "proj_bias": False, "device": device, **ratio}
    attn = build_attention(one.variant, width, one.num_heads, one.num_kv_heads, **settings)
    return DecoderBlock(attn, width, one.mlp, device=device)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_cache_are_those_of_built_layers(case):
    width = case.get("width") or case["heads"] * case["head_dim"]
    models = matched(**case)
    assert [one.variant for one in models] == ["standard", "v1", "v2", "gda"]
    for one in models:
        block = built(one, width)
        assert (one.attention, one.layer) == (count(block.attn), count(block))
        assert abs(one.layer - models[0].layer) <= 1.5 * width  # half a unit of the MLP
        with torch.device("meta"):
            cache = LayerCache(block.attn, 1, 1, dtype=torch.bfloat16)
        assert one.cache_bytes == 2 * (cache.keys.numel() + cache.values.numel())
    plain, v1, v2, _ = models
    assert v1.cache_bytes == v2.cache_bytes == plain.cache_bytes
    assert v1.attention - plain.attention == 6 * v1.head_dim
    assert (v1.mlp, v1.flops) == (plain.mlp, plain.flops)


@pytest.mark.parametrize("case", CASES[1:])
def test_flops_are_those_that_torch_counts(case):
    width, length = case.get("width") or case["heads"] * case["head_dim"], 40
    for one in matched(**case, length=length):
        block, x = built(one, width, "cpu"), torch.zeros(1, length, width)
        with FlopCounterMode(display=False) as counter:
            block.attn(x, maps=[])
            block.mlp(x)
        assert one.flops == counter.get_total_flops() / length


def test_whole_models_and_the_heads_of_the_named_sizes():
    for name, size in SIZES.items():
        layers = {"layers": size.depth, "vocab": size.vocab_size}
        plain, v1, v2, _ = matched(size.heads, size.head_dim, size.dim, mlp=size.mlp_dim, **layers)
        for one, family in ((plain, "transformer"), (v1, "diff"), (v2, "diffv2")):
            config = language.config(f"{family}-{name}", mlp_dim=one.mlp)
            assert (one.variant, one.num_heads, one.head_dim) == (config.variant, config.num_heads, config.head_dim)
            with torch.device("meta"):
                assert one.model == count(language.LanguageModel(config))
        assert abs(v2.mlp - size.mlp_dim_v2) <= 4  # of the large ones, a multiple of 8


def test_what_cannot_be_halved_keeps_its_number_and_halves_the_size():
    for heads, kv_heads in ((3, 3), (6, 3), (4, 1)):
        _, v1, v2, _ = matched(heads, 64, 256, kv_heads)
        assert (v1.num_heads, v1.num_kv_heads, v1.head_dim) == (heads, kv_heads, 32)
        assert (v2.num_heads, v2.num_kv_heads, v2.head_dim) == (heads, kv_heads, 64)
    with pytest.raises(ValueError, match="heads is 3, kv_heads 3 and head_dim"):
        matched(3, 63)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"heads": 0, "head_dim": 64}, "heads is 0: it must be a whole number from 1"),
        ({"heads": 8, "head_dim": 64, "length": 0}, "length is 0"),
        ({"heads": 8, "head_dim": 64, "vocab": -1}, "vocab is -1"),
        ({"heads": 16, "head_dim": 64, "kv_heads": 5}, "heads is 16, not a multiple of kv_heads 5"),
        ({"heads": 16, "head_dim": 64, "signal_ratio": 3}, "signal_ratio is 3, and there are 8 .* one of 1, 2, 4, 8"),
        ({"heads": 16, "head_dim": 64, "mlp": 300}, "mlp is 300, .* v2 .* give more"),
    ],
)
def test_bad_sizes_are_named(case, message):
    with pytest.raises(ValueError, match=message):
        matched(**case)


def test_the_remedy_for_a_narrow_mlp_is_one():
    with pytest.raises(ValueError, match=r"give more than 347$"):
        matched(16, 64, mlp=300)
    assert matched(16, 64, mlp=348)[2].mlp == 1


def test_the_command_prints_80_columns_and_json(capsys):
    largest = ["--heads", "128", "--head_dim", "128", "--kv_heads", "8", "--layers", "126", "--vocab", "128256"]
    assert main(["match", *largest, "--length", "131072"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "131,072" in out
    assert main(["match", "--heads", "3", "--head_dim", "64", "--json"]) == 0
    assert [one["head_dim"] for one in json.loads(capsys.readouterr().out)] == [64, 32, 64, 32]
    assert main(["match", "--heads", "3", "--head_dim", "64"]) == 0
    assert "V1 keeps their numbers" in " ".join(capsys.readouterr().out.split())
    assert main(["match", "--heads", "3", "--head_dim", "63"]) == 1
    assert "give an even head_dim" in capsys.readouterr().err


def test_the_command_imports_no_torch():
    code = "import sys; from diffvision.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "match", "--heads", "16", "--head_dim", "64"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
