"""Times differential attention modules against the plain module with the same parameters, on one device.

    python scripts/benchmarks/bench_attention.py [--quick] [--device cpu] [--threads 2]

writes attention-<device>-<dtype>-module.json (every time of every round) and .png, and prints tables. The modules are
in `attention_modules.py`. The baseline is plain attention by torch's SDPA with two heads of size D for each
differential head; on CUDA each of SDPA's kernels is forced in turn, and the fastest counts, for peers too.
`benchmark.py` says how times and memory are taken; `gpu_layer.py` times ways to compute the operation alone.

The floor is the matrix work that cannot be avoided, for V1 per head and query-key pair, in units of D: 8 forward (12
where a row of scores does not fit on chip: on a GPU above 256 keys; it always fits in a CPU's cache) and 20 backward;
plain attention has 8 and 20. "floor" is that work at the rate of one big matrix product, which takes its turn in each
round with the rest, over the baseline's time; "counts" is the work over plain attention's work: what a kernel as
efficient as plain attention's would reach.
"""

import math
import statistics
import sys
from typing import Any

import torch

from attention_modules import HEADS, PLAIN_HEADS, WIDTH, Shape, module_ways
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
    remarks,
    table,
)
from benchmark_picture import Panel, draw
from machine import describe_machine, device_in_words, environment

# Keys up to which a whole row of both maps' scores fits on a GPU's chip.
SHORT_ROW = 256

# Ordered by importance: a run that is stopped has what matters most.
SHAPES = {
    "cpu": [
        Shape(8, 197),
        Shape(1, 1024),
        Shape(16, 77, causal=True),
        Shape(2, 577),
        Shape(1, 4096, causal=True),
        Shape(1, 1024, causal=True),
        Shape(1, 2048, causal=True),
        Shape(1, 197, backward=False),
        Shape(1, 577, backward=False),
    ],
    "cuda": [
        Shape(256, 197),
        Shape(1024, 77, causal=True),
        Shape(4, 4096, causal=True),
        Shape(64, 577),
        Shape(1, 32768, causal=True),
        Shape(16, 1024),
    ],
}
# With --quick: the number of shapes, and seconds for the rounds of a shape's pass.
QUICK, QUICK_SECONDS = 4, 5.0
OURS = "ours, V1"
PASSES = {"forward": False, "forward and backward": True}
METHOD = """Ratios are time over plain attention's in the same run (lower is better): all ways take turns within each
round, and a cell is the median over rounds of the ratio in one round. Shapes are batch x tokens. A name in brackets is
the kernel or backend that was taken. "floor" is V1's least matrix work at the measured matrix rate, over plain
attention's time; "counts" is that work over plain attention's work, with the four projections. Reasons for dashes stand
below; quartiles and every single time are in the JSON."""


def work_of(shape: Shape, backward: bool, device: str) -> tuple[float, float]:
    """Return the floating-point operations of the V1 and of the plain module at a shape, projections included.

    A head's pair of query and key costs 4D for the scores of both maps and 2V for a value product, which is done once
    for both maps in short rows and twice in long ones. Backward does the scores once more, dP and dV once for both maps
    (2V each), and dQ and dK (4D each).
    """
    d = WIDTH // PLAIN_HEADS
    has_short_rows = shape.tokens <= SHORT_ROW or not device.startswith("cuda")
    differential, plain = 4 * d + (4 * d if has_short_rows else 8 * d), 8 * d
    if backward:
        differential, plain = differential + 20 * d, plain + 20 * d
    projections = 8.0 * shape.batch * shape.tokens * WIDTH**2 * (3 if backward else 1)
    return shape.pairs * differential + projections, shape.pairs * plain + projections


def measure(shape: Shape, args: Any) -> dict[str, Any]:
    """Time both passes at one shape."""
    entry: dict[str, Any] = {"name": shape.name, **shape._asdict(), "heads": HEADS, "passes": {}}
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
        ways = module_ways(shape, args.device, args.dtype, backward)
        rate, amount = matrix_product(args.device, args.dtype)
        work, plain = work_of(shape, backward, args.device)
        results = in_turns([*ways, rate], args.device, args.rounds, seconds=seconds, peak=peak if last else None)
        del ways
        timed = {"baseline": add_ratios(results), "counts": work / plain, "floor": None, "rate_per_second": None}
        if "ratio" in results[rate.name]:
            timed["floor"] = work / amount * results[rate.name]["ratio"]
            timed["rate_per_second"] = amount / results[rate.name]["median_ms"] * 1e3
        entry["passes"][name] = timed | {"ways": results}
    return entry


def fastest_peer(results: dict[str, dict[str, Any]]) -> str:
    """Return the ratio of ours to the fastest peer, with its name."""
    ours = fastest(results, group=OURS)
    best = fastest(results, role="peer")
    if not (ours and best):
        return "–"
    return f"{statistics.median(ratios_to(ours, best)):.2f} ({best['group']})"


def cell(result: dict[str, Any] | None, value: str = "ratio") -> str:
    if result is None or value not in result:
        return "–"
    if value == "peak_bytes":
        return f"{result[value] / 2**20:,.1f}"
    name = f" ({result['kernel']})" if result["kernel"] else ""
    return f"{result[value]:.2f}{name}"


def groups(report: dict[str, Any]) -> list[str]:
    """Return the columns: every group except the baseline, in the order of the ways, ours last."""
    passes = [timed for shape in report["shapes"] for timed in shape["passes"].values()]
    order = {"peer": 1, "other": 0, "ours": 2}
    results = [result for timed in passes for result in timed["ways"].values() if result["role"] in order]
    names = {result["group"]: order[result["role"]] for result in results}
    return sorted(names, key=names.__getitem__)


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a page: a table of ratios for each pass, one of memory, and why there are dashes."""
    columns = groups(report)
    parts = [f"# Attention modules, {report['dtype']}", describe_machine(report), METHOD]
    for name in PASSES:
        shapes = [shape for shape in report["shapes"] if name in shape["passes"]]
        rows = [_row(shape, shape["passes"][name], columns) for shape in shapes]
        head = ["shape", "plain, ms", *columns, f"{OURS} / fastest peer", "floor", "counts"]
        parts += [f"## {name.capitalize()}: ratio to plain attention", table(head, rows)]
    parts += [
        "## Peak memory beyond the inputs, MiB",
        table(["shape", "plain", *columns], [_memory_row(s, columns) for s in report["shapes"]]),
    ]
    passes = [(shape, timed) for shape in report["shapes"] for timed in shape["passes"].values()]
    if rates := [t["rate_per_second"] / 1e12 for _, t in passes if t["rate_per_second"]]:
        parts.append(f"The big matrix product ran at {statistics.median(rates):.3g} TFLOP/s (median over shapes).")
    return "\n\n".join([*parts, *remarks(report, [(shape["name"], timed["ways"]) for shape, timed in passes])])


def _row(shape: dict[str, Any], timed: dict[str, Any], columns: list[str]) -> list[str]:
    results = timed["ways"]
    plain = results.get(timed["baseline"]) if timed["baseline"] else None
    ratios = [cell(fastest(results, group=group)) for group in columns]
    floor = "–" if timed["floor"] is None else f"{timed['floor']:.2f}"
    return [shape["name"], cell(plain, "median_ms"), *ratios, fastest_peer(results), floor, f"{timed['counts']:.2f}"]


def _memory_row(shape: dict[str, Any], columns: list[str]) -> list[str]:
    *_, last = shape["passes"].values()
    peaks = [cell(fastest(last["ways"], group=group), "peak_bytes") for group in ["plain", *columns]]
    return [shape["name"], *peaks]


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
    title = f"Attention modules, {report['dtype']}, {device_in_words(report)}"
    note = f"torch {report['versions']['torch']}; floor: the least matrix work at the measured matrix rate"
    draw(path, title, panels, {OURS, "ours, V2"}, note)


def chosen_shapes(args: Any) -> list[Shape]:
    shapes = SHAPES["cuda" if args.device.startswith("cuda") else "cpu"]
    if args.shapes:
        return [shape for shape in shapes if any(part in shape.name for part in args.shapes)]
    return shapes[:QUICK] if args.quick else shapes


def run(args: Any, shapes: list[Shape]) -> dict[str, Any]:
    """Measure the shapes and write the files, anew after each shape."""
    device, dtype = args.device.partition(":")[0], str(args.dtype).removeprefix("torch.")
    name = f"attention-{device}-{dtype}-module"
    torch.manual_seed(0)
    report: dict[str, Any] = {"benchmark": "attention", "dtype": dtype, **environment(args.device)}
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
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="only those whose name contains one of these")
    args = parse(parser, given)
    shapes = chosen_shapes(args)
    if not shapes:
        parser.error(f"no shape of this device is named like {' or '.join(args.shapes)}")
    report = run(args, shapes)
    if not report["shapes"]:
        return 1
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
