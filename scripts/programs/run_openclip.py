"""Unmodified open_clip_train.main and CLIP_benchmark on our models, on digits.

    python scripts/programs/run_openclip.py                      # pip makes an environment first, of 6 GB
    python scripts/programs/run_openclip.py --python .venv-openclip/bin/python

They have a separate environment, since OpenCLIP's training needs webdataset up to 0.2.86 and both programs numpy
below 2.4. They run through `diffvision.run`, which only registers our names. Prints each command and the end of what
it printed, and a table; exit status 1 if anything in it failed. Minutes on two CPU cores; `--compile` adds as many.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from openclip_inputs import as_imagenet, with_tower
from shown import Shown

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["open_clip_torch[training]==3.3.0", "clip_benchmark==1.6.2", "requests", "numpy<2.4", "jaxtyping"]
MODEL = "DiffCLIP-debug"
CHECKPOINT = "logs/{}/checkpoints/epoch_{}.pt"
# What OpenCLIP's README would have one write, with a learning rate for a tiny model and no crops, which cut digits off.
RECIPE = ["--precision", "fp32", "--workers", "1", "--batch-size", "64", "--lr", "1e-3", "--beta2", "0.98"]
RECIPE += ["--eps", "1e-6", "--wd", "0.1", "--warmup", "70", "--aug-cfg", "scale=(1.0,1.0)"]
ALL = ["--train-data", "data/digits/train/{000000..000008}.tar"]
ONCE = [*ALL, "--epochs", "1", "--warmup", "20"]
VALIDATION = ["--val-data", "data/digits/retrieval/test/0.tar"]


def environment(folder: Path) -> Path:
    """Make the Python of a new virtual environment with the programs and this repository."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin/python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *PACKAGES], check=True)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
    return python


class OpenClip:
    """The programs, in their environment, and ours, in this one."""

    def __init__(self, python: Path, shown: Shown) -> None:
        self.python, self.shown = str(python.absolute()), shown

    def train(self, name: str, *arguments: str, launcher: tuple[str, ...] = ("diffvision.run",), run: str = "") -> str:
        """Run OpenCLIP's training as the run `run`; return what it logged."""
        command = [self.python, "-m", *launcher, "open_clip_train.main", "--model", MODEL, "--name", run or name]
        return self.shown.run(name, [*command, *RECIPE, *arguments], lines=2, only=" | INFO | ")

    def measure(self, name: str, checkpoint: str, data: str, *arguments: str) -> dict[str, float]:
        """Return what `diffvision evaluate` measures."""
        command = [sys.executable, "-m", "diffvision", "evaluate", MODEL, "--checkpoint", checkpoint]
        command += ["--data", data, "--output", f"{name}.json", "--num_workers", "0", "--device", "cpu", *arguments]
        self.shown.run(name, command)
        return json.loads((self.shown.folder / f"{name}.json").read_text())[0]["metrics"]

    def benchmark(self, name: str, task: str, data: str, checkpoint: str) -> dict[str, float]:
        """Return what CLIP_benchmark measures."""
        command = [self.python, "-m", "diffvision.run", "clip_benchmark.cli", "eval", "--no_amp", "--num_workers", "0"]
        command += ["--dataset", "wds/digits", "--dataset_root", data, "--split", "test", "--task", task]
        command += ["--recall_k", "1", "5", "--model", MODEL, "--pretrained", checkpoint, "--output", f"{name}.json"]
        self.shown.run(name, command)
        return json.loads((self.shown.folder / f"{name}.json").read_text())["metrics"]

    def logged(self, run: str) -> dict[str, float]:
        """Return the last evaluation of one of OpenCLIP's runs."""
        lines = (self.shown.folder / f"logs/{run}/checkpoints/results.jsonl").read_text().splitlines()
        return json.loads(lines[-1])

    def weights(self, checkpoint: str) -> dict[str, torch.Tensor]:
        """Return the weights in a file of OpenCLIP's training or of ours."""
        state = torch.load(self.shown.folder / checkpoint, weights_only=True)["state_dict"]
        return {name.removeprefix("model."): value for name, value in state.items()}


def data(shown: Shown) -> None:
    shown.run("data", [sys.executable, "-m", "diffvision", "data", "make", "digits", "data/digits"])
    as_imagenet(shown.folder / "data/digits", shown.folder / "data/imagenet")


def trained(programs: OpenClip) -> str:
    """Train two epochs and resume for a third; return its checkpoint."""
    shown = programs.shown
    programs.train("train", *ALL, *VALIDATION, "--epochs", "2")
    log = programs.train("resume", *ALL, *VALIDATION, "--epochs", "3", "--resume", "latest", run="train")
    shown.check("--resume latest", "(epoch 2)" in log, "continues after epoch 2")
    checkpoint, theirs = CHECKPOINT.format("train", 3), programs.logged("train")
    ours = programs.measure("retrieval", checkpoint, "data/digits/retrieval")
    shown.check("its --val-data, and `diffvision evaluate`", *same_recall(theirs, ours))
    return checkpoint


def same_recall(theirs: dict[str, float], ours: dict[str, float]) -> tuple[bool, str]:
    """Return whether OpenCLIP's validation and our retrieval say the same, and what they say."""
    pairs = [("image_to_text_R@1", "text_retrieval_recall@1"), ("text_to_image_R@5", "image_retrieval_recall@5")]
    same = all(abs(theirs[a] - ours[b]) < 1e-6 for a, b in pairs)
    return same, ", ".join(f"{a} {theirs[a]:.4f} and {ours[b]:.4f}" for a, b in pairs)


def zero_shot(programs: OpenClip, checkpoint: str) -> None:
    """Compare OpenCLIP's zero-shot evaluation while it trains with ours of what it saved."""
    named = ["--train-data", "data/imagenet/train/{000000..000001}.tar", "--epochs", "2", "--pretrained", checkpoint]
    programs.train("zero_shot", *named, "--imagenet-val", "data/imagenet/images")
    theirs = programs.logged("zero_shot")["imagenet-zeroshot-val-top1"]
    ours = programs.measure("imagenet", CHECKPOINT.format("zero_shot", 2), "data/imagenet/zero_shot")["acc1"]
    compared = f"top-1 of 1,000 {theirs:.4f} and {ours:.4f}"
    programs.shown.check("its --imagenet-val, and `diffvision evaluate`", abs(theirs - ours) < 1e-6 < ours, compared)


def ways(programs: OpenClip, checkpoint: str, compiled: bool) -> None:
    """Train in the ways that touch the model; SigLIP from a checkpoint, since an epoch alone is too short."""
    check, siglip = programs.shown.check, ["--siglip", "--pretrained", checkpoint]
    log = programs.train("accumulation", *ONCE, *VALIDATION, "--accum-freq", "2", "--grad-checkpointing")
    check("--accum-freq 2 --grad-checkpointing", *learned(log))
    held, losses = learned(programs.train("siglip", *ONCE, *VALIDATION, *siglip))
    bias = programs.weights(CHECKPOINT.format("siglip", 1))["logit_bias"].item()
    check("--siglip", held, f"{losses}; its bias from 0 to {bias:.3f}")
    for name, more in (("ranks", ["--local-loss", "--gather-with-grad"]), ("ranks_siglip", siglip)):
        script = str(Path(__file__).with_name("cpu_ranks.py"))
        two = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "diffvision.run", script)
        log = programs.train(name, *ONCE, *VALIDATION, "--dist-backend", "gloo", *more, launcher=two)
        check(f"torchrun, two processes, {more[0]}", *learned(log))
    if compiled:
        programs.train("compiled", *ONCE, "--torchcompile")
        plain = programs.weights(CHECKPOINT.format("accumulation", 1)).keys()
        same = programs.weights(CHECKPOINT.format("compiled", 1)).keys() == plain
        check("--torchcompile", same, "its checkpoint has the plain names")


def learned(log: str) -> tuple[bool, str]:
    """Return whether the loss of the last step that was logged is lower than that of the first, by some way."""
    first, *_, last = map(float, re.findall(r"Train Epoch.* Loss: ([\d.]+)", log))
    return last < 0.9 * first, f"loss {first:.2f} at the first step, {last:.2f} at the last"


def locked(programs: OpenClip) -> None:
    """Train LiT: a locked image tower that learned to classify, and a text tower that learns to describe."""
    shown = programs.shown
    tower = ["--model.model", "diff_vit_debug_clip", "--trainer.max_epochs", "3"]
    with_tower(
        MODEL, shown.folder / fit(shown, "tower", "configs/vision/debug.yaml", *tower), shown.folder / "start.pt"
    )
    programs.train("lit", *ALL, "--epochs", "1", "--pretrained", "start.pt", "--lock-image")
    of_ours = [
        "--model.model",
        MODEL,
        "--model.pretrained",
        "start.pt",
        "--model.lock_image",
        "0",
        "--model.preprocess",
        "null",
    ]
    last = fit(shown, "locked", "configs/clip/debug.yaml", *of_ours, "--trainer.max_epochs", "1")
    start = torch.load(shown.folder / "start.pt", weights_only=True)
    for what, checkpoint in (("--lock-image", CHECKPOINT.format("lit", 1)), ("`diffvision fit` with lock_image", last)):
        held = only_trunk_unchanged(start, programs.weights(checkpoint))
        accuracy = programs.measure(f"zero_shot_{what.split()[-1]}", checkpoint, "data/digits/zero_shot")["acc1"]
        shown.check(what, held, f"the trunk is bit for bit what it was; zero-shot acc1 {accuracy:.4f}")
    exported(programs, last)


def fit(shown: Shown, name: str, config: str, *arguments: str) -> str:
    """Train with ours; return the last checkpoint."""
    command = [sys.executable, "-m", "diffvision", "fit", "--config", str(ROOT / config), *arguments]
    shown.run(name, [*command, "--trainer.logger.init_args.name", name])
    return f"runs/{name}/version_0/checkpoints/final.ckpt"


def only_trunk_unchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    same = {name for name in before if torch.equal(before[name], after[name])}
    return same == {name for name in before if name.startswith("visual.trunk.")}


def exported(programs: OpenClip, checkpoint: str) -> None:
    """Validate a training of ours with OpenCLIP's validation."""
    export = [sys.executable, "-m", "diffvision", "export", checkpoint, "model", "--to", "openclip"]
    programs.shown.run("export", export)
    programs.train("exported", *VALIDATION, "--model", "local-dir:model")
    ours = programs.measure("fit_retrieval", checkpoint, "data/digits/retrieval")
    programs.shown.check("a folder of `diffvision export`", *same_recall(programs.logged("exported"), ours))


def benchmarked(programs: OpenClip, checkpoint: str) -> None:
    shown = programs.shown
    theirs = programs.benchmark("benchmark_zero_shot", "zeroshot_classification", "data/digits/zero_shot", checkpoint)
    ours = programs.measure("zero_shot_ours", checkpoint, "data/digits/zero_shot")
    shown.check("CLIP_benchmark, zero-shot", abs(theirs["acc1"] - ours["acc1"]) < 1e-6, f"acc1 {theirs['acc1']:.4f}")
    theirs = programs.benchmark("benchmark_retrieval", "zeroshot_retrieval", "data/digits/retrieval", checkpoint)
    recall = f"image_retrieval_recall@5 {theirs['image_retrieval_recall@5']:.4f}"
    shown.check("CLIP_benchmark, retrieval", True, recall)
    script = [sys.executable, str(ROOT / "scripts/programs/compare_clip_benchmark.py"), "--python", programs.python]
    log = shown.run("counts", [*script, "--data", "data/digits", "--model", MODEL, "--checkpoint", checkpoint])
    shown.check(
        "CLIP_benchmark's counts and ours", "every count is the same" in log, "zero-shot, retrieval, composition"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="interpreter of their environment; by default a new one is made")
    parser.add_argument("--work", type=Path, default=Path("runs/programs/openclip"), help="replaced if it is there")
    parser.add_argument("--compile", action="store_true", help="--torchcompile too, which takes minutes on a CPU")
    args = parser.parse_args()
    python = args.python or environment(Path(".venv-openclip"))
    shutil.rmtree(args.work, ignore_errors=True)
    shown = Shown(args.work)
    programs = OpenClip(python, shown)
    data(shown)
    checkpoint = trained(programs)
    zero_shot(programs, checkpoint)
    benchmarked(programs, checkpoint)
    ways(programs, checkpoint, args.compile)
    locked(programs)
    return shown.end()


if __name__ == "__main__":
    sys.exit(main())
