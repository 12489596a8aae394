"""Times the ways to compute differential attention against plain attention with the same parameters, on one device.

    python scripts/benchmarks/bench_attention.py [--quick] [--device cpu] [--threads 2] [--level op|module]

writes attention-<device>-<dtype>-<level>.md, .json (every time of every round) and .png.

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

import itertools
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
    describe_machine,
    environment,
    fastest,
    in_turns,
    matrix_product,
    parse,
    peak_memory,
    progress,
    ratios_to,
    reading,
    reasons,
    table,
    write,
)
from benchmark_picture import Panel, draw

SHORT_ROW = 256  # keys up to which a whole row of both maps' scores fits on a GPU's chip

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
QUICK = {"op": 8, "module": 4}  # so many of the first
QUICK_SECONDS = 5.0  # for the rounds of a shape's pass
PASSES = {"forward": False, "forward and backward": True}
METHOD = """Ratios are time over plain attention's in the same run (lower is better): all ways take turns within each
round, and a cell is the median over rounds of the ratio in one round. Shapes are batch x heads (queries'/keys') x
tokens x D, heads being differential ones. A name in brackets is the kernel or backend that was taken. "floor" is the
least matrix work at the measured matrix rate, over plain attention's time; "counts" is that work over plain attention's
work (for modules V1's, with the four projections). Reasons for dashes stand below; quartiles and every single time are
in the JSON."""


def floor_counts(shape: Shape, backward: bool, device: str) -> tuple[float, float]:
    """Floating-point operations of differential and of plain attention, forward alone or forward and backward.

    A head's pair of query and key costs 4D for the scores of both maps and 2V for a value product, which is done once
    for both maps in short rows and twice in long ones. Backward does the scores once more, dP and dV once for both maps
    (2V each), and dQ and dK (4D each).
    """
    d, v, pairs = shape.head_dim, shape.value_dim, shape.pairs
    whole_rows = shape.keys <= SHORT_ROW or not device.startswith("cuda")
    own = 4 * d + (2 * v if whole_rows else 4 * v)
    plain = 8 * d
    if backward:
        own += 12 * d + 4 * v
        plain += 20 * d
    return pairs * own, pairs * plain


def projections(shape: Shape, backward: bool) -> float:
    """Floating-point operations of a module's four projections."""
    return 8.0 * shape.batch * shape.keys * WIDTH**2 * (3 if backward else 1)


def cache_bytes(shape: Shape, itemsize: int) -> int:
    """Keys and values, each once."""
    maps = 2 if shape.variant == "v1" else 1
    return shape.batch * shape.kv_heads * shape.keys * (maps * shape.head_dim + shape.value_dim) * itemsize


def rate_way(shape: Shape, args: Any, backward: bool) -> tuple[Way, float, float, float]:
    """What measures the device's rate at this shape, what a call of it does (operations, or bytes of a cache), what the
    floor has to do, and the floor's work over plain attention's."""
    if shape.queries == 1:
        way, amount = reading(args.device)
        return way, amount, cache_bytes(shape, args.dtype.itemsize), 1.0
    own, plain = floor_counts(shape, backward, args.device)
    if args.level == "module":
        own, plain = (count + projections(shape, backward) for count in (own, plain))
    way, amount = matrix_product(args.device, args.dtype)
    return way, amount, own, own / plain


def measure(shape: Shape, args: Any) -> dict[str, Any]:
    """Both passes at one shape."""
    make = operation_ways if args.level == "op" else module_ways
    entry: dict[str, Any] = {**shape._asdict(), "words": shape.words(), "passes": {}}
    for name, backward in PASSES.items():
        if backward and not shape.backward:
            continue
        last = backward or not shape.backward  # the pass whose memory is reported

        def peak(way: Way) -> int:
            assert way.call is not None
            with way.context():
                return peak_memory(way.call, args.device)

        seconds = QUICK_SECONDS if args.quick else math.inf
        ways = make(shape, args.device, args.dtype, backward)
        rate, amount, work, counts = rate_way(shape, args, backward)
        found = in_turns([*ways, rate], args.device, args.rounds, seconds=seconds, peak=peak if last else None)
        del ways
        own = {"baseline": add_ratios(found), "counts": counts, "floor": None, "rate_per_second": None, "ways": found}
        if "ratio" in found[rate.name]:
            own["floor"] = work / amount * found[rate.name]["ratio"]
            own["rate_per_second"] = amount / found[rate.name]["median_ms"] * 1e3
        entry["passes"][name] = own
    return entry


def summary(found: dict[str, dict[str, Any]], mine: str, peers: set[str]) -> dict[str, tuple[float, str]]:
    """The ratios of ours to the fastest peer and to plain FlexAttention."""
    own = fastest(found, group=mine)
    others = [other for group in peers if (other := fastest(found, group=group))]
    shown = {}
    if own and others:
        best = min(others, key=lambda other: other["median_ms"])
        name = f"{best['group']}: {best['kernel']}" if best["kernel"] else best["group"]
        shown["fastest peer"] = (statistics.median(ratios_to(own, best)), name)
    if own and (flex := fastest(found, group="plain flex")):
        shown["plain flex"] = (statistics.median(ratios_to(own, flex)), "")
    return shown


def ours_and_peers(level: str, found: dict[str, dict[str, Any]]) -> tuple[str, set[str]]:
    peers = {own["group"] for own in found.values() if own["role"] == "peer"}
    return ("auto" if level == "op" else "ours, V1"), peers


def cell(own: dict[str, Any] | None, value: str = "ratio") -> str:
    if own is None:
        return "–"
    if value == "peak_bytes":
        return f"{own[value] / 2**20:,.1f}" if value in own else "–"
    name = f" ({own['kernel']})" if own["kernel"] else ""
    return f"{own[value]:.2f}{name}" if value in own else "–"


def groups(report: dict[str, Any]) -> list[str]:
    """The columns: every group but the baseline, in the order of the ways, `auto` or ours last."""
    found = [way for shape in report["shapes"] for own in shape["passes"].values() for way in own["ways"].values()]
    order = {"peer": 1, "other": 0, "ours": 2}
    names = {own["group"]: order[own["role"]] for own in found if own["role"] in order}
    return sorted(names, key=lambda name: (names[name], name == "auto"))


def markdown(report: dict[str, Any]) -> str:
    """The report as a page: a table of ratios a pass, one of memory, and why there are dashes."""
    columns = groups(report)
    parts = [f"# Attention, {report['level']} level, {report['dtype']}", describe_machine(report), METHOD]
    flex = "plain flex" in columns
    for name in PASSES:
        rows = [
            _row(s, s["passes"][name], columns, report["level"], flex) for s in report["shapes"] if name in s["passes"]
        ]
        mine = "auto" if report["level"] == "op" else "ours, V1"
        compared = [f"{mine} / fastest peer", *([f"{mine} / plain flex"] if flex else [])]
        head = ["shape", "B x H x N x D", "plain, ms", *columns, *compared, "floor", "counts"]
        parts += [f"## {name.capitalize()}: ratio to plain attention", table(head, rows)]
    rows = []
    for shape in report["shapes"]:
        *_, last = shape["passes"].values()
        peaks = [cell(fastest(last["ways"], group=group), "peak_bytes") for group in ["plain", *columns]]
        rows.append([shape["name"], shape["words"], *peaks])
    parts += [
        "## Peak memory beyond the inputs, MiB (forward and backward; decoding: forward)",
        table(["shape", "B x H x N x D", "plain", *columns], rows),
    ]
    if rates := [
        own["rate_per_second"] / 1e12
        for shape in report["shapes"]
        for own in shape["passes"].values()
        if shape["queries"] > 1 and own["rate_per_second"]
    ]:
        parts.append(f"The big matrix product ran at {statistics.median(rates):.3g} TFLOP/s (median over shapes).")
    passes = [(s["name"], own["ways"]) for s in report["shapes"] for own in s["passes"].values()]
    if why := reasons(passes):
        parts += ["## Dashes", why]
    if report["left_out"]:
        parts.append(f"Not reached in the time given: {', '.join(report['left_out'])}.")
    return "\n\n".join(parts)


def _row(shape: dict[str, Any], own: dict[str, Any], columns: list[str], level: str, flex: bool) -> list[str]:
    found = own["ways"]
    plain = found.get(own["baseline"]) if own["baseline"] else None
    row = [shape["name"], shape["words"], cell(plain, "median_ms"), *(cell(fastest(found, group=g)) for g in columns)]
    compared = summary(found, *ours_and_peers(level, found))
    for other in ["fastest peer", *(["plain flex"] if flex else [])]:
        value, name = compared.get(other, (None, ""))
        row.append("–" if value is None else f"{value:.2f}{f' ({name})' if name else ''}")
    return [*row, "–" if own["floor"] is None else f"{own['floor']:.2f}", f"{own['counts']:.2f}"]


def picture(path: Any, report: dict[str, Any]) -> None:
    panels = []
    for name in PASSES:
        ratios: dict[str, dict[str, float]] = {}
        marks: dict[str, float] = {}
        for shape in report["shapes"]:
            own = shape["passes"].get(name)
            if own is None or own["baseline"] is None:
                continue
            best = ((group, fastest(own["ways"], group=group)) for group in groups(report))
            ratios[shape["name"]] = {group: way["ratio"] for group, way in best if way}
            if own["floor"] is not None:
                marks[shape["name"]] = own["floor"]
        panels.append(Panel(name.capitalize(), ratios, marks))
    own = report["hardware"]
    where = own.get("gpu") or f"{own['cpu']}, {own['threads']} thread(s)"
    title = f"Differential attention, {report['level']} level, {report['dtype']}, {where}"
    note = f"torch {report['versions']['torch']}; floor: the least matrix work at the measured matrix rate"
    draw(path, title, panels, {"auto", "ours, V1", "ours, V2"}, note)


def chosen_shapes(args: Any) -> list[Shape]:
    shapes = SHAPES["cuda" if args.device.startswith("cuda") else "cpu", args.level]
    if args.shapes:
        return [shape for shape in shapes if any(part in shape.name for part in args.shapes)]
    return shapes[: QUICK[args.level]] if args.quick else shapes


def run(args: Any, shapes: list[Shape]) -> dict[str, Any]:
    """Measures the shapes and writes the files, anew after each shape."""
    device, dtype = args.device.partition(":")[0], str(args.dtype).removeprefix("torch.")
    name = f"attention-{device}-{dtype}-{args.level}"
    torch.manual_seed(0)
    report: dict[str, Any] = {"benchmark": "attention", "level": args.level, "dtype": dtype, **environment(args.device)}
    report |= {"rounds": args.rounds, "shapes": [], "left_out": [shape.name for shape in shapes]}
    try:
        with progress(len(shapes), args.minutes) as following:
            for shape in itertools.takewhile(lambda shape: following(shape.name), shapes):
                report["shapes"].append(measure(shape, args))
                report["left_out"].remove(shape.name)
                write(args.output, name, report, markdown(report))
    finally:  # drawn once, and also of what was measured when the run is stopped
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
