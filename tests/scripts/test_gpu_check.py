"""`scripts/gpu_check.sh` and its parts without a GPU; nothing is timed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpu_layer
import gpu_results

ROOT = Path(__file__).parents[2]
CHECK = ["bash", str(ROOT / "scripts/gpu_check.sh")]


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
