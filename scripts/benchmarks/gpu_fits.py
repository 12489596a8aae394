"""Short runs of `diffvision fit` on a device: which end well, their losses, their speed, and whether they resume.

    python scripts/benchmarks/gpu_fits.py [--device cuda] [--minutes 3.5] [--quick] --output DIR

writes DIR/fits.json after each run. The first is a compiled DiffCLIP-ViT-B/16 on made JPEGs of 256 to 320 pixels: 50
steps of 512 pairs with a validation every 15; SIGTERM ends it after 25, and it is resumed. The others are steps of
small models on the made digits and the standard library's text. On CUDA all start at once, on a CPU one after another,
and `--quick` takes a small model for the first too.
"""

import csv
import io
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from benchmark import arguments, parse, write
from diffvision.data.shards.writer import write_manifest, write_tar
from diffvision.ops.attention import flash
from machine import environment

CC3M = ("configs/clip/cc3m.yaml", "configs/clip/cc3m_diffclip.yaml")
CLIP, LANGUAGE = ("configs/clip/debug.yaml",), ("configs/language/debug.yaml",)
# A process in which every call takes flash attention, and what it cannot take is an error.
FLASH = "from diffvision.cli import main\nfrom diffvision.ops import attention_backend\nimport sys\n" + (
    "with attention_backend('flash'): sys.exit(main(sys.argv[1:]))"
)
SHARDS, EACH = 12, 640  # JPEGs
WORDS = ("a", "red", "green", "large", "small", "cat", "dog", "tree", "house", "near", "on", "water", "sky")
LOSS, RATE, ACCURACY = "train/loss", "train/samples_per_second", "zero_shot/digits/acc1"
ENDED = 128 + signal.SIGTERM


class Fit(NamedTuple):
    """A run: the configurations, what is changed in them, and whether it is ended and resumed on its way."""

    configs: tuple[str, ...]
    settings: dict[str, Any]
    steps: int = 20
    program: tuple[str, ...] = ("-m", "diffvision")
    cannot: str = ""
    resume: bool = False
    equal: bool = False  # the same run left alone is compared with it


def make_shard(file: Path, count: int) -> None:
    """Write a shard of JPEGs of 256 to 320 pixels, of blurred noise, with captions of ten words."""
    draw, pixels = random.Random(file.name), np.random.default_rng(int(file.stem))
    samples = []
    for number in range(count):
        image = Image.fromarray(pixels.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        data = io.BytesIO()
        image.resize((288, 256) if number % 2 else (256, 320), Image.Resampling.BICUBIC).save(data, "JPEG", quality=90)
        text = " ".join(draw.choices(WORDS, k=10))
        samples.append({"__key__": f"{file.stem}{number:04d}", "jpg": data.getvalue(), "txt": text})
    write_tar(file, samples)


def make_jpegs(folder: Path, shards: int, each: int) -> None:
    folder.mkdir()
    files = [folder / f"{shard:06d}.tar" for shard in range(shards)]
    with ThreadPoolExecutor() as pool:  # Pillow works without the interpreter's lock
        list(pool.map(partial(make_shard, count=each), files))
    write_manifest(folder)


def make_data(folder: Path, quick: bool) -> None:
    """Make what the recipes read, the kinds at once."""

    def made(*words: str | Path) -> None:
        subprocess.run([sys.executable, "-m", "diffvision", "data", *map(str, words)], check=True, stdout=sys.stderr)

    def text() -> None:
        made("make", "stdlib", folder / "stdlib")
        made("tokenizer", folder / "stdlib/train", folder / "stdlib/tokenizer.json", "--vocab_size", "512")

    folder.mkdir()
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(make_jpegs, folder / "jpegs", *((2, 32) if quick else (SHARDS, EACH))),
            pool.submit(made, "make", "digits", folder / "digits"),
            pool.submit(text),
        ]
    for job in jobs:
        job.result()


def fits(device: str, data: Path, quick: bool) -> dict[str, Fit]:
    """Return the runs that a device is to be tried with, by worth."""
    is_cuda = device == "cuda"
    count = torch.cuda.device_count() if is_cuda else 2
    clip = {
        "trainer.max_epochs": -1,
        "data.evaluations": json.dumps([str(data / "digits/zero_shot")]),
        "model.optimizer.warmup_steps": 5,
        "model.optimizer.warmup_epochs": "null",
        "trainer.precision": "bf16-mixed",
    }
    digits = {**clip, "data.train": data / "digits/train", "trainer.log_every_n_steps": 1}
    jpegs = {
        **clip,
        "data.train": data / "jpegs",
        "data.batch_size": 8 if quick else 512,
        "data.num_workers": 1 if quick else max(1, (os.cpu_count() or 1) - 2),
        "model.accum_freq": 1,
        "model.compile": True,
        "trainer.devices": 1,
        "trainer.strategy": "auto",
        "trainer.log_every_n_steps": 1 if quick else 5,
    }
    if quick:
        jpegs |= {"model.model": "DiffCLIP-debug-0.2"}
    text = {
        "model.model": "diff-debug",
        "model.tokenizer": data / "stdlib/tokenizer.json",
        "data.train": data / "stdlib/train",
        "data.evaluation": data / "stdlib/validation",
        "model.optimizer.warmup_steps": 5,
        "trainer.val_check_interval": 20,
        "trainer.log_every_n_steps": 1,
        "trainer.precision": "bf16-true" if is_cuda else "32-true",
    }
    fsdp = {
        "trainer.strategy": "ModelParallelStrategy",
        "trainer.strategy.data_parallel_size": count,
        "trainer.strategy.tensor_parallel_size": 1,
        "trainer.strategy.save_distributed_checkpoint": False,
        "trainer.devices": count,
    }
    found = flash.find_libraries() if is_cuda else "flash-attn needs CUDA"
    one = "" if count > 1 else "there is 1 device"
    name = "CLIP, compiled" if quick else "CLIP ViT-B/16, compiled"
    return {
        name: Fit(CC3M, jpegs, steps=12 if quick else 50, resume=True),
        "FSDP2": Fit(LANGUAGE, {**text, **fsdp}),
        "resume": Fit(
            CLIP,
            {**digits, "model.compile": not quick, "trainer.deterministic": True},
            steps=20 if quick else 40,
            resume=True,
            equal=True,
        ),
        "flash": Fit(LANGUAGE, text, program=("-c", FLASH), cannot=found if isinstance(found, str) else ""),
        "two processes": Fit(CLIP, {**digits, "trainer.devices": 2, "trainer.strategy": "ddp"}, cannot=one),
    }


def command(fit: Fit, runs: Path, device: str) -> list[str]:
    """Return the command line of a run."""
    settings = {"trainer.accelerator": "gpu" if device == "cuda" else device, "trainer.max_steps": fit.steps}
    settings |= {"trainer.limit_val_batches": 2, "trainer.logger.save_dir": runs, **fit.settings}
    words = [word for config in fit.configs for word in ("--config", config)]
    for name, value in settings.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return [sys.executable, *fit.program, "fit", *words]


def logged(runs: Path, name: str) -> dict[int, float]:
    """Return a logged number of the run in a folder by step; a resumed run writes another file."""
    found = {}
    for file in sorted(runs.rglob("metrics*.csv")):
        for row in csv.DictReader(file.open()):
            if row.get(name):
                found[int(row["step"])] = float(row[name])
    return dict(sorted(found.items()))


def ended(words: list[str], runs: Path, until: float, *, stop_at: float = float("inf")) -> dict[str, Any]:
    """Run a command to its end, or send it SIGTERM when it has logged a step; return how it ended."""
    start, asked = time.monotonic(), False
    with (runs.parent / f"{runs.name}.log").open("a") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if time.monotonic() > until:
                process.kill()
            elif not asked and max(logged(runs, LOSS), default=0) >= stop_at:
                process.send_signal(signal.SIGTERM)
                asked = True
            time.sleep(0.2)
    result: dict[str, Any] = {"exit_status": process.returncode, "seconds": round(time.monotonic() - start, 1)}
    if process.returncode != (ENDED if stop_at < float("inf") else 0):
        result["failed"] = Path(log.name).read_text(errors="replace")[-1500:].replace(str(runs.parent), "")
    return result


def run(fit: Fit, folder: Path, device: str, until: float) -> dict[str, Any]:
    """Return how a run ended, what it logged, and where it was resumed whether that made a difference."""
    if fit.cannot:
        return {"cannot": fit.cannot}
    if time.monotonic() > until:
        return {"failed": "the time was over before it started"}
    words, alone = command(fit, folder, device), folder.with_name(f"{folder.name}_alone")
    with ThreadPoolExecutor(1) as beside:
        whole = beside.submit(ended, command(fit, alone, device), alone, until) if fit.equal else None
        if not fit.resume:
            result = ended(words, folder, until)
        else:
            first = ended([*words, "--resume", "auto"], folder, until, stop_at=0.5 * fit.steps)
            result = {"ended by SIGTERM": first, **ended([*words, "--resume", "auto"], folder, until)}
    losses, rates = logged(folder, LOSS), logged(folder, RATE)
    result |= {"losses": losses, "samples_per_second": rates, "accuracy": logged(folder, ACCURACY)}
    if rates:
        result["median_samples_per_second"] = statistics.median(rates.values())
    if whole is not None:
        result["left alone"] = whole.result()
        others = logged(alone, LOSS)
        result["bit_equal"] = losses == others
        result["differ"] = {step: [loss, others.get(step)] for step, loss in losses.items() if loss != others.get(step)}
    return result


def has_failed(result: dict[str, Any]) -> bool:
    return "failed" in result or any("failed" in part for part in result.values() if isinstance(part, dict))


def main(given: list[str] | None = None) -> int:
    """Run them all; the exit status is 1 where one failed."""
    args = parse(arguments(__doc__ or ""), given)
    until = time.monotonic() + 60 * args.minutes
    work, data = args.output / "fits", args.output / "fits-data"
    for folder in (work, data):
        shutil.rmtree(folder, ignore_errors=True)
    work.mkdir()
    make_data(data, args.quick)
    report: dict[str, Any] = {"benchmark": "fits", **environment(args.device), "fits": {}}
    todo = fits(args.device, data, args.quick)
    with ThreadPoolExecutor(len(todo) if args.device == "cuda" else 1) as pool:
        running = {}
        for name, fit in todo.items():
            folder = work / name.replace(" ", "_").replace("/", "-").replace(",", "")
            running[pool.submit(run, fit, folder, args.device, until)] = name
        for done in as_completed(running):
            report["fits"][running[done]] = result = done.result()
            write(args.output, "fits", report)
            print(running[done], json.dumps(result), flush=True)
    return int(any(map(has_failed, report["fits"].values())))


if __name__ == "__main__":
    sys.exit(main())
