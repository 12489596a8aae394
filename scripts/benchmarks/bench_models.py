"""Times training steps and inference of differential models against their matched plain models, on one device.

    python scripts/benchmarks/bench_models.py [--quick] [--device cpu] [--threads 2] [--compile] [--output DIR]

writes models-<device>-<dtype>.json (every time of every round) and .png, and prints tables.

A training step is forward, backward and AdamW: cross entropy over 1,000 classes for a ViT, the contrastive loss for
CLIP. Inference is the forward pass in evaluation, for CLIP both towers. On CUDA weights are float32 and the forward
pass runs in bfloat16 autocast; on a CPU all is float32. Weights are random, and so are images and texts, made on the
device once: no data loading is in the times. `benchmark.py` says how times and memory are taken. With
--compile each model is also timed as compiled by torch.compile with its default settings, against the plain model so
compiled.
"""

import gc
import itertools
import logging
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark import (
    Way,
    add_ratios,
    arguments,
    autocast,
    in_turns,
    measure_all,
    parse,
    peak_memory,
    remarks,
    table,
    training_step,
)
from benchmark_picture import Panel, draw
from machine import describe_machine, device_in_words, environment


class Model(NamedTuple):
    """A model of a family. The one of role "plain" is the family's baseline."""

    name: str
    role: str
    create: Callable[[], nn.Module]


class Family(NamedTuple):
    """Models to be compared; `loss` and `infer` take a model and a batch."""

    name: str
    models: list[Model]
    batch: Callable[[int, str], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    infer: Callable[[nn.Module, tuple[Tensor, ...]], Any]


def vit_batch(size: int, device: str, image: int = 224) -> tuple[Tensor, ...]:
    return torch.randn(size, 3, image, image, device=device), torch.randint(1000, (size,), device=device)


def vit_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def clip_batch(size: int, device: str, image: int = 224) -> tuple[Tensor, ...]:
    return torch.randn(size, 3, image, image, device=device), torch.randint(1, 49000, (size, 77), device=device)


def clip_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    image, text, scale = model(*batch)[:3]
    logits = scale * image @ text.T
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def open_clip_model(name: str) -> nn.Module:
    import open_clip

    # It warns of random weights, which are meant.
    logging.disable(logging.WARNING)
    try:
        return open_clip.create_model(name)
    finally:
        logging.disable(logging.NOTSET)


def vit(name: str, models: list[tuple[str, str, dict[str, Any]]], image: int = 224) -> Family:
    """Return a family of timm's models, each given as (title, role, arguments of its creation)."""
    made = []
    for title, role, settings in models:
        name_in_timm = settings.get("model", title)
        settings = {key: value for key, value in settings.items() if key != "model"}
        made.append(Model(title, role, partial(timm.create_model, name_in_timm, **settings)))
    return Family(name, made, partial(vit_batch, image=image), vit_loss, lambda model, batch: model(batch[0]))


def clip(name: str, models: list[tuple[str, str]], image: int = 224) -> Family:
    """Return a family of OpenCLIP's models, each given as (name, role)."""
    made = [Model(title, role, partial(open_clip_model, title)) for title, role in models]
    return Family(name, made, partial(clip_batch, image=image), clip_loss, lambda model, batch: model(*batch))


# timm's differential ViT keeps the plain model's 12 heads, of half the size; with 6 its heads are as large as the plain
# ones, which is what diff_vit_base has.
FAMILIES = [
    clip("CLIP", [("CLIP-ViT-B-16", "plain"), ("DiffCLIP-ViT-B-16", "ours"), ("DiffCLIP-V2-ViT-B-16", "ours")]),
    vit(
        "ViT",
        [
            ("vit_base_patch16_224", "plain", {}),
            ("timm's diff, 12 heads", "peer", {"model": "vit_base_patch16_224", "attn_layer": "diff"}),
            ("timm's diff, 6 heads", "peer", {"model": "vit_base_patch16_224", "attn_layer": "diff", "num_heads": 6}),
            ("diff_vit_base", "ours", {}),
            ("diffv2_vit_base", "ours", {}),
        ],
    ),
]


# By name only: a tiny family to try the benchmark itself.
DEBUG = vit(
    "debug",
    [("plain_vit_debug", "plain", {"num_classes": 1000}), ("diff_vit_debug", "ours", {"num_classes": 1000})],
    image=32,
)
ALL = [*FAMILIES, DEBUG]
# Device and --quick -> samples of a batch.
BATCHES = {("cpu", False): 8, ("cpu", True): 2, ("cuda", False): 256, ("cuda", True): 64}
# With --quick, for the rounds of a family's training or inference.
QUICK_SECONDS = 12.0
TASKS = ("training step", "inference")
METHOD = """Ratios are time over the plain model's in the same run (lower is better): all models of a family take turns
within each round, and a cell is the median over rounds of the ratio in one round. "throughput" is the plain model's
time over this model's. Peak memory is what a step or a forward pass holds beyond weights, optimiser state and batch.
Quartiles and every single time are in the JSON."""


def training(family: Family, model: nn.Module, size: int, args: Any) -> Callable[[], Any]:
    batch = family.batch(size, args.device)
    return training_step(model, lambda: family.loss(model, batch), args)


def inference(family: Family, model: nn.Module, size: int, args: Any) -> Callable[[], Any]:
    cast, batch = autocast(args), family.batch(size, args.device)

    def infer() -> Any:
        with torch.no_grad(), cast():
            return family.infer(model, batch)

    return infer


class Built:
    """The models of the families, each built when it is first used."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.models: dict[str, nn.Module] = {}

    def __getitem__(self, model: Model) -> nn.Module:
        if model.name not in self.models:
            self.models[model.name] = model.create().to(self.device)
        return self.models[model.name]


def ways(family: Family, task: str, compiled: bool, size: int, built: Built, args: Any) -> list[Way]:
    """Return a way for each model of a family at a task; a model that cannot be built says why."""
    made = []
    for one in family.models:
        try:
            model = built[one].train(task == "training step")
            model = torch.compile(model) if compiled else model
            call = (training if task == "training step" else inference)(family, model, size, args)
            made.append(Way(one.name, one.role, call))
        except Exception as error:
            made.append(Way(one.name, one.role, None, cannot=f"{type(error).__name__}: {error}"[:300]))
    return made


def measure(family: Family, task: str, compiled: bool, built: Built, args: Any) -> dict[str, Any]:
    """Time one table: a family at a task."""
    size = args.batch or BATCHES["cuda" if args.device.startswith("cuda") else "cpu", args.quick]
    if compiled:
        # What was compiled for the other families and tasks would count against a limit.
        torch._dynamo.reset()
    made = ways(family, task, compiled, size, built, args)

    def peak(way: Way) -> int:
        assert way.call is not None
        return peak_memory(way.call, args.device)

    seconds = QUICK_SECONDS if args.quick else math.inf
    results = in_turns(made, args.device, args.rounds, seconds=seconds, peak=peak)
    del made
    gc.collect()
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()
    for model in family.models:
        if model.name in built.models:
            results[model.name]["parameters"] = sum(p.numel() for p in built.models[model.name].parameters())
    entry = {"family": family.name, "task": task, "compiled": compiled, "batch": size}
    return {**entry, "baseline": add_ratios(results), "models": results}


def title(entry: dict[str, Any]) -> str:
    return f"{entry['family']}, {entry['task']}{', compiled' if entry['compiled'] else ''}, batch {entry['batch']}"


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a page: a table for each family and task."""
    parts = [f"# Models, {report['dtype']}", describe_machine(report), METHOD]
    columns = ["model", "parameters", "images/s", "time", "quartiles", "throughput", "peak memory, MiB"]
    for entry in report["tables"]:
        parts += [f"## {title(entry)}", table(columns, [_row(r, entry["batch"]) for r in entry["models"].values()])]
    return "\n\n".join([*parts, *remarks(report, [(title(entry), entry["models"]) for entry in report["tables"]])])


def _row(result: dict[str, Any], batch: int) -> list[str]:
    row = [result["group"], f"{result['parameters'] / 1e6:.1f} M" if "parameters" in result else "–"]
    if "ratio" in result:
        low, high = result["ratio_quartiles"]
        rate, ratio = 1e3 * batch / result["median_ms"], result["ratio"]
        row += [f"{rate:,.1f}", f"{ratio:.3f}", f"{low:.3f}–{high:.3f}", f"{100 / ratio:.1f}%"]
    else:
        row += ["–"] * 4
    return [*row, f"{result['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in result else "–"]


def picture(path: Path, report: dict[str, Any]) -> None:
    """Draw a panel for each task with a row for each model, plain models left out."""
    panels = []
    for task in TASKS:
        ratios: dict[str, dict[str, float]] = {}
        for entry in report["tables"]:
            if entry["task"] != task:
                continue
            way = "compiled" if entry["compiled"] else "as it is"
            for result in entry["models"].values():
                if "ratio" in result and result["role"] != "plain":
                    ratios.setdefault(result["group"], {})[way] = result["ratio"]
        panels.append(Panel(task.capitalize(), ratios, {}))
    note = f"torch {report['versions']['torch']}; each model against the plain one of its family"
    than = "the plain model's"
    draw(path, f"Models, {report['dtype']}, {device_in_words(report)}", panels, {"as it is", "compiled"}, note, than)


def run(args: Any, families: list[Family]) -> dict[str, Any]:
    """Measure the families and write the files, anew after each table."""
    dtype = str(args.dtype).removeprefix("torch.")
    name = f"models-{args.device.partition(':')[0]}-{dtype}"
    torch.manual_seed(0)
    built = Built(args.device)
    report: dict[str, Any] = {"benchmark": "models", "dtype": dtype, **environment(args.device), "rounds": args.rounds}
    report["tables"] = []
    settings = {}
    for compiled in (False, True) if args.compile else (False,):
        for family, task in itertools.product(families, TASKS):

            def table_of(family=family, task=task, compiled=compiled) -> None:
                report["tables"].append(measure(family, task, compiled, built, args))

            settings[f"{family.name}, {task}{', compiled' if compiled else ''}"] = table_of
    try:
        measure_all(args, name, report, settings)
    finally:
        # Also of what was measured when the run is stopped.
        if report["tables"]:
            picture(args.output / f"{name}.png", report)
    return report


def main(given: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", metavar="FAMILY", help=f"of {[f.name for f in ALL]}")
    parser.add_argument("--batch", type=int, help="8 on a CPU (2 with --quick), 256 on CUDA (64)")
    parser.add_argument("--compile", action="store_true", help="also as compiled by torch.compile")
    args = parse(parser, given)
    families = [f for f in ALL if f.name in (args.models or [family.name for family in FAMILIES])]
    if not families:
        parser.error(f"no family is called {' or '.join(args.models)}: there are {[f.name for f in ALL]}")
    report = run(args, families)
    if not report["tables"]:
        return 1
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
