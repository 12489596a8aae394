"""Counts and times the cures of attention noise against plain attention, as ViT-S/16.

    python scripts/benchmarks/cures.py [--threads 1] [--batch 4] [--rounds 9] [--output DIR]

writes cures-<device>-<dtype>.json and prints the table of docs/concepts/cures.md. All models have one block, in which
only the attention and the width of the MLP differ. Parameters and FLOPs are counted as `diffvision compare` does. Times
are of `bench_models.py`: a training step and inference, all models interleaved, as ratios to plain attention.
"""

import sys
from typing import Any

import diffvision
from bench_models import TASKS, Built, measure, vit
from benchmark import arguments, measure_all, parse, table
from diffvision.comparison.costs import count_flops
from machine import describe_machine, environment

CURES = vit(
    "cures",
    [
        ("plain", "plain", {"model": "gated_vit_small", "variant": "standard"}),
        ("registers", "ours", {"model": "gated_vit_small", "variant": "standard", "reg_tokens": 4}),
        ("gate, per channel", "ours", {"model": "gated_vit_small"}),
        ("gate, per head", "ours", {"model": "gated_vit_small", "gate": "head"}),
        ("sink", "ours", {"model": "gated_vit_small", "variant": "sink"}),
        ("difference, V1", "ours", {"model": "diff_vit_small"}),
        ("difference, V2", "ours", {"model": "diffv2_vit_small"}),
    ],
)


def flops(name: str, built: Built) -> int:
    """Return the FLOPs of a forward pass of one image."""
    module = next(built[one] for one in CURES.models if one.name == name)
    return count_flops(diffvision.Model(name, "timm", module), {"image": CURES.batch(1, built.device)[0]})


def row(name: str, report: dict[str, Any]) -> list[str]:
    cost, plain = report["costs"][name], report["costs"]["plain"]
    times = {entry["task"]: entry["models"][name]["ratio"] for entry in report["tables"]}
    share = f"{100 * (cost['flops'] / plain['flops'] - 1):+.1f}%"
    ratios = [f"{times[task]:.2f}" if task in times else "–" for task in TASKS]
    return [name, f"{cost['parameters'] - plain['parameters']:+,}", share, *ratios]


def main(given: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=4)
    args = parse(parser, given)
    name = f"cures-{args.device.partition(':')[0]}-{str(args.dtype).removeprefix('torch.')}"
    built = Built(args.device)
    report: dict[str, Any] = {"benchmark": "cures", **environment(args.device), "rounds": args.rounds, "tables": []}
    report["costs"] = {
        one.name: {"parameters": sum(p.numel() for p in built[one].parameters()), "flops": flops(one.name, built)}
        for one in CURES.models
    }
    settings = {
        task: lambda task=task: report["tables"].append(measure(CURES, task, False, built, args)) for task in TASKS
    }
    measure_all(args, name, report, settings)
    print(describe_machine(report))
    rows = [row(one.name, report) for one in CURES.models]
    print(table(["model", "parameters", "FLOPs", *TASKS], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
