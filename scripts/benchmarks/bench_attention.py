"""Times the ways to compute differential attention against plain attention with the same parameters, on one device.

    python scripts/benchmarks/bench_attention.py [--quick] [--device cpu] [--threads 2] [--level op|module]

writes attention-<device>-<dtype>-<level>.json (every time of every round) and .png, and prints tables.

--level op times the operation on q, k and v with the strides that a layer's projections give (`attention_ways.py`);
--level module times whole modules of width 768 (`attention_modules.py`). The baseline is plain attention by torch's
SDPA with two heads of size D for each differential head; on CUDA each of SDPA's kernels is forced in turn, and the
fastest counts, for other projects' formulations too. `benchmark.py` tells how times and memory are taken.

The floor is the matrix work that cannot be avoided, for V1 per head and query-key pair, in units of D: 8 forward (12
where a row of scores does not fit on chip: on a GPU above 256 keys; it always fits in a CPU's cache) and 20 backward;
plain attention has 8 and 20. "floor" is that work at the rate of one big matrix product, which takes its turn in each
round with the rest, over the baseline's time; "counts" is the work over plain attention's work: what a kernel as
efficient as plain attention's would reach. Decoding (one query) is bound by reading the cache: its floor is keys and
values read once, at the rate of a sum over a large array.
"""

import math
import statistics
import sys
from typing import Any

import torch

from attention_modules import WIDTH, module_ways
from attention_ways import Shape, operation_ways
from benchmark import (
    Way,
    add_ratios,
    arguments,
    fastest,
    in_turns,
    matrix_product,
    measure_all,
    parse,
    peak_memory,
    ratios_to,
    reading,
    remarks,
    table,
)
from benchmark_picture import Panel, draw
from machine import describe_machine, device_in_words, environment

# Keys up to which a whole row of both maps' scores fits on a GPU's chip.
SHORT_ROW = 256

# Ordered by importance: a run that is stopped has what matters most.
# name, batch, heads, kv heads, queries, keys, D, causal, variant, backward
CPU_OP = [
    Shape("ViT 197", 8, 6, 6, 197, 197, 64),
    Shape("text 77", 32, 4, 4, 77, 77, 64, True),
    Shape("language 1k", 1, 4, 4, 1024, 1024, 128, True),
    Shape("ViT 577", 2, 6, 6, 577, 577, 64),
    Shape("V2 ViT 197", 8, 12, 12, 197, 197, 64, variant="v2"),
    Shape("decode 4k", 1, 4, 4, 1, 4096, 128, backward=False),
    Shape("language 1k grouped", 1, 4, 2, 1024, 1024, 128, True),
    Shape("V2 language 1k", 1, 8, 4, 1024, 1024, 128, True, "v2"),
    Shape("language 4k", 1, 2, 2, 4096, 4096, 128, True),
    Shape("language 2k", 1, 4, 4, 2048, 2048, 128, True),
    Shape("language 4k grouped", 1, 4, 2, 4096, 4096, 128, True),
    Shape("decode 16k", 1, 4, 4, 1, 16384, 128, backward=False),
    Shape("decode 16k grouped", 4, 4, 2, 1, 16384, 128, backward=False),
]
CUDA_OP = [
    Shape("ViT 197", 512, 6, 6, 197, 197, 64),
    Shape("text 77", 2048, 4, 4, 77, 77, 64, True),
    Shape("language 4k", 4, 16, 16, 4096, 4096, 128, True),
    Shape("ViT 577", 128, 6, 6, 577, 577, 64),
    Shape("language 32k", 1, 16, 16, 32768, 32768, 128, True),
    Shape("language 4k grouped", 4, 16, 4, 4096, 4096, 128, True),
    Shape("V2 ViT 197", 256, 12, 12, 197, 197, 64, variant="v2"),
    Shape("V2 language 4k", 4, 32, 8, 4096, 4096, 128, True, "v2"),
    Shape("decode 16k", 32, 16, 4, 1, 16384, 128, backward=False),
    Shape("language 1k", 16, 16, 16, 1024, 1024, 128, True),
    Shape("language 16k", 1, 16, 16, 16384, 16384, 128, True),
    Shape("decode 4k", 32, 16, 4, 1, 4096, 128, backward=False),
    Shape("language 2k", 8, 16, 16, 2048, 2048, 128, True),
    Shape("language 8k", 2, 16, 16, 8192, 8192, 128, True),
    Shape("language 32k grouped", 1, 16, 4, 32768, 32768, 128, True),
    Shape("language 1k grouped", 16, 16, 4, 1024, 1024, 128, True),
]
# Modules have width 768: 6 differential heads of 64, whatever the length.
CPU_MODULE = [
    Shape("8 x 197", 8, 6, 6, 197, 197, 64),
    Shape("1 x 1024", 1, 6, 6, 1024, 1024, 64),
    Shape("16 x 77 causal", 16, 6, 6, 77, 77, 64, True),
    Shape("2 x 577", 2, 6, 6, 577, 577, 64),
    Shape("1 x 4096 causal", 1, 6, 6, 4096, 4096, 64, True),
    Shape("1 x 1024 causal", 1, 6, 6, 1024, 1024, 64, True),
    Shape("1 x 2048 causal", 1, 6, 6, 2048, 2048, 64, True),
    Shape("1 x 197", 1, 6, 6, 197, 197, 64, backward=False),
    Shape("1 x 577", 1, 6, 6, 577, 577, 64, backward=False),
]
CUDA_MODULE = [
    Shape("256 x 197", 256, 6, 6, 197, 197, 64),
    Shape("1024 x 77 causal", 1024, 6, 6, 77, 77, 64, True),
    Shape("4 x 4096 causal", 4, 6, 6, 4096, 4096, 64, True),
    Shape("64 x 577", 64, 6, 6, 577, 577, 64),
    Shape("1 x 32768 causal", 1, 6, 6, 32768, 32768, 64, True),
    Shape("16 x 1024", 16, 6, 6, 1024, 1024, 64),
]
SHAPES = {
    ("cpu", "op"): CPU_OP,
    ("cuda", "op"): CUDA_OP,
    ("cpu", "module"): CPU_MODULE,
    ("cuda", "module"): CUDA_MODULE,
}
# With --quick: the number of shapes, and seconds for the rounds of a shape's pass.
QUICK = {"op": 8, "module": 4}
QUICK_SECONDS = 5.0
PASSES = {"forward": False, "forward and backward": True}
METHOD = """Ratios are time over plain attention's in the same run (lower is better): all ways take turns within each
round, and a cell is the median over rounds of the ratio in one round. Shapes are batch x heads (queries'/keys') x
tokens x D, heads being differential ones. A name in brackets is the kernel or backend that was taken. "floor" is the
least matrix work at the measured matrix rate, over plain attention's time; "counts" is that work over plain attention's
work (for modules V1's, with the four projections). Reasons for dashes stand below; quartiles and every single time are
in the JSON."""


def floor_counts(shape: Shape, backward: bool, device: str) -> tuple[float, float]:
    """Return the floating-point operations of differential and of plain attention at a shape.

    A head's pair of query and key costs 4D for the scores of both maps and 2V for a value product, which is done once
    for both maps in short rows and twice in long ones. Backward does the scores once more, dP and dV once for both maps
    (2V each), and dQ and dK (4D each).
    """
    d, v, pairs = shape.head_dim, shape.value_dim, shape.pairs
    whole_rows = shape.keys <= SHORT_ROW or not device.startswith("cuda")
    differential = 4 * d + (2 * v if whole_rows else 4 * v)
    plain = 8 * d
    if backward:
        differential += 12 * d + 4 * v
        plain += 20 * d
    return pairs * differential, pairs * plain


def projections(shape: Shape, backward: bool) -> float:
    """Return the floating-point operations of a module's four projections."""
    return 8.0 * shape.batch * shape.keys * WIDTH**2 * (3 if backward else 1)


def cache_bytes(shape: Shape, itemsize: int) -> int:
    """Return the bytes of keys and values, each once."""
    maps = 2 if shape.variant == "v1" else 1
    return shape.batch * shape.kv_heads * shape.keys * (maps * shape.head_dim + shape.value_dim) * itemsize


def rate_way(shape: Shape, args: Any, backward: bool) -> tuple[Way, float, float, float]:
    """Return what measures the device's rate at a shape, and three amounts of work.

    These are the work of one such call (operations, or bytes of a cache), the floor's work, and the floor's work over
    plain attention's.
    """
    if shape.queries == 1:
        way, amount = reading(args.device)
        return way, amount, cache_bytes(shape, args.dtype.itemsize), 1.0
    floor, plain = floor_counts(shape, backward, args.device)
    if args.level == "module":
        floor, plain = (count + projections(shape, backward) for count in (floor, plain))
    way, amount = matrix_product(args.device, args.dtype)
    return way, amount, floor, floor / plain


def measure(shape: Shape, args: Any) -> dict[str, Any]:
    """Time both passes at one shape."""
    make = operation_ways if args.level == "op" else module_ways
    entry: dict[str, Any] = {**shape._asdict(), "words": shape.words(), "passes": {}}
    for name, backward in PASSES.items():
        if backward and not shape.backward:
            continue
        # Memory is reported of the last pass.
        last = backward or not shape.backward

        def peak(way: Way) -> int:
            assert way.call is not None
            with way.context():
                return peak_memory(way.call, args.device)

        seconds = QUICK_SECONDS if args.quick else math.inf
        ways = make(shape, args.device, args.dtype, backward)
        rate, amount, work, counts = rate_way(shape, args, backward)
        results = in_turns([*ways, rate], args.device, args.rounds, seconds=seconds, peak=peak if last else None)
        del ways
        timed = {"baseline": add_ratios(results), "counts": counts, "floor": None, "rate_per_second": None}
        if "ratio" in results[rate.name]:
            timed["floor"] = work / amount * results[rate.name]["ratio"]
            timed["rate_per_second"] = amount / results[rate.name]["median_ms"] * 1e3
        entry["passes"][name] = timed | {"ways": results}
    return entry


def summary(results: dict[str, dict[str, Any]], mine: str, peers: set[str]) -> dict[str, tuple[float, str]]:
    """Return the ratios of ours to the fastest peer and to plain FlexAttention."""
    ours = fastest(results, group=mine)
    others = [other for group in peers if (other := fastest(results, group=group))]
    shown = {}
    if ours and others:
        best = min(others, key=lambda other: other["median_ms"])
        name = f"{best['group']}: {best['kernel']}" if best["kernel"] else best["group"]
        shown["fastest peer"] = (statistics.median(ratios_to(ours, best)), name)
    if ours and (flex := fastest(results, group="plain flex")):
        shown["plain flex"] = (statistics.median(ratios_to(ours, flex)), "")
    return shown


def ours_of(level: str) -> str:
    return "auto" if level == "op" else "ours, V1"


def cell(result: dict[str, Any] | None, value: str = "ratio") -> str:
    if result is None or value not in result:
        return "–"
    if value == "peak_bytes":
        return f"{result[value] / 2**20:,.1f}"
    name = f" ({result['kernel']})" if result["kernel"] else ""
    return f"{result[value]:.2f}{name}"


def groups(report: dict[str, Any]) -> list[str]:
    """Return the columns: every group except the baseline, in the order of the ways, `auto` or ours last."""
    passes = [timed for shape in report["shapes"] for timed in shape["passes"].values()]
    order = {"peer": 1, "other": 0, "ours": 2}
    results = [result for timed in passes for result in timed["ways"].values() if result["role"] in order]
    names = {result["group"]: order[result["role"]] for result in results}
    return sorted(names, key=lambda name: (names[name], name == "auto"))


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a page: a table of ratios for each pass, one of memory, and why there are dashes."""
    columns = groups(report)
    parts = [f"# Attention, {report['level']} level, {report['dtype']}", describe_machine(report), METHOD]
    others = ["fastest peer", *(["plain flex"] if "plain flex" in columns else [])]
    for name in PASSES:
        shapes = [shape for shape in report["shapes"] if name in shape["passes"]]
        rows = [_row(shape, shape["passes"][name], columns, others, ours_of(report["level"])) for shape in shapes]
        compared = [f"{ours_of(report['level'])} / {other}" for other in others]
        head = ["shape", "B x H x N x D", "plain, ms", *columns, *compared, "floor", "counts"]
        parts += [f"## {name.capitalize()}: ratio to plain attention", table(head, rows)]
    parts += [
        "## Peak memory beyond the inputs, MiB (forward and backward; decoding: forward)",
        table(["shape", "B x H x N x D", "plain", *columns], [_memory_row(s, columns) for s in report["shapes"]]),
    ]
    passes = [(shape, timed) for shape in report["shapes"] for timed in shape["passes"].values()]
    if rates := [t["rate_per_second"] / 1e12 for s, t in passes if s["queries"] > 1 and t["rate_per_second"]]:
        parts.append(f"The big matrix product ran at {statistics.median(rates):.3g} TFLOP/s (median over shapes).")
    return "\n\n".join([*parts, *remarks(report, [(shape["name"], timed["ways"]) for shape, timed in passes])])


def _row(shape: dict[str, Any], timed: dict[str, Any], columns: list[str], others: list[str], mine: str) -> list[str]:
    results = timed["ways"]
    plain = results.get(timed["baseline"]) if timed["baseline"] else None
    ratios = [cell(fastest(results, group=group)) for group in columns]
    row = [shape["name"], shape["words"], cell(plain, "median_ms"), *ratios]
    peers = {result["group"] for result in results.values() if result["role"] == "peer"}
    compared = summary(results, mine, peers)
    for other in others:
        value, name = compared.get(other, (None, ""))
        row.append("–" if value is None else f"{value:.2f}{f' ({name})' if name else ''}")
    return [*row, "–" if timed["floor"] is None else f"{timed['floor']:.2f}", f"{timed['counts']:.2f}"]


def _memory_row(shape: dict[str, Any], columns: list[str]) -> list[str]:
    *_, last = shape["passes"].values()
    peaks = [cell(fastest(last["ways"], group=group), "peak_bytes") for group in ["plain", *columns]]
    return [shape["name"], shape["words"], *peaks]


def picture(path: Any, report: dict[str, Any]) -> None:
    panels = []
    for name in PASSES:
        ratios: dict[str, dict[str, float]] = {}
        floors: dict[str, float] = {}
        for shape in report["shapes"]:
            timed = shape["passes"].get(name)
            if timed is None or timed["baseline"] is None:
                continue
            best = ((group, fastest(timed["ways"], group=group)) for group in groups(report))
            ratios[shape["name"]] = {group: way["ratio"] for group, way in best if way}
            if timed["floor"] is not None:
                floors[shape["name"]] = timed["floor"]
        panels.append(Panel(name.capitalize(), ratios, floors))
    title = f"Differential attention, {report['level']} level, {report['dtype']}, {device_in_words(report)}"
    note = f"torch {report['versions']['torch']}; floor: the least matrix work at the measured matrix rate"
    draw(path, title, panels, {"auto", "ours, V1", "ours, V2"}, note)


def chosen_shapes(args: Any) -> list[Shape]:
    shapes = SHAPES["cuda" if args.device.startswith("cuda") else "cpu", args.level]
    if args.shapes:
        return [shape for shape in shapes if any(part in shape.name for part in args.shapes)]
    return shapes[: QUICK[args.level]] if args.quick else shapes


def run(args: Any, shapes: list[Shape]) -> dict[str, Any]:
    """Measure the shapes and write the files, anew after each shape."""
    device, dtype = args.device.partition(":")[0], str(args.dtype).removeprefix("torch.")
    name = f"attention-{device}-{dtype}-{args.level}"
    torch.manual_seed(0)
    report: dict[str, Any] = {"benchmark": "attention", "level": args.level, "dtype": dtype, **environment(args.device)}
    report |= {"rounds": args.rounds, "shapes": []}
    settings = {shape.name: lambda shape=shape: report["shapes"].append(measure(shape, args)) for shape in shapes}
    try:
        measure_all(args, name, report, settings)
    finally:
        # Also of what was measured when the run is stopped.
        if report["shapes"]:
            picture(args.output / f"{name}.png", report)
    return report


def main(given: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--level", choices=("op", "module"), default="op")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="only those whose name contains one of these")
    args = parse(parser, given)
    shapes = chosen_shapes(args)
    if not shapes:
        parser.error(f"no shape of this device and level is named like {' or '.join(args.shapes)}")
    report = run(args, shapes)
    if not report["shapes"]:
        return 1
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
