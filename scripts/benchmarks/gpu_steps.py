"""Time, memory and kernels of a training step, eager and compiled: ours, plain models, and those of other packages.

    python scripts/benchmarks/gpu_steps.py [--device cuda] [--minutes 3] [--jobs N] [--quick] --output DIR

writes DIR/steps.json after each model. A step is forward, backward and AdamW (fused on CUDA), in bfloat16 autocast over
float32 weights, on random data that lie on the device. A process has one model; several compile at once, and one is
timed while the others wait. A step's time is the median of 8, each synchronised, after 4 others. Peak memory is all
that torch allocated. A second call measures what DIR lacks. `--quick` has tiny models, to try the script itself.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import bench_language
import bench_models
from benchmark import arguments, parse, synchronize, training_step, write
from diffvision.models import language
from diffvision.training.compilation import inductor_options
from machine import environment

WARM, STEPS, KERNELS = 3, 8, 8
JOB_BYTES = 32 << 30  # of the GPU's memory, for a model that compiles beside others


class Setting(NamedTuple):
    """Models that are compared: name -> (role, what creates it), and the batch of all."""

    name: str
    items: str  # what a rate counts: images, pairs or tokens
    count: int  # of them in a step
    models: dict[str, tuple[str, Callable[[], nn.Module]]]
    batch: Callable[[str], Any]
    loss: Callable[[str, nn.Module, Any], Tensor]


def vit_setting(batch: int, quick: bool) -> Setting:
    if quick:
        names, image = {"plain_vit_debug": "plain", "diff_vit_debug": "ours"}, 32
    else:
        names, image = {"vit_base_patch16_224": "plain", "diff_vit_base": "ours", "diffv2_vit_base": "ours"}, 224
    models = {name: (role, partial(timm.create_model, name)) for name, role in names.items()}
    if not quick:
        peer = partial(timm.create_model, "vit_base_patch16_224", attn_layer="diff", num_heads=6)
        models["timm's diff, 6 heads"] = ("peer", peer)
    made = partial(vit_batch, batch, image, 10 if quick else 1000)
    name = f"ViT-B/16, batch {batch}"
    return Setting(name, "images", batch, models, made, lambda _, m, b: bench_models.vit_loss(m, b))


def vit_batch(size: int, image: int, classes: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, image, image, device=device), torch.randint(classes, (size,), device=device)


def clip_setting(batch: int, quick: bool) -> Setting:
    if quick:
        names, image = {"CLIP-debug": "plain", "DiffCLIP-debug": "ours"}, 32
    else:
        names, image = {"CLIP-ViT-B-16": "plain", "DiffCLIP-ViT-B-16": "ours", "DiffCLIP-V2-ViT-B-16": "ours"}, 224
        names["ViT-B-16"] = "peer"  # OpenCLIP's own
    models = {name: (role, partial(bench_models.open_clip_model, name)) for name, role in names.items()}
    made = partial(clip_batch, batch, image, *((24, 400) if quick else (77, 49000)))
    name = f"CLIP ViT-B/16, batch {batch}"
    return Setting(name, "pairs", batch, models, made, lambda _, m, b: bench_models.clip_loss(m, b))


def clip_batch(size: int, image: int, length: int, words: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, image, image, device=device), torch.randint(1, words, (size, length), device=device)


def language_setting(size: str, batch: int, tokens: int) -> Setting:
    models: dict[str, tuple[str, Callable[[], nn.Module]]] = {}
    for family in language.FAMILIES:
        create = partial(language.create, f"{family}-{size}", max_length=tokens)
        models[f"{family}-{size}"] = ("plain" if family == "transformer" else "ours", create)
    if importlib.util.find_spec("transformers") is not None:
        shape = dataclasses.replace(language.SIZES[size], max_length=tokens)
        for name in bench_language.PEERS:
            models[name] = ("peer", partial(bench_language.hugging_face, name, shape))
    made = partial(language_batch, batch, tokens, language.SIZES[size].vocab_size)
    name = f"language {size}, {batch} x {tokens}"
    return Setting(name, "tokens", batch * tokens, models, made, bench_language.loss_of)


def language_batch(batch: int, tokens: int, vocabulary: int, device: str) -> Tensor:
    return torch.randint(vocabulary, (batch, tokens + 1), device=device)


def settings(quick: bool) -> list[Setting]:
    if quick:
        return [vit_setting(2, True), clip_setting(2, True)]
    return [clip_setting(256, False), vit_setting(256, False), language_setting("830m", 4, 2048)]


@contextlib.contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Wait for the device: to be timed `alone`, or to compile beside others that compile."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def kernels(step: Callable[[], None], args: argparse.Namespace) -> dict[str, Any]:
    """Return the kernels that take longest in a step, and the milliseconds of all; on a CPU the operations."""
    is_cuda = args.device.startswith("cuda")
    with (
        turn(args.output, alone=True),
        profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as seen,
    ):
        step()
        synchronize(args.device)
    taken: Counter[str] = Counter()
    for event in seen.key_averages():
        taken[event.key[:90]] += event.self_device_time_total if is_cuda else event.self_cpu_time_total
    longest = {name: round(time / 1e3, 2) for name, time in taken.most_common(KERNELS)}
    return {"kernel_ms": round(taken.total() / 1e3, 2), "kernels": longest}


def modes(setting: Setting, name: str) -> tuple[str, ...]:
    return ("eager",) if setting.models[name][0] == "peer" else ("eager", "compiled")


def missing(results: dict[str, Any], setting: Setting, name: str) -> list[str]:
    """Return the modes that were not measured, or failed."""
    return [mode for mode in modes(setting, name) if "failed" in results.get(mode, {"failed": ""})]


def measure(setting: Setting, name: str, args: argparse.Namespace) -> None:
    """Write what a model's step takes in the modes that its file lacks, each when it is known."""
    file = file_of(args.output, setting, name)
    results = read(file)
    torch.manual_seed(0)
    role, create = setting.models[name]
    with torch.device(args.device):
        model = create().to(args.device).train()
    loss = partial(setting.loss, name, model, setting.batch(args.device))
    about = {"role": role, "parameters": sum(p.numel() for p in model.parameters())}
    for mode in missing(results, setting, name):
        if mode == "compiled":
            given: dict[str, Any] = {"backend": "eager"} if args.quick else {"options": inductor_options()}
            loss = torch.compile(loss, fullgraph=True, dynamic=False, **given)  # as `fit` compiles a model
        step = training_step(model, loss, args)
        results[mode] = dict(about)
        try:
            for measured in (times, kernels):
                results[mode] |= measured(step, args)
                write(file.parent, file.stem, results)
        except Exception as error:  # whatever a model, a compiler or the profiler may raise is its result
            results[mode]["failed"] = f"{type(error).__name__}: {error}"[:500]
            write(file.parent, file.stem, results)


def times(step: Callable[[], None], args: argparse.Namespace) -> dict[str, Any]:
    is_cuda = args.device.startswith("cuda")
    with turn(args.output, alone=False):
        start = time.perf_counter()
        for _ in range(WARM):
            step()
        synchronize(args.device)
        warm = time.perf_counter() - start
    if is_cuda:
        torch.cuda.empty_cache()  # for the others
    with turn(args.output, alone=True):
        step()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        taken = []
        for _ in range(STEPS):
            synchronize(args.device)
            start = time.perf_counter()
            step()
            synchronize(args.device)
            taken.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() if is_cuda else None
    return {"median_ms": statistics.median(taken), "times_ms": taken, "warm_s": warm, "peak_bytes": peak}


def file_of(folder: Path, setting: Setting, name: str) -> Path:
    return folder / "steps" / f"{setting.name}, {name}.json".replace("/", "-")


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def in_a_process(words: list[str], file: Path, setting: Setting, name: str, until: float) -> dict[str, Any]:
    """Measure a model in a process of its own, whose log is beside its results; return them by mode."""
    left = until - time.monotonic()
    if left > 0 and missing(read(file), setting, name):
        command = [sys.executable, __file__, *words, "--only", setting.name, name]
        with file.with_suffix(".log").open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=log, stderr=log, timeout=left, check=False)
    return read(file)


def summary(setting: Setting, result: dict[str, Any]) -> str:
    if "failed" in result:
        return result["failed"]
    size = f", {result['peak_bytes'] / 2**30:.2f} GiB" if result["peak_bytes"] else ""
    rate = 1e3 * setting.count / result["median_ms"]
    kernels = f", kernels {result['kernel_ms']:.1f} ms" if "kernel_ms" in result else ""
    return f"{result['median_ms']:.1f} ms, {rate:,.0f} {setting.items}/s{size}{kernels}"


def main(given: list[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--jobs", type=int, help="models that compile at once; by the GPU's memory")
    parser.add_argument("--only", nargs=2, metavar=("SETTING", "MODEL"), help="this model, in this process")
    args = parse(parser, given)
    (args.output / "steps").mkdir(exist_ok=True)
    every = settings(args.quick)
    if args.only:
        measure(next(one for one in every if one.name == args.only[0]), args.only[1], args)
        return 0

    report: dict[str, Any] = {"benchmark": "steps", **environment(args.device), "settings": {}}
    todo = [(setting, name) for setting in every for name in setting.models]
    todo.sort(key=lambda one: modes(*one) == ("eager",))  # other packages' models last
    memory = torch.cuda.get_device_properties(0).total_memory if args.device.startswith("cuda") else 0
    words, until = sys.argv[1:] if given is None else given, time.monotonic() + 60 * args.minutes
    left_out = 0
    with ThreadPoolExecutor(args.jobs or max(1, memory // JOB_BYTES)) as pool:
        files = [file_of(args.output, *one) for one in todo]
        running = {
            pool.submit(in_a_process, words, file, *one, until): one for file, one in zip(files, todo, strict=True)
        }
        for done in as_completed(running):
            setting, name = running[done]
            of_setting = report["settings"].setdefault(setting.name, {"items": setting.items, "count": setting.count})
            of_setting.setdefault("models", {})[name] = results = done.result()
            write(args.output, "steps", report)
            for mode, result in results.items():
                print(f"{setting.name}: {name}, {mode}: {summary(setting, result)}", flush=True)
            if absent := missing(results, setting, name):
                print(f"{setting.name}: {name}: not measured: {', '.join(absent)}", flush=True)
                left_out += 1
    return int(left_out > 0)


if __name__ == "__main__":
    sys.exit(main())
