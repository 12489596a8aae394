"""`scripts/gpu_check.sh` and its parts without a GPU; nothing is timed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpu_layer

ROOT = Path(__file__).parents[2]
CHECK = ["bash", str(ROOT / "scripts/gpu_check.sh")]


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["tests", "layer", "steps", "fits"])
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
