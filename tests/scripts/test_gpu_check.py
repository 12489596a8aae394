"""`scripts/gpu_check.sh` and its parts without a GPU; nothing is timed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpu_fits
import gpu_layer
import gpu_results
import gpu_steps
import gpu_wheels
from diffvision.data import ShardSet

ROOT = Path(__file__).parents[2]
CHECK = ["bash", str(ROOT / "scripts/gpu_check.sh")]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU")
def test_it_says_that_there_is_no_gpu(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in ("DEVICE", "QUICK", "WHEELS")}
    done = subprocess.run(
        [*CHECK, "tests", str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1
    assert "no GPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_its_parts_fit_fifteen_minutes():
    script = Path(CHECK[1]).read_text()
    seconds = [int(number) for number in re.findall(r"limit=(\d+) ;;", script)]
    assert len(seconds) == 4
    assert sum(seconds) <= 12 * 60  # the machine starts and Python imports in the rest


@pytest.mark.parametrize(
    "part",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tests", "layer")),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("steps", "fits")),
    ],
)
def test_each_part_passes_without_a_gpu(part, tmp_path):
    environment = os.environ | {"DEVICE": "cpu", "QUICK": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*CHECK, part, str(tmp_path)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    if part == "tests":
        rows = [json.loads(line) for line in (tmp_path / "tests.jsonl").read_text().splitlines()]
        assert {row["outcome"] for row in rows[1:]} == {"started", "passed"}
    else:
        rows = [json.loads((tmp_path / f"{part}.json").read_text())]
    assert {"date", "hardware", "versions"} <= set(rows[0])
    assert "failed" not in json.dumps(rows)


def report(nodeid, when="call", outcome="passed", text=""):
    about = {"passed": outcome == "passed", "failed": outcome == "failed", "outcome": outcome, "longreprtext": text}
    return SimpleNamespace(nodeid=nodeid, when=when, duration=0.1, user_properties=[("mib", 5.0)], **about)


def test_results_outlive_their_process_and_a_later_one_goes_on_behind_them(tmp_path):
    file, session = tmp_path / "tests.jsonl", SimpleNamespace(shouldstop=False, exitstatus=0)
    results = gpu_results.Results(file, is_worker=False)
    results.pytest_sessionstart(session)
    results.pytest_runtest_logstart("a")
    results.pytest_runtest_logstart("b")  # at the same time; its process dies
    for phase in ("setup", "call", "teardown"):
        results.pytest_runtest_logreport(report("a", phase))
    gpu_results.Results(file, is_worker=True).pytest_runtest_logstart("c")  # its controller writes
    later = gpu_results.Results(file, is_worker=False)
    later.pytest_sessionstart(session)
    items = [SimpleNamespace(nodeid=name) for name in "abc"]
    later.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["c"]
    later.pytest_runtest_logstart("c")
    later.pytest_runtest_logreport(report("c", outcome="failed", text="assert 1 == 2"))
    assert not session.shouldstop
    lost = "CUDA error: an illegal memory access was encountered"
    later.pytest_runtest_logreport(report("c", "teardown", "failed", lost))
    assert session.shouldstop
    rows = later.read()
    assert {name: row["outcome"] for name, row in rows.items()} == {"a": "passed", "b": "started", "c": "failed"}
    assert rows["a"]["mib"] == 5.0
    later.pytest_sessionfinish(session, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED


def test_every_way_of_a_layer_computes_the_same():
    shape = gpu_layer.QUICK["tiny"]
    given = gpu_layer.Projections.random(shape, "cpu", torch.float64)
    size = (2, shape.heads, shape.head_dim)

    def halves(x):
        return x.unflatten(-1, (size[1], 2, size[2])).transpose(-2, -3).flatten(-3)

    others = given._replace(q=halves(given.q), k=halves(given.k))
    for name, (way, _) in gpu_layer.WAYS.items():
        if name != "plain":
            expected = (given.v1_ours if name.startswith("V1") else given.v2_ours)("eager")
            out = way(others if way is gpu_layer.Projections.v1_halves else given)
            torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)  # lambda is float32


def test_steps_that_were_measured_are_not_measured_again(tmp_path, monkeypatch):
    setting = gpu_steps.vit_setting(2, True)
    file = gpu_steps.file_of(tmp_path, setting, "diff_vit_debug")
    file.parent.mkdir()
    started = []
    monkeypatch.setattr(gpu_steps.subprocess, "run", lambda command, **_: started.append(command))
    for measured, times in (
        ({"eager": {}}, 1),
        ({"eager": {}, "compiled": {"failed": "no memory"}}, 2),
        ({"eager": {}, "compiled": {}}, 2),
    ):
        file.write_text(json.dumps(measured))
        found = gpu_steps.in_a_process(["--quick"], file, setting, "diff_vit_debug", float("inf"))
        assert found == measured
        assert len(started) == times
    assert started[0][-3:] == ["--only", setting.name, "diff_vit_debug"]


def test_models_compile_together_and_are_timed_alone(tmp_path):
    with gpu_steps.turn(tmp_path, alone=False), gpu_steps.turn(tmp_path, alone=False):
        pass
    timed = threading.Event()

    def measure():
        with gpu_steps.turn(tmp_path, alone=True):
            timed.set()

    with gpu_steps.turn(tmp_path, alone=False):
        other = threading.Thread(target=measure)
        other.start()
        assert not timed.wait(0.3)
    other.join(10)
    assert timed.is_set()


# Logs two steps each time it runs, and the first time waits for SIGTERM behind them.
PROGRAM = """
import signal, sys, time
from pathlib import Path
runs = Path(sys.argv[sys.argv.index("--trainer.logger.save_dir") + 1])
first = not runs.exists()
runs.mkdir(exist_ok=True)
steps = (0, 1) if first else (2, 3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
(runs / f"metrics{steps[0]}.csv").write_text("step,train/loss\\n" + "".join(f"{step},{step}.5\\n" for step in steps))
time.sleep(60 * first)
"""


def test_a_fit_is_ended_and_resumed(tmp_path):
    fit = gpu_fits.Fit((), {}, steps=1, program=("-c", PROGRAM), resume=True)
    result = gpu_fits.run(fit, tmp_path / "run", "cpu", float("inf"))
    assert result["ended by SIGTERM"]["exit_status"] == 128 + signal.SIGTERM
    assert result["exit_status"] == 0
    assert result["losses"] == {0: 0.5, 1: 1.5, 2: 2.5, 3: 3.5}
    assert not gpu_fits.has_failed(result)
    failed = gpu_fits.run(fit._replace(program=("-c", "1 / 0"), resume=False), tmp_path / "bad", "cpu", float("inf"))
    assert "ZeroDivisionError" in failed["failed"]
    assert gpu_fits.has_failed(failed)
    missing = gpu_fits.run(fit._replace(cannot="flash_attn is not installed"), tmp_path / "none", "cpu", 0)
    assert missing == {"cannot": "flash_attn is not installed"}


def test_made_jpegs_are_shards(tmp_path):
    gpu_fits.make_jpegs(tmp_path / "jpegs", 2, 3)
    assert len(ShardSet([tmp_path / "jpegs"])) == 6


def test_wheels_are_what_a_bare_machine_lacks(capsys):
    assert gpu_wheels.main(["--flash"]) == 0
    names = {line.partition("==")[0] for line in capsys.readouterr().out.split()}
    assert {"open-clip-torch", "webdataset", "jsonargparse", "flash-attn-4"} <= names
    assert not names & {"torch", "triton", "diffvision", "numpy"}


def numbers(value):
    """Return all numbers in a JSON's value."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers(one)
    elif isinstance(value, int | float):
        yield value


def rates_and_sizes(settings):
    """Return items per second and GiB of each step."""
    for setting in settings.values():
        for mode in (mode for model in setting["models"].values() for mode in model.values() if "median_ms" in mode):
            yield from (1e3 * setting["count"] / mode["median_ms"], mode["peak_bytes"] / 2**30)


def test_the_page_of_a_gpu_has_the_numbers_of_its_file():
    folder = ROOT / "docs/benchmarks"
    earlier, later = (json.loads((folder / name).read_text()) for name in ("gpu-h200.json", "gpu-2026-11-28.json"))
    found = [*numbers(earlier), *numbers(later), *rates_and_sizes(later["steps"]["settings"])]
    lines = (folder / "gpu.md").read_text().splitlines()
    rows = [
        line.split("|")[2:-1] for line in lines if line.startswith("| ") and "↓" not in line and "→ last" not in line
    ]
    shown = [text for row in rows for cell in row for text in re.findall(r"[\d,]*\.?\d+", cell)]
    assert len(shown) > 50
    for text in shown:
        half = 0.501 * 10 ** -len(text.partition(".")[2])
        assert any(abs(one - float(text.replace(",", ""))) < half for one in found), text
