"""The experiments for a GPU: dry runs on a CPU, what their rules say, and that a run is trained once."""

import io
import json
import lzma
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gpu_noise
import gpu_runs
import gpu_sinks
import gpu_text
import gpu_tokens

EXPERIMENTS = {
    "tokens": (gpu_tokens.TOKENS_A_PARAMETER, gpu_tokens.report),
    "sinks": (gpu_sinks.CURES, gpu_sinks.report),
    "noise": (gpu_noise.NOISE, gpu_noise.report),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file as `gpu_text.py` writes it, of 2,000 random tokens a part."""
    draw, buffer = np.random.default_rng(0), io.BytesIO()
    np.savez(buffer, **{part: draw.integers(4096, size=2000, dtype=np.uint16) for part in gpu_text.TOKENS})
    file = tmp_path_factory.mktemp("gpu") / "text.xz"
    file.write_bytes(lzma.compress(buffer.getvalue()))
    return file


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_families_have_equal_parameters(name):
    experiment, _ = EXPERIMENTS[name]
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in experiment.create(family).parameters()) for family in experiment.families]
    assert max(sizes) < 1.005 * min(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_dry_run_trains_each_run_once(name, text, tmp_path, capsys):
    experiment, report = EXPERIMENTS[name]
    experiment = experiment.dry()
    planned = gpu_runs.plan(experiment, text).splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in planned[3:-1]] == list(experiment.families)
    gpu_runs.work(experiment, tmp_path, text, deadline=float("inf"))
    files = {file: file.read_text() for file in tmp_path.glob("*.json")}
    assert len(files) == len(experiment.tuning()) + len(experiment.seeds) * len(experiment.families)
    assert len(report(experiment, tmp_path).splitlines()) > len(experiment.families)
    capsys.readouterr()
    gpu_runs.work(experiment, tmp_path, text, deadline=float("inf"))
    assert not capsys.readouterr().out
    assert {file: file.read_text() for file in tmp_path.glob("*.json")} == files


def test_an_answer_follows_its_key_in_noise():
    data = gpu_noise.Noise(None, gpu_noise.NOISE.dry(), "test", torch.device("cpu"))
    inputs, targets = data.draw(3, 256, 4, torch.Generator().manual_seed(0)).long()
    for row, wanted in zip(inputs, targets, strict=True):
        for place in (wanted >= 0).nonzero().flatten():
            key = row[place].item()
            marked = [i for i in range(1, place) if row[i] == key and row[i - 1] == gpu_noise.MARK]
            assert row[marked[0] + 1] == wanted[place]
    assert (targets >= 0).sum(dim=1).tolist() == [4, 4, 4]


def fill(experiment, folder, measured):
    for run in experiment.tuning():
        (folder / f"{run.name}.json").write_text(json.dumps({"diverged": "", "losses": [run.rate]}))
    for run in experiment.confirming(folder):
        (folder / f"{run.name}.json").write_text(json.dumps({"seed": run.seed, "diverged": "", **measured(run)}))


@pytest.mark.parametrize(
    ("difference", "claim"),
    [(-0.05, "V1 pays when trained long"), (0.05, "behind at 3M at any length"), (0.01, "no claim")],
)
def test_the_rule_of_tokens(tmp_path, difference, claim):
    def measured(run):
        return {"losses": 3 * [3 + 0.001 * run.seed + (difference + 0.002 * run.seed % 3) * (run.family == "V1")]}

    fill(gpu_tokens.TOKENS_A_PARAMETER, tmp_path, measured)
    assert gpu_tokens.report(gpu_tokens.TOKENS_A_PARAMETER, tmp_path).splitlines()[-1] == claim


def test_the_rule_of_sinks(tmp_path):
    def measured(run):
        sinks, loss = {"plain": (0.4, 3), "V2": (0.1, 3.02), "gate": (0.2, 3.0), "sink": (0.0, 2.9)}[run.family]
        failed = {"diverged": "the loss is nan"} if run == gpu_sinks.CURES.confirming(tmp_path)[-1] else {}
        return {"sinks": sinks, "losses": [loss], "largest activation": 1, "long loss": 3} | failed

    fill(gpu_sinks.CURES, tmp_path, measured)
    verdicts = ["V2 works and is not free", "gate does not work and is free", "sink does not work and is not free"]
    assert gpu_sinks.report(gpu_sinks.CURES, tmp_path).splitlines()[-3:] == verdicts
    fill(gpu_sinks.CURES, tmp_path, lambda run: measured(run) | {"sinks": 0.09})
    assert gpu_sinks.report(gpu_sinks.CURES, tmp_path).endswith("no claim")


def test_the_rule_of_noise(tmp_path):
    def measured(run):
        right = {"plain": 0.6, "V1": 0.66, "V2": 0.62, "gate": 0.9}[run.family]
        found = {kind: {"2048": 1, "4096": right, "8192": 0.4, "16384": 0} for kind in ("needles", "recall")}
        return {"diverged": "the loss is nan"} if run == gpu_noise.NOISE.confirming(tmp_path)[-1] else found

    fill(gpu_noise.NOISE, tmp_path, measured)
    assert gpu_noise.report(gpu_noise.NOISE, tmp_path).endswith("longer than plain at 4096: V1")


def test_options_before_the_word_reach_the_processes(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("subprocess.Popen", lambda words: started.append(words) or SimpleNamespace(wait=lambda: 0))
    monkeypatch.setattr("sys.argv", ["gpu_noise.py", "--dry", "--output", str(tmp_path), "run"])
    gpu_runs.run_experiment(gpu_noise.NOISE, None, lambda *_: "")
    assert {"work", "--dry", str(tmp_path)} <= {*started[0]}
