"""How cost grows with tokens, batch, depth and workers: ours next to the peers, in turns, on one device.

    python scripts/benchmarks/bench_growth.py [tokens] [batch] [depth] [workers] [--tokens 4096] [--threads 2]

writes growth-<device>-<dtype>.json (every time of every round) and .png, and prints tables.
`benchmark.py` says how times are taken.

tokens: an attention module of width 768, one sample, forward and backward, as `attention_modules.py` has them.
batch: a training step of a tiny ViT (192 wide, 12 blocks, 197 tokens). depth: the same at a batch of 8, by its blocks.
workers: an epoch of decoded batches from shards of digits, ours and webdataset's; the more processor cores, the further
these scale.

A slope is of the logarithm of time over that of the size, by least squares through the last four sizes: 1 is linear.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.utils.data
import webdataset
from matplotlib.figure import Figure

import diffvision  # noqa: F401
from attention_modules import HEADS, WIDTH, module_ways
from attention_ways import Shape, too_large
from bench_data import tokens
from bench_models import vit_batch, vit_loss
from benchmark import Way, add_ratios, arguments, fastest, in_turns, measure_all, parse, remarks, table, training_step
from diffvision.analysis.figures.style import COLOURS, panels, styled
from diffvision.data import CaptionMember, ImageMember, ImageText, ShardLoader, ShardSet
from diffvision.data.images.decode import decode_image
from diffvision.data.images.module import to_float
from diffvision.data.make import make
from machine import describe_machine, environment

SIZES = {
    "tokens": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "batch": (1, 2, 4, 8, 16, 32),
    "depth": (2, 4, 8, 16, 32),
    "workers": (0, 1, 2, 4),
}
QUICK_SIZES = {"tokens": (64, 128, 256), "batch": (1, 2), "depth": (2, 4), "workers": (0, 1)}
SECONDS = 15.0  # of rounds at a size, after which only the least number of them is made
DEPTH_BATCH, SLOPE_POINTS = 8, 4
VITS = {
    "plain": ("plain", "vit_tiny_patch16_224", {}),
    "timm's diff": ("peer", "vit_tiny_patch16_224", {"attn_layer": "diff", "num_heads": 4}),
    "ours, V1": ("ours", "diff_vit_tiny", {}),
    "ours, V2": ("ours", "diffv2_vit_tiny", {}),
    "ours, VCA": ("ours", "vca_vit_tiny", {}),
}
TWICE = "timm DiffAttention"  # keeps its maps in forward twice over: 1,634 MiB of 805 at 4,096 tokens


def of_tokens(size: int, args: argparse.Namespace) -> list[Way]:
    """Return the attention modules for one sample of so many tokens."""
    shape = Shape("", 1, HEADS, HEADS, size, size, WIDTH // (2 * HEADS))
    ways = module_ways(shape, args.device, args.dtype, backward=True)
    reason = too_large(2 * shape.map_bytes, args.device)
    return [way._replace(call=None, cannot=reason) if reason and way.group == TWICE else way for way in ways]


def of_vits(size: int, args: argparse.Namespace, *, by_depth: bool) -> list[Way]:
    """Return a training step of each ViT, with so many blocks or samples."""
    depth, batch = (size, DEPTH_BATCH) if by_depth else (12, size)
    ways = []
    for name, (role, model_name, settings) in VITS.items():
        model = timm.create_model(model_name, depth=depth, **settings).to(args.device)
        inputs = vit_batch(batch, args.device)
        ways.append(Way(name, role, training_step(model, partial(vit_loss, model, inputs), args)))
    return ways


def of_workers(size: int, args: argparse.Namespace, folder: Path) -> list[Way]:
    """Return an epoch of batches of 128 images, read by so many workers."""
    tars = [str(path) for path in sorted(folder.glob("*.tar"))]
    kind = ImageText(ImageMember(to_float), CaptionMember(), tokens)
    ours = ShardLoader(ShardSet(folder), kind, 128, num_workers=size)
    theirs = torch.utils.data.DataLoader(
        webdataset.WebDataset(tars, shardshuffle=False).map(_image), batch_size=128, num_workers=size
    )
    return [
        Way("webdataset", "plain", lambda: sum(len(batch) for batch in theirs)),
        Way("ours", "ours", lambda: sum(len(batch["image"]) for batch in ours)),
    ]


def _image(sample: dict[str, Any]) -> torch.Tensor:
    return to_float(decode_image(sample["png"]))


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the slope of log y over log x through the last points."""
    last = points[-SLOPE_POINTS:]
    return statistics.linear_regression([math.log(x) for x, _ in last], [math.log(y) for _, y in last]).slope


def curves(axis: dict[str, dict[str, Any]]) -> dict[str, list[tuple[int, float, float]]]:
    """Return each group's (size, milliseconds, ratio to the baseline), by its fastest way."""
    groups = dict.fromkeys(result["group"] for results in axis.values() for result in results.values())
    found: dict[str, list[tuple[int, float, float]]] = {}
    for group in groups:
        best = {int(size): fastest(results, group=group) for size, results in axis.items()}
        found[group] = [(size, one["median_ms"], one["ratio"]) for size, one in best.items() if one and "ratio" in one]
    return {group: points for group, points in found.items() if points}


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a page: milliseconds and ratios by size, and slopes."""
    parts = [f"# How cost grows, {report['dtype']}", describe_machine(report)]
    for name, axis in report["axes"].items():
        found = curves(axis)
        cells = {(group, size): f"{ms:,.1f} ({ratio:.2f})" for group, of in found.items() for size, ms, ratio in of}
        rows = [[size, *(cells.get((group, int(size)), "–") for group in found)] for size in axis]
        if name != "workers":
            points = [[(size, ms) for size, ms, _ in of] for of in found.values()]
            rows.append(["slope", *(f"{slope(each):.2f}" if len(each) > 1 else "–" for each in points)])
        what = "milliseconds, and the ratio to the first column's in the same rounds"
        parts += [f"## {name.capitalize()}", f"{what[0].upper()}{what[1:]}.", table([name, *found], rows)]
    passes = [(f"{size} {name}", results) for name, axis in report["axes"].items() for size, results in axis.items()]
    return "\n\n".join([*parts, *remarks(report, passes)])


@styled
def draw(report: dict[str, Any]) -> Figure:
    """Return a panel for each axis: the ratios to its first column; all sizes but workers are logarithmic."""
    figure, axes = panels(len(report["axes"]), width=3.6, height=3.8)
    names = list(dict.fromkeys(group for axis in report["axes"].values() for group in curves(axis)))
    looks = {name: {"color": COLOURS[index % len(COLOURS)], "marker": "o^s"[index // len(COLOURS)], "label": name}
             for index, name in enumerate(names)}  # fmt: skip
    for ax, (name, axis) in zip(axes, report["axes"].items(), strict=True):
        for group, points in curves(axis).items():
            ax.plot([x for x, *_ in points], [one for *_, one in points], markersize=3, linewidth=1.4, **looks[group])
        if name != "workers":
            ax.set_xscale("log", base=2)
        ax.set(title=name, xlabel=name)
    axes[0].set_ylabel("time over plain's, or webdataset's")
    handles: dict[str, Any] = {}
    for ax in axes:
        handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the axes and write the files, anew after each size."""
    torch.manual_seed(0)
    dtype = str(args.dtype).removeprefix("torch.")
    name = f"growth-{args.device.partition(':')[0]}-{dtype}"
    report: dict[str, Any] = {"benchmark": "growth", "dtype": dtype, **environment(args.device), "rounds": args.rounds}
    report["axes"] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if "workers" in args.axes:
            make("digits", scratch)
        makers: dict[str, Callable[[int, argparse.Namespace], list[Way]]] = {
            "tokens": of_tokens,
            "batch": partial(of_vits, by_depth=False),
            "depth": partial(of_vits, by_depth=True),
            "workers": partial(of_workers, folder=Path(scratch, "train")),
        }

        def measure(axis: str, size: int) -> None:
            results = in_turns(makers[axis](size, args), args.device, args.rounds, seconds=SECONDS)
            add_ratios(results)
            report["axes"].setdefault(axis, {})[str(size)] = results

        sizes = QUICK_SIZES if args.quick else SIZES
        wanted = [(axis, size) for axis in args.axes for size in sizes[axis] if axis != "tokens" or size <= args.tokens]
        settings = {f"{size} {axis}": partial(measure, axis, size) for axis, size in wanted}
        try:
            measure_all(args, name, report, settings)
        finally:
            if report["axes"]:
                draw(report).savefig(args.output / f"{name}.png", dpi=130, facecolor="white")
    return report


def main(given: list[str] | None = None) -> int:
    """Run the command line."""
    parser = arguments(__doc__)
    parser.add_argument("axes", nargs="*", metavar="AXIS", help=f"of {', '.join(SIZES)}; all of them by default")
    largest = SIZES["tokens"][-1]
    parser.add_argument("--tokens", type=int, default=largest, help=f"the most tokens, {largest:,} by default")
    args = parse(parser, given)
    if unknown := [axis for axis in args.axes if axis not in SIZES]:
        parser.error(f"no axis is called {unknown[0]}: there are {', '.join(SIZES)}")
    args.axes = args.axes or list(SIZES)
    report = run(args)
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
