"""The fused kernels compiled for every card, which needs no GPU: what each launch configuration uses of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffvision.ops.attention.shared_memory import BY_CAPABILITY

triton = pytest.importorskip("triton")
resources = pytest.importorskip("triton_resources")

ROOT = Path(__file__).parents[2]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
RECORDED = json.loads((ROOT / "docs/benchmarks/triton_resources.json").read_text())["rows"]
# What a pass of an innermost loop may read back, and write, for want of registers, and what a thread may keep in memory
# in all. The language and whole-row kernels come near it; most are at zero. Two are known to spill more: with any mask
# on 8.0 ptxas takes few registers, and 10.0 has Hopper's tiles, which nobody has fitted to it.
LOOP_LOADS, LOOP_STORES, STACK_BYTES = 72, 20, 704
# (card, cases): the ones that come nearest to the shared memory of the smallest cards, and all.
SOME = (89, ["ViT", "language", "decoding, 32 x 128 + 256, masked"])
COMPILED = [pytest.param(SOME, marks=pytest.mark.slow, id="some")]
COMPILED += [pytest.param((card, []), marks=pytest.mark.nightly, id=str(card)) for card in BY_CAPABILITY]


@pytest.fixture(scope="module", params=COMPILED)
def used(request) -> list[dict]:
    """In a process of its own: this one may have imported triton for its interpreter."""
    if not all((TOOLS / tool).exists() for tool in ("ptxas", "cuobjdump", "nvdisasm")):
        pytest.skip("triton came without ptxas, cuobjdump or nvdisasm")
    card, cases = request.param
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, resources.__file__, "--cards", str(card), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=compiling)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def names(rows: list[dict]) -> list[str]:
    return [f"{row['card']}, {row['case']}: {row['kernel']} {row}" for row in rows]


def test_tiles_fit_the_shared_memory_and_the_registers(used):
    assert {"rows.forward", "streaming.backward_queries", "decode._split"} <= {row["kernel"] for row in used}
    assert names([row for row in used if not row["fits"]]) == []
    held = [row for row in used if row["card"] != 100 and not (row["card"] == 80 and "any mask" in row["case"])]
    over = [row for row in held if row["loop_loads"] > LOOP_LOADS or row["loop_stores"] > LOOP_STORES]
    assert names(over + [row for row in held if row["stack_bytes"] > STACK_BYTES]) == []
    # Of decoding the widest float32 tiles, whose products are plain arithmetic, leave a few words out; nothing else.
    decoding = [row for row in used if row["kernel"] == "decode._split"]
    assert names([row for row in decoding if row["stack_bytes"] > (16 if "float32" in row["case"] else 0)]) == []
    halves = [row for row in used if row["half"] and row["kernel"] != "streaming.delta"]
    assert names([row for row in halves if not row["tensor_cores"]]) == []


@pytest.mark.parametrize("card", BY_CAPABILITY)
def test_recorded_launches_fit_and_are_those_of_the_code(card):
    """A change of tiles is recorded anew: compiled, and seen to fit."""
    rows = [row for row in RECORDED if row["card"] == card]
    assert names([row for row in rows if not row["fits"]]) == []
    for name in dict.fromkeys(row["case"] for row in rows):
        made = [(resources.name_of(one), list(one.tiles)) for one in resources.launches_of(name, card)]
        assert made == [(row["kernel"], row["tiles"]) for row in rows if row["case"] == name]
    assert rows
