"""Whole programs: `diffvision fit` and `evaluate` against OpenCLIP's, timm's and CLIP_benchmark's, in turns.

    python scripts/benchmarks/bench_programs.py clip [--python PYTHON]         # open_clip_train.main
    python scripts/benchmarks/bench_programs.py vit --timm CLONE               # train.py of timm's repository
    python scripts/benchmarks/bench_programs.py zero_shot [--python PYTHON]    # CLIP_benchmark; and `retrieval`
    python scripts/benchmarks/bench_programs.py start                          # the first step, and imports

The same model, digits, augmentation, batches, workers and threads. A training is one epoch; its first `WARM` steps are
left out, and the others' time has all that the program does between them: loading, logging, checkpoints. `timed.py`
notes steps and waits for data; no program is changed. An evaluation is a whole process, imports and all. Ratios are of
one round each; the table has their median and range. OpenCLIP's training and CLIP_benchmark need an older webdataset
and numpy: a Python environment with these is made unless one is given.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import open_clip
import torch
import webdataset

import openclip_versus
from benchmark import table
from diffvision.data.make import make
from machine import hardware, versions

WARM = 5
ROOT = Path(__file__).resolve().parents[2]
HOSTS = "import torch, torchvision, timm, open_clip, transformers, webdataset, lightning.pytorch"
TASKS = {"zero_shot": "zeroshot_classification", "retrieval": "zeroshot_retrieval"}
CALLBACKS = "[Throughput, DataReport, LambdaMonitor, ModelCheckpoint]"


class Took(NamedTuple):
    """What one run of a program took.

    Attributes:
        seconds: of a step, from one to the next; of a whole evaluation; to the first step.
        waiting: seconds of a step in which it waits for data; None where there are no steps.
    """

    seconds: float
    waiting: float | None = None


Ways = dict[str, Callable[[], Took]]


class Programs:
    """Runs programs in a folder with digits, each with one thread.

    Args:
        folder: to work in.
        batch: samples.
        workers: that load data.
        python: of the environment for OpenCLIP's training and CLIP_benchmark.
    """

    def __init__(self, folder: Path, batch: int, workers: int, python: str = sys.executable) -> None:
        self.folder, self.batch, self.workers, self.python = folder, batch, workers, python

    def run(self, command: list[str]) -> Took:
        """Run a command; one that fails ends this script."""
        quiet = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        begun = time.monotonic()
        done = subprocess.run(command, cwd=self.folder, env=environment, **output, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return Took(time.monotonic() - begun)

    def noted(self, program: list[str], python: str = sys.executable) -> dict[str, list[float]]:
        """Run a program by `timed.py`, and return its steps and waits."""
        file = self.folder / "timed.json"
        self.run([python, str(Path(__file__).with_name("timed.py")), str(file), *program])
        return json.loads(file.read_text())

    def training(self, program: list[str], python: str = sys.executable) -> Took:
        """Return what a step of a training of one epoch takes, behind the first ones."""
        noted = self.noted(program, python)
        steps = noted["steps"]
        if len(steps) < 2 * WARM:
            sys.exit(f"an epoch has {len(steps)} steps; {2 * WARM} are needed: choose a smaller --batch")
        seconds = (steps[-1] - steps[WARM]) / (len(steps) - 1 - WARM)
        return Took(seconds, statistics.mean(noted["waits"][WARM : len(steps)]))

    def fit(self, recipe: str, model: str, **more: str) -> list[str]:
        """Return `diffvision fit` for an epoch of a recipe without evaluation, with the callbacks of a usual run."""
        settings = {
            "model.model": model,
            "model.init_args.optimizer.warmup_epochs": 0,  # which would be longer than these runs
            "data.init_args.batch_size": self.batch,
            "data.init_args.num_workers": self.workers,
            "trainer.max_epochs": 1,
            "trainer.limit_val_batches": 0,
            "trainer.accelerator": "cpu",
            "trainer.callbacks": CALLBACKS,
            **more,
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        return ["diffvision", "fit", "--config", str(ROOT / "configs" / recipe), *words]

    def clip(self, model: str) -> Ways:
        """Return ours and OpenCLIP's training of a CLIP, with OpenCLIP's default augmentation."""
        ours = self.fit("clip/debug.yaml", model, **{"model.init_args.augmentation": "null"})
        theirs = ["open_clip_train.main", "--model", model, "--precision", "fp32", "--epochs", "1", "--name", "run"]
        theirs += ["--train-data", "data/digits/train/{000000..000008}.tar", "--lr", "1e-3", "--beta2", "0.98"]
        theirs += ["--eps", "1e-6", "--wd", "0.1", "--warmup", "70", "--grad-clip-norm", "1.0"]
        theirs += ["--log-every-n-steps", "20", "--batch-size", str(self.batch), "--workers", str(self.workers)]

        def train() -> Took:
            shutil.rmtree(self.folder / "logs", ignore_errors=True)  # it refuses a name that it has seen
            return self.training(theirs, self.python)

        return {"diffvision fit": lambda: self.training(ours), "open_clip_train": train}

    def vit(self, model: str, clone: Path) -> Ways:
        """Return ours and timm's training of a ViT, with the recipe's augmentation; the digits are files for timm's."""
        ours = self.fit("vision/debug.yaml", model, **{"model.init_args.mixup": "null"})
        theirs = [str(clone.resolve() / "train.py"), "images", "--model", model, "--num-classes", "10"]
        theirs += ["--device", "cpu", "--epochs", "1", "--opt", "adamw", "--lr", "2e-3", "--weight-decay", "0.05"]
        theirs += ["--warmup-epochs", "0", "--clip-grad", "1.0", "--drop-path", "0.05", "--scale", "0.7", "1.0"]
        theirs += ["--hflip", "0", "--color-jitter", "0.2", "--smoothing", "0.1", "--log-interval", "10"]
        theirs += ["--batch-size", str(self.batch), "--workers", str(self.workers), "--output", "output"]
        return {"diffvision fit": lambda: self.training(ours), "timm's train.py": lambda: self.training(theirs)}

    def evaluation(self, model: str, kind: str) -> Ways:
        """Return ours and CLIP_benchmark's evaluation of random weights on digits."""
        weights, digits = str(self.folder / "weights.pt"), f"data/digits/{kind}"
        torch.save(open_clip.create_model(model).state_dict(), weights)
        settings = ["--num_workers", str(self.workers), "--batch_size", str(self.batch)]
        ours = [sys.executable, "-m", "diffvision", "evaluate", model, "--checkpoint", weights, "--device", "cpu"]
        ours += ["--data", digits, "--tasks", kind, "--output", "ours.json", *settings]
        theirs = [self.python, "-m", "diffvision.run", "clip_benchmark.cli", "eval", "--no_amp", "--task", TASKS[kind]]
        theirs += ["--dataset", "wds/digits", "--dataset_root", digits, "--split", "test", "--model", model]
        theirs += ["--pretrained", weights, "--output", "theirs.json", *settings]
        return {"diffvision evaluate": lambda: self.run(ours), "CLIP_benchmark": lambda: self.run(theirs)}

    def start(self, model: str) -> Ways:
        """Return the debug recipe from the shell to its first step, and importing what it is built on."""
        ours = self.fit("clip/debug.yaml", model, **{"trainer.max_steps": "1"})

        def first_step() -> Took:
            begun = time.monotonic()
            return Took(self.noted(ours)["steps"][0] - begun)

        return {"fit to its first step": first_step, "imports": lambda: self.run([sys.executable, "-c", HOSTS])}


def in_turns(ways: Ways, rounds: int) -> dict[str, list[Took]]:
    """Return what each way took in each round but the first; they take turns in going first."""
    took: dict[str, list[Took]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in [*ways][:: 1 if number % 2 else -1]:
            result = ways[name]()
            took[name] += [result] if number else []
            print(f"round {number}: {name} {result.seconds:.4f} s", file=sys.stderr, flush=True)
    return took


def rows(took: dict[str, list[Took]], batch: int) -> str:
    """Return the table; the ratio is the others' time over the first one's, in the same round."""
    first, lines = next(iter(took.values())), []
    for name, results in took.items():
        seconds = [result.seconds for result in results]
        ratios = [other / ours.seconds for other, ours in zip(seconds, first, strict=True)]
        cells = [f"{statistics.median(seconds):.4f}"]
        if (waits := [result.waiting for result in results if result.waiting is not None]) != []:
            cells += [f"{statistics.median(waits):.4f}", f"{batch / statistics.median(seconds):,.0f}"]
        lines.append([name, *cells, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"])
    training = ["of it waiting for data", "samples/s"] if first[0].waiting is not None else []
    return table(["program", "seconds", *training, "times ours", "range"], lines)


def as_files(shards: Path, folder: Path) -> None:
    """Write the images of shards as `folder/CLASS/KEY.png`."""
    for sample in webdataset.WebDataset([str(tar) for tar in sorted(shards.glob("*.tar"))], shardshuffle=False):
        path = folder / sample["cls"].decode() / f"{sample['__key__']}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample["png"])


def python_of(folder: Path) -> str:
    """Make the environment for OpenCLIP's training and CLIP_benchmark, and return its Python."""
    python = openclip_versus.environment(folder)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--no-deps", "clip_benchmark==1.6.2", "pycocoevalcap"], check=True)
    subprocess.run([*install, "numpy<2.4"], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["clip", "vit", "zero_shot", "retrieval", "start"])
    parser.add_argument("--model", help="by default DiffCLIP-debug, diff_vit_debug for vit")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", help="with OpenCLIP's training and CLIP_benchmark; by default one is made")
    parser.add_argument("--timm", type=Path, help="with vit: a clone of timm's repository")
    args = parser.parse_args()
    if args.what == "vit" and args.timm is None:
        parser.error("vit needs --timm: a clone of timm's repository, which has train.py")
    model = args.model or ("diff_vit_debug" if args.what == "vit" else "DiffCLIP-debug")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make("digits", f"{scratch}/data/digits")
        programs = Programs(folder, args.batch, args.workers)
        if args.what in ("clip", *TASKS):
            programs.python = args.python or python_of(folder / "python")
        if args.what == "vit":
            for split, images in {"train": "train", "zero_shot/test": "validation"}.items():
                as_files(folder / "data/digits" / split, folder / "images" / images)
            ways = programs.vit(model, args.timm)
        elif args.what in TASKS:
            ways = programs.evaluation(model, args.what)
        else:
            ways = getattr(programs, args.what)(model)
        took = in_turns(ways, args.rounds)
    print(f"\n{model}, batches of {args.batch}, {args.workers} workers, one thread, {args.rounds} rounds\n")
    print(rows(took, args.batch))
    packages = ", ".join(f"{name} {number}" for name, number in versions().items() if number)
    print(f"\n{hardware('cpu')['cpu']}, {os.cpu_count()} cores; python {platform.python_version()}, {packages}")


if __name__ == "__main__":
    main()
