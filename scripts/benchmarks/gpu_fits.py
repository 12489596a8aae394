"""Short runs of `diffvision fit` on a device, as people start them: what ends well, and what its loss was.

    python scripts/benchmarks/gpu_fits.py [--device cuda] [--steps 20] [--output DIR]

writes fits.json, anew after each run: bfloat16, torch.compile, flash attention, FSDP2 and, where there are two devices,
two processes; then one run that SIGTERM ends and that is resumed, next to the same run left alone. They are
DiffCLIP-debug-0.2 on the made digits and diff-debug on the standard library's text. On a CPU each runs as far as it
goes: without flash attention, and with two processes.
"""

import argparse
import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmark import progress

CLIP, LANGUAGE = ("configs/clip/debug.yaml",), ("configs/language/debug.yaml",)
# A process in which every call takes flash attention, and what it cannot take is an error.
FLASH = "from diffvision.cli import main\nfrom diffvision.ops import attention_backend\nimport sys\n" + (
    "with attention_backend('flash'): sys.exit(main(sys.argv[1:]))"
)
SECONDS = 100  # of a run, at most
LOSS = "train/loss"


class Fit(NamedTuple):
    """A run: the configurations, and what is changed in them."""

    configs: tuple[str, ...]
    settings: dict[str, Any]
    program: tuple[str, ...] = ("-m", "diffvision")
    cannot: str = ""


def make_data(folder: Path) -> None:
    """Make the digits and the text that the recipes read."""
    for words in (
        ["make", "digits", folder / "digits"],
        ["make", "stdlib", folder / "stdlib"],
        ["tokenizer", folder / "stdlib/train", folder / "stdlib/tokenizer.json", "--vocab_size", "512"],
    ):
        subprocess.run([sys.executable, "-m", "diffvision", "data", *map(str, words)], check=True, stdout=sys.stderr)


def fits(device: str) -> dict[str, Fit]:
    """Return the runs that a device is to be tried with."""
    count = torch.cuda.device_count() if device == "cuda" else 2
    fsdp = {
        "trainer.strategy": "ModelParallelStrategy",
        "trainer.strategy.data_parallel_size": count,
        "trainer.strategy.tensor_parallel_size": 1,
        "trainer.strategy.save_distributed_checkpoint": False,
        "trainer.devices": count,
    }
    two = {"trainer.devices": 2, "trainer.strategy": "ddp"}
    return {
        "float32": Fit(CLIP, {}),
        "bfloat16": Fit(CLIP, {"trainer.precision": "bf16-mixed"}),
        "compile": Fit((*CLIP, "configs/clip/debug_compile.yaml"), {"trainer.precision": "bf16-mixed"}),
        "flash": Fit(
            LANGUAGE, {"trainer.precision": "bf16-true"}, ("-c", FLASH), "" if device == "cuda" else "flash needs CUDA"
        ),
        "FSDP2": Fit(LANGUAGE, {**fsdp, "trainer.precision": "bf16-true" if device == "cuda" else "32-true"}),
        "two processes": Fit(CLIP, two, cannot="" if count > 1 else f"there is {count} device"),
    }


def command(fit: Fit, data: Path, runs: Path, device: str, steps: int) -> list[str]:
    """Return the command line of a run."""
    settings = {"trainer.accelerator": "gpu" if device == "cuda" else device, "trainer.max_steps": steps}
    settings |= {"trainer.log_every_n_steps": 1, "trainer.limit_val_batches": 2, "trainer.logger.save_dir": runs}
    settings |= {"model.optimizer.warmup_steps": 5, "model.optimizer.warmup_epochs": "null"}
    if fit.configs[0] == CLIP[0]:
        settings |= {"trainer.max_epochs": -1, "data.train": data / "digits/train"}
        settings |= {"data.evaluations": json.dumps([str(data / "digits/zero_shot")])}
    else:
        settings |= {"model.model": "diff-debug", "model.tokenizer": data / "stdlib/tokenizer.json"}
        settings |= {"data.train": data / "stdlib/train", "data.evaluation": data / "stdlib/validation"}
        settings |= {"trainer.val_check_interval": steps}
    settings |= fit.settings
    words = [word for config in fit.configs for word in ("--config", config)]
    for name, value in settings.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return [sys.executable, *fit.program, "fit", *words]


def losses(runs: Path) -> list[float]:
    """Return the training losses of the run in a folder, by step; a resumed run writes another file."""
    found = {}
    for file in sorted(runs.rglob("metrics*.csv")):
        for row in csv.DictReader(file.open()):
            if row.get(LOSS):
                found[int(row["step"])] = float(row[LOSS])
    return [found[step] for step in sorted(found)]


def ended(words: list[str], runs: Path, *, until: int | None = None) -> dict[str, Any]:
    """Run a command to its end, or send it SIGTERM when it has logged so many steps; return how it ended."""
    start = time.perf_counter()
    with (runs.parent / f"{runs.name}.log").open("a") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        asked = False
        while process.poll() is None:
            if time.perf_counter() - start > SECONDS:
                process.kill()
            elif until is not None and not asked and len(losses(runs)) >= until:
                process.send_signal(signal.SIGTERM)
                asked = True
            time.sleep(0.2)
    result: dict[str, Any] = {"exit_status": process.returncode, "seconds": round(time.perf_counter() - start, 1)}
    if process.returncode:
        result["log_end"] = Path(log.name).read_text(errors="replace")[-1500:].replace(str(runs.parent), "")
    if found := losses(runs):
        result |= {"steps": len(found), "first_loss": found[0], "last_loss": found[-1]}
    return result


def resumed(data: Path, work: Path, device: str, steps: int) -> dict[str, Any]:
    """Return whether a run that was ended and resumed has the losses of the same run left alone."""
    whole, cut = work / "whole", work / "cut"
    fit = Fit(CLIP, {"trainer.precision": "bf16-mixed"})
    alone = ended(command(fit, data, whole, device, steps), whole)
    words = command(fit, data, cut, device, steps)
    first = ended([*words, "--resume", "auto"], cut, until=steps // 3) | {"expected": [128 + signal.SIGTERM]}
    second = ended([*words, "--resume", "auto"], cut)
    a, b = losses(whole), losses(cut)
    apart = max((abs(x - y) for x, y in zip(a, b, strict=False)), default=None)
    return {
        "left alone": alone,
        "ended by SIGTERM": first,
        "resumed": second,
        "steps": [len(a), len(b)],
        "largest difference of a loss": apart,
        "bit_equal": a == b,
    }


def measured(options: argparse.Namespace, data: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what each run showed."""
    work = options.output / "fits"
    runs = fits(options.device)
    with progress(len(runs) + 1, options.minutes) as following:
        for name, fit in runs.items():
            if fit.cannot:
                yield name, {"cannot": fit.cannot}
                continue
            if not following(name):
                return
            folder = work / name.replace(" ", "_")
            folder.mkdir(parents=True)
            yield name, ended(command(fit, data, folder, options.device, options.steps), folder)
        if following("resume"):
            for name in ("whole", "cut"):
                (work / name).mkdir(parents=True)
            yield "resume", resumed(data, work, options.device, options.steps)


def main() -> int:
    """Run them all; the exit status is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=3.0, help="start nothing new after so many")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_fits"), metavar="DIR")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    data = options.output / "fits-data"
    make_data(data)
    results: dict[str, Any] = {}
    for name, result in measured(options, data):
        results[name] = result
        (options.output / "fits.json").write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(result))
    parts = [part for result in results.values() for part in (result, *result.values()) if isinstance(part, dict)]
    return int(any(part.get("exit_status", 0) not in part.get("expected", [0]) for part in parts))


if __name__ == "__main__":
    sys.exit(main())
