"""The smallest run of each benchmark. No time is asserted, since none is to be trusted here."""

import contextlib
import json
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attention_modules
import attention_ways
import bench_attention
import bench_data
import bench_images
import bench_language
import bench_models
import bench_programs
import bench_step
import benchmark
import machine
from attention_ways import Shape, inputs_of
from diffvision.data.datasets.digits import png
from diffvision.data.shards.writer import write_shards
from diffvision.nn import DiffAttention

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALL = ["--device", "cpu", "--threads", "1", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Time single calls, and small arrays in place of large ones; leave the handlers of signals alone."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(benchmark, "_repeats", lambda *_: 1)
    way = benchmark.Way("small", "rate", lambda: torch.ones(8, 8) @ torch.ones(8, 8))
    monkeypatch.setattr(bench_attention, "matrix_product", lambda *_: (way, 1024.0))
    monkeypatch.setattr(bench_attention, "reading", lambda *_: (way, 256.0))


def written(folder: Path, name: str, printed: str) -> dict:
    """Return the report of a benchmark that has printed its tables and drawn its picture."""
    report = json.loads((folder / f"{name}.json").read_text())
    assert report["left_out"] == []
    assert {"date", "command", "hardware", "versions"} <= set(report)
    assert "\n|---" in printed
    assert not list(folder.glob("*.md"))
    assert (folder / f"{name}.png").stat().st_size > 10_000
    return report


@pytest.mark.quick("op")
@pytest.mark.parametrize("level", ["op", "module"])
def test_attention(level, monkeypatch, tmp_path, capsys):
    shapes = [Shape("tiny", 1, 6, 6, 5, 5, 64, True)]
    if level == "op":
        shapes += [Shape("grouped", 1, 2, 1, 5, 5, 8, True), Shape("decode", 1, 1, 1, 1, 9, 8, backward=False)]
    monkeypatch.setitem(bench_attention.SHAPES, ("cpu", level), shapes)
    monkeypatch.setattr(attention_modules.importlib.util, "find_spec", lambda name: None)
    assert bench_attention.main([*SMALL, "--level", level, "--output", str(tmp_path)]) == 0
    report = written(tmp_path, f"attention-cpu-float32-{level}", capsys.readouterr().out)
    timed = report["shapes"][0]["passes"]["forward and backward"]
    assert timed["ways"][timed["baseline"]]["ratio"] == 1.0
    assert timed["floor"] > 0
    assert not [way for way in timed["ways"].values() if "failed" in way]


@pytest.mark.slow
def test_models(tmp_path, capsys):
    assert bench_models.main([*SMALL, "--batch", "2", "--models", "debug", "--output", str(tmp_path)]) == 0
    report = written(tmp_path, "models-cpu-float32", capsys.readouterr().out)
    assert [entry["task"] for entry in report["tables"]] == ["training step", "inference"]
    assert all(entry["models"]["diff_vit_debug"]["ratio"] > 0 for entry in report["tables"])


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
def test_language(installed, monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench_language, "TRAINING", [(2, 8)])
    monkeypatch.setattr(bench_language, "PROMPTS", [4])
    if not installed:
        monkeypatch.setattr(bench_language.importlib.util, "find_spec", lambda name: None)
    assert bench_language.main([*SMALL, "--size", "debug", "--new", "8", "--output", str(tmp_path)]) == 0
    report = written(tmp_path, "language-cpu-float32", capsys.readouterr().out)
    assert [entry["task"] for entry in report["tables"]] == ["training", "decoding", "whole call", "linear"]
    assert report["baseline"] == ("HF Llama" if installed else "transformer-debug")
    assert report["tables"][0]["models"]["diff-debug"]["ratio"] > 0


@pytest.mark.slow
def test_steps_and_waits_of_an_unmodified_program(tmp_path):
    """Four batches that take 50 ms each to come, and four steps."""
    program = tmp_path / "program.py"
    program.write_text(
        "import time, torch\n"
        "weight = torch.nn.Parameter(torch.ones(1))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index): time.sleep(0.025); return torch.ones(1)\n"
        "for batch in torch.utils.data.DataLoader(Slow(), batch_size=2):\n"
        "    (weight * batch).sum().backward(); optimizer.step()\n"
    )
    noted = bench_programs.Programs(tmp_path, 2, 0).noted([str(program)])
    assert len(noted["steps"]) == len(noted["waits"]) == 4
    assert all(wait >= 0.05 for wait in noted["waits"])
    assert np.all(np.diff(noted["steps"]) >= 0.05)


def test_programs_are_compared_round_by_round():
    took = {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 3.0, 4.0]}
    results = {name: [bench_programs.Took(one, one / 4) for one in seconds] for name, seconds in took.items()}
    assert bench_programs.rows(results, 8).splitlines()[2:] == [
        "| ours | 2.0000 | 0.5000 | 4 | 1.00 | 1.00 to 1.00 |",
        "| theirs | 3.0000 | 0.7500 | 3 | 1.50 | 1.00 to 2.00 |",
    ]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("shards") / "train"
    images = ({"png": png(rng.integers(0, 256, (32, 32, 3))), "txt": "a digit"} for _ in range(128))
    write_shards(folder, ({"__key__": f"{n:03d}", **image} for n, image in enumerate(images)), per_shard=64)
    return folder


def test_data(shards, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_data.py", str(shards), "--rounds", "1"])
    bench_data.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if "ShardLoader" in line]
    assert len(rows) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_images_of_a_core(monkeypatch, tmp_path):
    other = SimpleNamespace(epoch=lambda clock: 100.0)
    monkeypatch.setattr(bench_images.openclip_versus, "running", lambda *_: contextlib.nullcontext(other))
    monkeypatch.setattr(bench_images, "EACH", 4)
    monkeypatch.setattr(bench_images, "BATCH", 4)
    row = bench_images.measure(tmp_path, 256, "python", rounds=1)
    assert all(row["ms an image"].values())
    assert row["images a second of a core"].pop("webdataset")["over webdataset's"] == 1
    assert {name.partition(",")[0] for name in row["images a second of a core"]} == {"OpenCLIP's", "ours"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_step(shards, monkeypatch, capsys):
    monkeypatch.setattr(bench_step, "make", lambda name, folder: shutil.copytree(shards.parent, folder))
    monkeypatch.setattr(bench_step, "WARM", 1)
    words = ["--batch", "4", "--steps", "8", "--every", "4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *words])
    bench_step.main()
    assert "a save takes" in capsys.readouterr().out


SHAPES = [
    Shape("V1", 2, 3, 3, 7, 7, 8),
    Shape("V1 causal, grouped", 2, 4, 2, 7, 7, 8, causal=True),
    Shape("V2 causal", 2, 4, 4, 7, 7, 8, causal=True, variant="v2"),
    Shape("V2 grouped", 1, 4, 2, 5, 5, 8, variant="v2"),
    Shape("decode", 2, 2, 2, 1, 9, 8, causal=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_formulation_computes_the_same(shape):
    inputs = inputs_of(shape, "cpu", torch.float64, grad=False)
    causal = shape.causal and shape.queries > 1
    expected = attention_ways.ours(*inputs, causal=causal, backend="eager")
    swapped = inputs._replace(q=attention_ways.half_split(inputs.q), k=attention_ways.half_split(inputs.k))
    compared = [way for way, variants in attention_ways.PEERS.values() if shape.variant in variants]
    assert len(compared) >= 3
    for way in compared:
        given = swapped if way is attention_ways.wide_calls else inputs
        # lambda is float32
        torch.testing.assert_close(way(*given, causal=causal), expected, atol=1e-6, rtol=1e-5)


def test_the_maps_module_computes_our_layer():
    layer = DiffAttention(attention_modules.WIDTH, attention_modules.HEADS, lambda_init=0.8, qkv_bias=True)
    module = attention_modules.MapsAttention(causal_length=5)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(module, name).load_state_dict(getattr(layer, name).state_dict())
    module.out_proj.load_state_dict(layer.proj.state_dict())
    with torch.no_grad():
        module.vectors.copy_(torch.stack([layer.lambda_q1, layer.lambda_k1, layer.lambda_q2, layer.lambda_k2]))
    x = torch.randn(2, 5, attention_modules.WIDTH)
    torch.testing.assert_close(module(x), layer(x, is_causal=True), atol=1e-5, rtol=1e-5)


def test_ratios_are_medians_over_rounds_and_a_failing_way_disturbs_no_other():
    def fail() -> None:
        raise ValueError("no such kernel\nmore")

    ways = [
        benchmark.Way("plain", "plain", int),
        benchmark.Way("fails", "peer", fail),
        benchmark.Way("ours", "ours", int),
    ]
    results = benchmark.in_turns(ways, "cpu", 4, least=0.0)
    assert results["fails"]["failed"] == "ValueError: no such kernel"
    results["plain"]["times_ms"], results["ours"]["times_ms"] = [1.0, 1.0, 2.0, 1.0], [2.0, 3.0, 2.0, 3.0]
    assert benchmark.add_ratios(results) == "plain"
    assert results["ours"]["ratio"] == 2.5
    assert results["ours"]["ratio_quartiles"] == [1.75, 3.0]
    parts = benchmark.remarks({"left_out": ["last"]}, [("row", results), ("other row", results)])
    assert "- `fails` failed: ValueError: no such kernel (row, other row)" in parts
    assert parts[-1] == "Not reached in the time given: last."


def test_commands_are_recorded_without_folders():
    given = ["/somewhere/bench_attention.py", "--quick", "--output", "/somewhere/else", "--shapes", "ViT 197"]
    assert machine.command(given) == "python scripts/benchmarks/bench_attention.py --quick --shapes 'ViT 197'"
