"""The fused kernels compiled for Hopper, which needs no GPU: what each launch configuration uses of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.nightly

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_KIB = 227  # a program's, on Hopper
# What a pass of an innermost loop may read back, and write, for want of registers, and what a thread may keep in memory
# in all. The language and whole-row kernels come near it; most are at zero.
LOOP_LOADS, LOOP_STORES, STACK_BYTES = 72, 16, 704


@pytest.fixture(scope="module")
def used() -> list[dict]:
    """In a process of its own: this one may have imported triton for its interpreter."""
    if not all((TOOLS / tool).exists() for tool in ("ptxas", "cuobjdump", "nvdisasm")):
        pytest.skip("triton came without ptxas, cuobjdump or nvdisasm")
    script = Path(__file__).parents[2] / "scripts" / "benchmarks" / "triton_resources.py"
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=compiling)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def names(rows: list[dict]) -> list[str]:
    return [f"{row['case']}: {row['kernel']} {row}" for row in rows]


def test_every_kernel_is_there(used):
    assert {row["kernel"].split()[0] for row in used} == {
        "forward", "backward", "delta", "backward_keys", "backward_queries",
    }  # fmt: skip


def test_tiles_fit_the_shared_memory(used):
    assert names([row for row in used if row["shared_kib"] > SHARED_KIB]) == []


def test_registers_hold_what_loops_use(used):
    over = [row for row in used if row["loop_loads"] > LOOP_LOADS or row["loop_stores"] > LOOP_STORES]
    assert names(over + [row for row in used if row["stack_bytes"] > STACK_BYTES]) == []


def test_half_precision_runs_on_tensor_cores(used):
    products = [row for row in used if row["half"] and row["kernel"] != "delta" and row["tiles"][1] >= 64]
    assert len(products) > 30
    assert names([row for row in products if row["wgmma"] == 0]) == []
