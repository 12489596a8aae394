"""Unmodified scripts of timm on our models: train, validate, inference, averaging, ONNX export, bulk_runner.

    git clone --branch v1.0.28 https://github.com/huggingface/pytorch-image-models
    python scripts/programs/run_timm.py pytorch-image-models            # three minutes on two CPU cores

The scripts are in timm's repository, not in its package. They run through `diffvision.run`, which only registers our
names. The data are digits, the same images as files in folders (for timm) and in shards (for `diffvision evaluate`).
Prints each command and the end of what it printed, and a table; exit status 1 if anything in it failed.
"""

import argparse
import csv
import json
import re
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

from shown import Shown, versions

CPU = ["--device", "cpu", "--workers", "1"]
MODEL = ["--model", "diff_vit_debug", "--num-classes", "10", *CPU]
RECIPE = ["--opt", "adamw", "--lr", "4e-3", "--weight-decay", "0.05", "--warmup-epochs", "1", "--batch-size", "64"]
RECIPE += ["--layer-decay", "0.9", "--mixup", "0.1", "--cutmix", "0.1", "--hflip", "0", "--scale", "0.7", "1.0"]
RECIPE += ["--model-ema", "--model-ema-decay", "0.99", "--output", ".", "--checkpoint-hist", "3"]
TOP1 = re.compile(r"Acc@1:\s+[\d.]+ \(\s*([\d.]+)\)")


def as_folders(shards: Path, folder: Path) -> None:
    """Write shards of `png` and `cls` members as `folder/CLASS/KEY.png`, byte for byte."""
    for shard in sorted(shards.glob("*.tar")):
        with tarfile.open(shard) as archive:
            files = {member.name: archive.extractfile(member).read() for member in archive}
        for name in filter(lambda name: name.endswith(".png"), files):
            path = folder / files[f"{name[:-4]}.cls"].decode() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[name])


class Timm:
    """timm's scripts, from a clone, on digits."""

    def __init__(self, source: Path, shown: Shown) -> None:
        self.source, self.shown = source, shown

    def run(self, name: str, script: str, *arguments: str, lines: int = 6) -> str:
        start = [sys.executable, "-m", "diffvision.run", str(self.source / script)]
        return self.shown.run(name, [*start, *arguments], lines)

    def top1(self, name: str, checkpoint: str, *arguments: str) -> float:
        """Return what validate.py measures, in percent."""
        file = f"{name}.json"
        options = ["--checkpoint", checkpoint, "--results-file", file, "--results-format", "json"]
        self.run(name, "validate.py", "images", *MODEL, *options, *arguments, lines=8)
        return json.loads((self.shown.folder / file).read_text())["top1"]


def data(shown: Shown) -> None:
    """`digits` as shards, and the same as `images/train` and `images/validation`."""
    if (shown.folder / "images").exists():
        return
    shown.run("data", [sys.executable, "-m", "diffvision", "data", "make", "digits", "digits"])
    as_folders(shown.folder / "digits/train", shown.folder / "images/train")
    as_folders(shown.folder / "digits/zero_shot/test", shown.folder / "images/validation")


def trained(timm: Timm, epochs: int, compiled: bool) -> tuple[float, float]:
    """Trains half of the epochs, resumes for the others; (top-1, top-1 of the EMA) of train.py's last evaluation."""
    half, options = epochs // 2, ["images", *MODEL, *RECIPE, "--experiment", "train"]
    if compiled:
        options += ["--torchcompile"]
    timm.run("train", "train.py", *options, "--epochs", str(half))
    (timm.shown.folder / "train").rename(timm.shown.folder / "first")
    log = timm.run("resume", "train.py", *options, "--epochs", str(epochs), "--resume", "first/last.pth.tar")
    begun = re.search(r"^Train: (\d+)", log, re.MULTILINE)
    timm.shown.check("train.py --resume continues", begun[1] == str(half), f"epoch {begun[1]} follows {half - 1}")
    rows = list(csv.DictReader((timm.shown.folder / "train/summary.csv").open()))
    raw = [line for line in log.splitlines() if line.startswith("Test: ")][-1]
    return float(TOP1.search(raw)[1]), float(rows[-1]["eval_top1"])


def evaluated(shown: Shown, checkpoint: str, *arguments: str) -> float:
    """Return what `diffvision evaluate --tasks classification` measures, in percent."""
    command = [sys.executable, "-m", "diffvision", "evaluate", "diff_vit_debug", "--checkpoint", checkpoint]
    command += ["--data", "digits/zero_shot", "--tasks", "classification", "--output", "evaluated.json", *arguments]
    shown.run("evaluate", [*command, "--num_workers", "0", "--device", "cpu"], lines=9)
    return 100 * json.loads((shown.folder / "evaluated.json").read_text())[0]["metrics"]["acc1"]


def fitted(timm: Timm) -> None:
    """Compare validate.py with ours on a training of ours: `diffvision fit`, `diffvision export`, validate.py."""
    shown, ours = timm.shown, [sys.executable, "-m", "diffvision"]
    recipe = Path(__file__).resolve().parents[2] / "configs/vision/debug.yaml"
    data = ["--data.init_args.train", "digits/train", "--data.init_args.evaluation", "digits/zero_shot"]
    short = ["--trainer.max_epochs", "3", "--trainer.logger.init_args.save_dir", "fit"]
    shown.run("fit", [*ours, "fit", "--config", str(recipe), *data, *short], lines=1)
    last = next(shown.folder.glob("fit/**/final.ckpt")).relative_to(shown.folder)
    shown.run("export", [*ours, "export", str(last), "exported", "--to", "timm"])
    model = ["--model", f"local-dir:{(shown.folder / 'exported').resolve()}", "--pretrained", "--num-classes", "10"]
    options = ["--results-file", "validate_fit.json", "--results-format", "json"]
    timm.run("validate_fit", "validate.py", "images", *model, *CPU, *options, lines=8)
    theirs = json.loads((shown.folder / "validate_fit.json").read_text())["top1"]
    accuracy = evaluated(shown, str(last))
    shown.check(
        "diffvision fit, exported, in validate.py", abs(accuracy - theirs) < 6e-4, f"{theirs} % and {accuracy:.3f} %"
    )


def inferred(timm: Timm, checkpoint: str) -> float:
    """Top-1 in percent, counted in what inference.py writes about each file."""
    options = ["--checkpoint", checkpoint, "--results-file", "inferred.csv", "--label-type", "none", "--fullname"]
    timm.run("inference", "inference.py", "images/validation", *MODEL, *options, "--include-index", lines=3)
    rows = list(csv.DictReader((timm.shown.folder / "inferred.csv").open()))
    return 100 * sum(Path(row["filename"]).parent.name == row["index"] for row in rows) / len(rows)


def exported(timm: Timm, checkpoint: str) -> None:
    """onnx_export.py in its default mode, which compares onnxruntime's outputs with torch's; training is left out."""
    options = ["--model", "diff_vit_debug", "--num-classes", "10", "--checkpoint", checkpoint, "--check-forward"]
    timm.run("onnx_export", "onnx_export.py", "model.onnx", *options, "--batch-size", "2", lines=1)
    size = (timm.shown.folder / "model.onnx").stat().st_size
    timm.shown.check("onnx_export.py --check-forward", True, f"{size:,} bytes")


def benchmarked(timm: Timm) -> None:
    """bulk_runner.py starts a process of benchmark.py for each model: child processes know our names."""
    names, script = "diff*_vit_debug", str(timm.source / "benchmark.py")
    options = ["--bench", "inference", "--device", "cpu", "--batch-size", "4", "--num-bench-iter", "20"]
    timm.run("bulk", "bulk_runner.py", "--model-list", names, "--results-file", "bulk.csv", script, *options, lines=1)
    rows = list(csv.DictReader((timm.shown.folder / "bulk.csv").open()))
    timm.shown.check("bulk_runner.py benchmark.py", len(rows) == 2, ", ".join(row["model"] for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", type=Path, help="a clone of timm's repository")
    parser.add_argument("--work", type=Path, default=Path("runs/programs/timm"), help="an empty or new folder")
    parser.add_argument("--epochs", type=int, default=4, help="an even number")
    parser.add_argument("--compile", action="store_true", help="train.py --torchcompile, minutes on a CPU")
    args = parser.parse_args()
    shown = Shown(args.work)
    timm = Timm(args.source.resolve(), shown)
    print(versions("torch", "timm", "diffvision"))
    data(shown)

    last = "train/last.pth.tar"
    raw, ema = trained(timm, args.epochs, args.compile)
    same = timm.top1("validate", last), timm.top1("validate_ema", last, "--use-ema")
    shown.check("validate.py = train.py's last evaluation", abs(same[0] - raw) < 6e-4, f"{same[0]} % and {raw} %")
    shown.check("the same of the EMA", abs(same[1] - ema) < 6e-4, f"{same[1]} % and {ema:.3f} %")
    ours = evaluated(shown, last)
    shown.check("diffvision evaluate = validate.py --use-ema", abs(ours - same[1]) < 6e-4, f"{ours:.3f} %")
    if find_spec("pandas"):  # inference.py's
        counted = inferred(timm, last)
        words = f"{counted:.3f} %: it takes the EMA"
        shown.check("inference.py's answers, counted", abs(counted - same[1]) < 6e-4, words)
    timm.run("average", "avg_checkpoints.py", "--input", "train", "--output", "average.pth", "--filter", "check*.tar")
    average = timm.top1("validate_average", "average.pth")
    shown.check("avg_checkpoints.py, in validate.py", average > 50, f"{average} %")
    exported(timm, "average.pth")
    benchmarked(timm)
    fitted(timm)
    return shown.end()


if __name__ == "__main__":
    sys.exit(main())
