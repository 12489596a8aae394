"""The fused kernels compiled for every card, which needs no GPU: what each launch configuration uses of it."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from diffvision.ops.attention.shared_memory import BY_CAPABILITY

triton = pytest.importorskip("triton")
resources = pytest.importorskip("triton_resources")

ROOT = Path(__file__).parents[2]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
RECORDED = json.loads((ROOT / "docs/benchmarks/triton_resources.json").read_text())["rows"]
# What a pass of an innermost loop may read back, and write, for want of registers, and what a thread may keep in memory
# in all. Most are at zero; whole rows and language models on 8.0 and 10.0 come near it.
LOOP_LOADS, LOOP_STORES, STACK_BYTES = 80, 24, 1408
KNOWN = (100, "long, odd sizes")  # spills 273 words in a pass of its forward, and other tiles were not tried
# The cases that come nearest to the shared memory of the smallest cards, and all.
SOME = ("ViT", "language", "decoding, 32 x 128 + 256, masked")
ALL = [(card, case) for card in BY_CAPABILITY for case in resources.CASES | resources.DECODING]
COMPILED = [
    pytest.param(card, case, marks=pytest.mark.slow if card == 89 and case in SOME else pytest.mark.nightly)
    for card, case in ALL
]


@pytest.fixture(scope="session")
def compiler():
    """A process of its own, for all cases: this one may have imported triton for its interpreter."""
    if not all((TOOLS / tool).exists() for tool in ("ptxas", "cuobjdump", "nvdisasm")):
        pytest.skip("triton came without ptxas, cuobjdump or nvdisasm")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            pool.submit(int).result()
        yield pool


def names(rows: list[dict]) -> list[str]:
    return [f"{row['card']}, {row['case']}: {row['kernel']} {row}" for row in rows]


def check(used: list[dict]) -> None:
    assert names([row for row in used if not row["fits"]]) == []
    held = [row for row in used if (row["card"], row["case"]) != KNOWN]
    over = [row for row in held if row["loop_loads"] > LOOP_LOADS or row["loop_stores"] > LOOP_STORES]
    assert names(over + [row for row in used if row["stack_bytes"] > STACK_BYTES]) == []
    # Decoding leaves a few words out at most.
    assert names([row for row in used if row["kernel"] == "decode._split" and row["stack_bytes"] > 16]) == []
    halves = [row for row in used if row["half"] and row["kernel"] != "streaming.delta"]
    assert names([row for row in halves if not row["tensor_cores"]]) == []


@pytest.mark.parametrize(("card", "case"), COMPILED)
def test_tiles_fit_the_shared_memory_and_the_registers(compiler, card, case):
    used = compiler.submit(resources.rows_of, case, card).result()
    assert used
    check(used)


@pytest.mark.parametrize("card", BY_CAPABILITY)
def test_recorded_launches_fit_and_are_those_of_the_code(card):
    """A change of tiles is recorded anew: compiled, and seen to fit."""
    rows = [row for row in RECORDED if row["card"] == card]
    check(rows)
    for name in dict.fromkeys(row["case"] for row in rows):
        made = [(resources.name_of(one), list(one.tiles)) for one in resources.launches_of(name, card)]
        assert made == [(row["kernel"], row["tiles"]) for row in rows if row["case"] == name]
    assert rows


def test_the_page_has_the_recorded_launches():
    page = (ROOT / "docs/benchmarks/cards.md").read_text()
    assert [line for line in resources.table(RECORDED) if line not in page] == []
