"""The language benchmark's own arithmetic and files, on tiny shapes: no time is asserted."""

import json
import signal
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts" / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    """The scripts import one another as they do when one is run; no handler of signals outlives a test."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.fixture
def _tiny(monkeypatch):
    """Short sequences, and timings of single calls."""
    import bench_language as bench
    import benchmark

    monkeypatch.setattr(bench, "TRAINING", [(2, 8)])
    monkeypatch.setattr(bench, "PROMPTS", [4])
    monkeypatch.setattr(benchmark, "_repeats", lambda *_: 1)


GIVEN = ["--device", "cpu", "--threads", "1", "--rounds", "2", "--size", "debug", "--new", "8"]


@pytest.mark.usefixtures("_tiny")
def test_the_benchmark_writes_its_files(tmp_path, capsys):
    pytest.importorskip("transformers")
    import bench_language as bench

    assert bench.main([*GIVEN, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "language-cpu-float32.json").read_text())
    assert [entry["task"] for entry in report["tables"]] == ["training", "decoding", "whole call", "linear"]
    assert report["left_out"] == []
    assert {"date", "command", "hardware", "versions", "parameters"} <= set(report)
    names = ["HF Llama", "HF DiffLlama", "transformer-debug", "diff-debug", "diffv2-debug"]
    for entry in (report["tables"][0], report["tables"][2]):
        assert list(entry["models"]) == names
        assert entry["baseline"] == "HF Llama"
        for own in entry["models"].values():
            assert own["speed"]["HF DiffLlama"] > 0
        assert entry["models"]["HF DiffLlama"]["speed"]["HF DiffLlama"] == 1.0
    assert report["parameters"]["HF Llama"] == report["parameters"]["transformer-debug"]
    assert report["tables"][0]["models"]["diff-debug"]["peak_bytes"] > 0
    page = (tmp_path / "language-cpu-float32.md").read_text()
    assert "## Training, 2 x 8" in page
    assert "| diffv2-debug | 0." in page
    assert page.strip() in capsys.readouterr().out
    assert (tmp_path / "language-cpu-float32.png").stat().st_size > 10_000


@pytest.mark.usefixtures("_tiny")
def test_without_transformers_the_columns_say_so(monkeypatch, tmp_path):
    import bench_language as bench

    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench.main([*GIVEN, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "language-cpu-float32.json").read_text())
    assert report["baseline"] == "transformer-debug"
    assert report["tables"][0]["models"]["diff-debug"]["ratio"] > 0
    page = (tmp_path / "language-cpu-float32.md").read_text()
    assert "| HF DiffLlama | not installed |" in page
    row = next(line for line in page.splitlines() if line.startswith("| diff-debug |"))
    assert row.count("not installed") == 2


def test_ours_and_hugging_face_have_the_same_loss_and_tokens():
    """Both losses are the mean cross entropy of a model's own logits, and both decode the likeliest token."""
    pytest.importorskip("transformers")
    import bench_language as bench

    built = bench.Built("debug", "cpu")
    tokens = torch.randint(3, 90, (2, 9))
    for name in built.names:
        model = built[name].eval()
        with torch.no_grad():
            logits = model(tokens[:, :-1])
            logits = logits.logits if name in bench.PEERS else logits
            expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            torch.testing.assert_close(bench.loss_of(name, model, tokens), expected, atol=1e-5, rtol=1e-5)
            last = model(tokens)
            best = (last.logits if name in bench.PEERS else last)[0, -1].argmax().item()
        found = bench.decoding(name, model, tokens[:1], 5)
        assert len(found) == 5
        assert found[0] == best


def test_decoding_alone_and_speeds():
    import bench_language as bench

    first = {"group": "HF Llama", "kernel": "first", "role": "plain", "times_ms": [1.0, 2.0, 1.0]}
    whole = {"group": "HF Llama", "kernel": "whole", "role": "plain", "times_ms": [5.0, 6.0, 9.0]}
    alone = bench.without_first(first, whole)
    assert alone["times_ms"] == [4.0, 4.0, 8.0]
    assert "as long as the whole" in bench.without_first(whole, first)["failed"]
    assert bench.without_first({**first, "failed": "why"}, whole)["failed"] == "why"
    found = {"HF Llama": alone, "diff-3m": {"times_ms": [2.0, 4.0, 2.0]}, "broken": {"failed": "why"}}
    bench.speeds(found)
    assert found["diff-3m"]["speed"] == {"HF Llama": 2.0}
    assert "speed" not in found["broken"]


def test_too_many_new_tokens_are_refused_before_anything_is_timed(tmp_path, capsys):
    import bench_language as bench

    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--size", "debug", "--new", "2000", "--output", str(tmp_path)])
    assert "--new 2000 makes 3000 tokens, over the models' 2048" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
