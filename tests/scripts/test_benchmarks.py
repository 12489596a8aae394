"""The smallest run of each benchmark. No time is asserted, since none is to be trusted here."""

import json
import signal

import pytest
import torch

import attention_modules
import bench_attention
import benchmark
from attention_modules import Shape
from diffvision.nn import DiffAttention

SMALL = ["--device", "cpu", "--threads", "1", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Time single calls, and small arrays in place of large ones; leave the handlers of signals alone."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(benchmark, "_repeats", lambda *_: 1)
    way = benchmark.Way("small", "rate", lambda: torch.ones(8, 8) @ torch.ones(8, 8))
    monkeypatch.setattr(bench_attention, "matrix_product", lambda *_: (way, 1024.0))


def test_the_benchmark_of_attention_writes_a_report(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(bench_attention.SHAPES, "cpu", [Shape(1, 5, causal=True)])
    monkeypatch.setattr(attention_modules.importlib.util, "find_spec", lambda name: None)
    assert bench_attention.main([*SMALL, "--output", str(tmp_path)]) == 0
    assert "\n|---" in capsys.readouterr().out
    assert (tmp_path / "attention-cpu-float32-module.png").stat().st_size > 10_000
    report = json.loads((tmp_path / "attention-cpu-float32-module.json").read_text())
    assert report["left_out"] == []
    assert {"date", "command", "hardware", "versions"} <= set(report)
    timed = report["shapes"][0]["passes"]["forward and backward"]
    assert timed["ways"][timed["baseline"]]["ratio"] == 1.0
    assert timed["floor"] > 0
    assert not [way for way in timed["ways"].values() if "failed" in way]


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

    ways = (("plain", "plain", int), ("fails", "peer", fail), ("ours", "ours", int))
    results = benchmark.in_turns([benchmark.Way(*way) for way in ways], "cpu", 4, least=0.0)
    assert results["fails"]["failed"] == "ValueError: no such kernel"
    results["plain"]["times_ms"], results["ours"]["times_ms"] = [1.0, 1.0, 2.0, 1.0], [2.0, 3.0, 2.0, 3.0]
    assert benchmark.add_ratios(results) == "plain"
    assert results["ours"]["ratio"] == 2.5
    assert results["ours"]["ratio_quartiles"] == [1.75, 3.0]
    parts = benchmark.remarks({"left_out": ["last"]}, [("row", results), ("other row", results)])
    assert "- `fails` failed: ValueError: no such kernel (row, other row)" in parts
    assert parts[-1] == "Not reached in the time given: last."
