"""The benchmarks' own arithmetic and files, on tiny shapes: no time is asserted, since none is to be trusted here."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from diffvision.nn import DiffAttention
from diffvision.ops.attention import BACKENDS

SCRIPTS = Path(__file__).parents[1] / "scripts" / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    """The scripts import one another as they do when one is run; no handler of signals outlives a test."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(signal, "signal", lambda *_: None)


SHAPES = {
    "V1": {"batch": 2, "heads": 3, "kv_heads": 3, "queries": 7, "keys": 7, "head_dim": 8},
    "V1 causal, grouped": {
        "batch": 2,
        "heads": 4,
        "kv_heads": 2,
        "queries": 7,
        "keys": 7,
        "head_dim": 8,
        "causal": True,
    },
    "V2 causal": {
        "batch": 2,
        "heads": 4,
        "kv_heads": 4,
        "queries": 7,
        "keys": 7,
        "head_dim": 8,
        "causal": True,
        "variant": "v2",
    },
    "V2 grouped": {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 5, "keys": 5, "head_dim": 8, "variant": "v2"},
    "decode": {"batch": 2, "heads": 2, "kv_heads": 2, "queries": 1, "keys": 9, "head_dim": 8, "causal": True},
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_formulation_computes_the_same(name):
    import attention_ways as a

    shape = a.Shape(name, **SHAPES[name])
    inputs = a.Inputs.of(shape, "cpu", torch.float64, grad=False)
    causal = shape.causal and shape.queries > 1
    expected = a.ours(*inputs, causal=causal, backend="eager")
    swapped = inputs._replace(q=a.half_split(inputs.q), k=a.half_split(inputs.k))
    assert expected.shape == (shape.batch, shape.queries, shape.heads * shape.value_dim)
    compared = [way for way, variants in a.PEERS.values() if shape.variant in variants]
    assert len(compared) >= 3
    for way in compared:
        own = swapped if way is a.wide_calls else inputs
        torch.testing.assert_close(way(*own, causal=causal), expected, atol=1e-6, rtol=1e-5)  # lambda in float32
    heads = a.plain(*inputs, causal=causal)
    assert heads.shape == (shape.batch, shape.queries, 2 * shape.heads * shape.head_dim)


def test_the_maps_module_computes_our_layer():
    """DiffCLIP's formulation, with our layer's parameters in it: what is compared is the same function."""
    import attention_modules as a

    layer = DiffAttention(a.WIDTH, a.HEADS, lambda_init=0.8, qkv_bias=True)
    module = a.MapsAttention(causal_length=5)
    for own in ("q_proj", "k_proj", "v_proj"):
        getattr(module, own).load_state_dict(getattr(layer, own).state_dict())
    module.out_proj.load_state_dict(layer.proj.state_dict())
    with torch.no_grad():
        module.vectors.copy_(torch.stack([layer.lambda_q1, layer.lambda_k1, layer.lambda_q2, layer.lambda_k2]))
    x = torch.randn(2, 5, a.WIDTH)
    torch.testing.assert_close(module(x), layer(x, is_causal=True), atol=1e-5, rtol=1e-5)


def test_counts_of_the_floor():
    from attention_ways import Shape
    from bench_attention import cache_bytes, floor_counts

    def counts(keys: int, backward: bool, variant: str = "v1", device: str = "cuda") -> tuple[float, float]:
        shape = Shape("", 1, 1, 1, keys, keys, 64, variant=variant)
        own, plain = floor_counts(shape, backward, device)
        return own / (keys**2 * 64), plain / (keys**2 * 64)

    assert counts(197, False) == (8, 8)
    assert counts(197, True) == (28, 28)
    assert counts(1024, False) == (12, 8)
    assert counts(1024, True) == (32, 28)  # 1.14
    assert counts(1024, True, device="cpu") == (28, 28)
    assert counts(197, True, "v2") == (22, 28)  # scores 4, value 2; backward 4 + 2 + 2 + 4 + 4
    causal = Shape("", 2, 3, 3, 4, 6, 64, causal=True)
    assert causal.pairs == 2 * 3 * (3 + 4 + 5 + 6)
    decode = Shape("", 2, 4, 2, 1, 100, 64, backward=False)
    assert cache_bytes(decode, 2) == 2 * 2 * 100 * (2 * 64 + 128) * 2


def test_ways_take_turns_and_failures_are_told():
    from benchmark import Way, add_ratios, fastest, in_turns, reasons

    calls: list[str] = []

    def failing() -> None:
        raise ValueError("no such kernel\nmore")

    ways = [
        Way("plain", "plain", lambda: calls.append("a"), kernel="one"),
        Way("plain", "plain", lambda: calls.append("b"), kernel="two"),
        Way("fails", "peer", failing),
        Way("cannot", "peer", None, cannot="too long"),
        Way("ours", "ours", lambda: calls.append("c")),
    ]
    found = in_turns(ways, "cpu", 4, least=0.0, peak=lambda way: 7)
    assert "".join(calls[6:]) == "abcbcacababc"  # after two calls of each to warm up
    assert found["fails"]["failed"] == "ValueError: no such kernel"
    assert "times_ms" not in found["fails"]
    assert found["cannot"]["cannot"] == "too long"
    assert found["ours"]["peak_bytes"] == 7
    found["plain: one"]["times_ms"] = [2.0, 2.0, 4.0, 2.0]
    found["plain: two"]["times_ms"] = [1.0, 1.0, 2.0, 1.0]
    found["ours"]["times_ms"] = [2.0, 3.0, 2.0, 3.0]
    assert add_ratios(found) == "plain: two"
    assert found["ours"]["ratio"] == 2.5
    assert found["ours"]["ratio_quartiles"] == [1.75, 3.0]
    assert fastest(found, group="plain")["kernel"] == "two"
    assert fastest(found, role="peer") is None
    told = reasons([("row", found), ("other row", found)])
    assert "- `fails` failed: ValueError: no such kernel (row, other row)" in told
    assert in_turns(ways[:1], "cpu", 9, seconds=0.0, least=0.0)["plain: one"]["repeats"] == 1
    assert len(in_turns(ways[:1], "cpu", 9, seconds=0.0, least=0.0)["plain: one"]["times_ms"]) == 3


def test_peak_memory_is_that_of_the_allocator():
    from benchmark import peak_memory

    def call() -> torch.Tensor:
        first = torch.empty(1 << 20)
        second = torch.empty(3 << 20)
        del first
        return torch.cat([second[: 1 << 18]])

    assert peak_memory(call, "cpu") == 16 << 20


def test_commands_are_recorded_without_folders():
    from benchmark import command

    given = [
        "/somewhere/scripts/benchmarks/bench_attention.py",
        "--quick",
        "--output",
        "/somewhere/else",
        "--shapes",
        "ViT 197",
    ]
    assert command(given) == "python scripts/benchmarks/bench_attention.py --quick --shapes 'ViT 197'"


@pytest.fixture
def _quick(monkeypatch):
    """Timings of single calls, and a small array and matrix product in place of large ones."""
    import bench_attention
    import benchmark

    way = benchmark.Way("small", "rate", lambda: torch.ones(8, 8) @ torch.ones(8, 8))
    monkeypatch.setattr(bench_attention, "matrix_product", lambda *_: (way, 1024.0))
    monkeypatch.setattr(bench_attention, "reading", lambda *_: (way, 256.0))
    monkeypatch.setattr(benchmark, "_repeats", lambda *_: 1)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("level", ["op", "module"])
def test_the_attention_benchmark_writes_its_files(level, monkeypatch, tmp_path, capsys):
    import attention_modules
    import bench_attention as bench
    from attention_ways import Shape

    shapes = [Shape("tiny", 1, 6, 6, 5, 5, 64, True)]
    if level == "op":
        shapes += [Shape("grouped", 1, 2, 1, 5, 5, 8, True), Shape("decode", 1, 1, 1, 1, 9, 8, backward=False)]
    monkeypatch.setitem(bench.SHAPES, ("cpu", level), shapes)
    monkeypatch.setattr(attention_modules.importlib.util, "find_spec", lambda name: None)
    assert (
        bench.main(["--device", "cpu", "--threads", "1", "--rounds", "2", "--level", level, "--output", str(tmp_path)])
        == 0
    )
    name = f"attention-cpu-float32-{level}"
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert [shape["name"] for shape in report["shapes"]] == [shape.name for shape in shapes]
    assert report["left_out"] == []
    assert {"date", "command", "hardware", "versions"} <= set(report)
    found = report["shapes"][0]["passes"]["forward and backward"]
    assert found["baseline"] == "plain"
    assert found["ways"]["plain"]["ratio"] == 1.0
    assert found["floor"] > 0
    assert not [own for own in found["ways"].values() if "failed" in own]
    mine = [own for own in found["ways"].values() if own["group"] in ("auto", "ours, V1")]
    assert len(mine) == 1
    assert mine[0]["kernel"] in BACKENDS
    assert mine[0]["peak_bytes"] > 0
    page = (tmp_path / f"{name}.md").read_text()
    assert "| tiny | 1 x 6 x 5 x 64 causal |" in page
    assert ("transformers is not installed" in page) == (level == "module")
    assert page.strip() in capsys.readouterr().out
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.usefixtures("_quick")
def test_the_models_benchmark_writes_its_files(tmp_path, capsys):
    import bench_models as bench

    given = ["--device", "cpu", "--threads", "1", "--rounds", "2", "--batch", "2", "--models", "debug"]
    assert bench.main([*given, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "models-cpu-float32.json").read_text())
    assert [entry["task"] for entry in report["tables"]] == ["training step", "inference"]
    for entry in report["tables"]:
        assert entry["baseline"] == "plain_vit_debug"
        assert entry["models"]["diff_vit_debug"]["ratio"] > 0
    page = (tmp_path / "models-cpu-float32.md").read_text()
    assert "| diff_vit_debug | 0.3 M |" in page
    assert page.strip() in capsys.readouterr().out
    assert (tmp_path / "models-cpu-float32.png").stat().st_size > 10_000


def test_a_training_step_trains_and_inference_does_not():
    import argparse

    import bench_models as bench

    args = argparse.Namespace(device="cpu", dtype=torch.float32)
    model = bench.DEBUG.models[1].create()
    before = [p.detach().clone() for p in model.parameters()]
    bench.inference(bench.DEBUG, model, 2, args)()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    bench.training(bench.DEBUG, model, 2, args)()
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_clip_family_loss_is_the_contrastive_one():
    """On OpenCLIP's smallest of our models: the loss of open_clip itself."""
    import open_clip

    import bench_models as bench

    model = bench.open_clip_model("DiffCLIP-debug")
    size = open_clip.get_model_config("DiffCLIP-debug")["vision_cfg"]["image_size"]
    length = open_clip.get_model_config("DiffCLIP-debug")["text_cfg"]
    images = torch.randn(3, 3, size, size)
    texts = torch.randint(1, length["vocab_size"], (3, length["context_length"]))
    with torch.no_grad():
        expected = open_clip.loss.ClipLoss()(*model(images, texts)[:3])
        torch.testing.assert_close(bench.clip_loss(model, (images, texts)), expected)


def test_the_check_merges_what_its_parts_left(tmp_path):
    from gpu_report import merge

    (tmp_path / "parts.tsv").write_text("tests\t1\t12\nattention-op\t124\t150\nmodels\t0\t3\n")
    (tmp_path / "attention-op.log").write_text(f"{tmp_path}/x " + "end " * 10)
    (tmp_path / "models-cuda-bfloat16.json").write_text('{"benchmark": "models"}')
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="assert 1 == 2&#10;more"/></testcase>'
        '<testcase classname="a" name="broken"><error message="boom"/></testcase>'
        '<testcase classname="a" name="not here"><skipped message="no flash"/></testcase></testsuite></testsuites>'
    )
    merged = merge(tmp_path)
    assert merged["tests"] == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": {"a::bad": "assert 1 == 2", "a::broken": "boom"},
        "skips": {"no flash": 1},
    }
    assert merged["parts"]["attention-op"]["timed_out"] is True
    assert merged["parts"]["attention-op"]["log_end"].endswith("end end ")
    assert str(tmp_path) not in json.dumps(merged)
    assert merged["parts"]["models"] == {"exit_status": 0, "seconds": 3}
    assert merged["benchmarks"] == {"models-cuda-bfloat16": {"benchmark": "models"}}
    (tmp_path / "tests.xml").unlink()
    assert merge(tmp_path)["tests"] is None


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU")
def test_the_check_says_that_there_is_no_gpu(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in ("DEVICE", "QUICK", "WHEELS")}
    command = ["bash", str(SCRIPTS / "gpu_check.sh"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "no GPU" in done.stderr
    assert not list(tmp_path.iterdir())
