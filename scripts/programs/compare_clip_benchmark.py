"""Evaluates a model with unmodified CLIP_benchmark and with diffvision, and counts the items that each gets right.

    python -m venv .venv-clip-benchmark
    .venv-clip-benchmark/bin/pip install clip_benchmark requests "numpy<2.4" -e .
    python scripts/programs/compare_clip_benchmark.py --python .venv-clip-benchmark/bin/python \
        --data data/digits --model DiffCLIP-debug --checkpoint runs/DiffCLIP-debug/version_0/checkpoints/final.ckpt

CLIP_benchmark has a separate environment, since it needs numpy below 2.4. It runs on the CPU without autocast,
through `diffvision.run`, which only registers our models' names. Prints a Markdown table; exit status 1 if any count
differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import open_clip
import torch

from diffvision import evaluate
from diffvision.data.images.folders import EvaluationFolder, find_folders
from diffvision.evaluation.suite import EVALUATIONS, records
from diffvision.models.checkpoint import read_checkpoint

QUIET = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}


def theirs(python: str, folder: EvaluationFolder, model: str, weights: Path, batch_size: int) -> dict[str, float]:
    """Return CLIP_benchmark's metrics of a model on a folder."""
    output = weights.with_name("record.json")
    command = [python, "-m", "diffvision.run", "clip_benchmark.cli", "eval", "--no_amp"]
    command += ["--dataset", f"wds/{folder.name}", "--dataset_root", str(folder.path), "--split", "test"]
    command += ["--task", EVALUATIONS[folder.task].record, "--recall_k", "1", "5", "10"]
    command += ["--model", model, "--pretrained", str(weights), "--output", str(output)]
    command += ["--batch_size", str(batch_size), "--num_workers", "0"]
    done = subprocess.run(command, env={**os.environ, **QUIET}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"CLIP_benchmark failed on {folder.path}:\n{done.stderr[-3000:]}")
    return json.loads(output.read_text())["metrics"]


def counts(folder: EvaluationFolder) -> tuple[int, int]:
    """Count the images and captions of a folder's test split."""
    images = captions = 0
    for batch in folder.batches(lambda image: torch.zeros(1), split="test"):
        images += len(batch["image"])
        captions += sum(len(captioned) for captioned in batch.get("captions", []))
    return images, captions


def compare(python: str, data: str, model: str, weights: Path, batch_size: int) -> bool:
    """Print the table; return whether every number agrees."""
    folders = sorted(find_folders(data), key=lambda folder: list(EVALUATIONS).index(folder.task))
    ours = evaluate(
        model=model,
        data=data,
        checkpoint=str(weights),
        tasks=[folder.task for folder in folders],
        batch_size=batch_size,
        num_workers=0,
        device="cpu",
    )
    print("| task | metric | CLIP_benchmark | diffvision | right, CLIP_benchmark | right, diffvision | of |")
    print("|---|---|---|---|---|---|---|")
    same = True
    for folder in folders:
        images, captions = counts(folder)
        expected = theirs(python, folder, model, weights, batch_size)
        mine = {key: value for key, value in ours.items() if key.startswith(f"{folder.task}/{folder.name}/")}
        record = records(mine, model=model, pretrained=str(weights))[0]
        for metric in sorted(
            expected.keys() & record["metrics"].keys()
        ):  # ours has ties as well, theirs scores of pairs
            value = record["metrics"][metric]
            row = f"| {record['task']} | {metric} | {expected[metric]:.6f} | {value:.6f} |"
            # A mean of fractions is no count.
            if metric == "mean_per_class_recall":
                same &= abs(expected[metric] - value) < 1e-9
                print(row, "| | |")
                continue
            items = captions if metric.startswith("image_retrieval") else images
            right = [items * expected[metric], items * value]
            # CLIP_benchmark's recall is a mean in float32.
            same &= abs(right[0] - right[1]) < 0.01
            print(row, f"{right[0]:.2f} | {right[1]:.2f} | {items} |")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the environment with clip_benchmark")
    parser.add_argument("--data", required=True, help="evaluation folder, or a folder that holds some")
    parser.add_argument("--model", required=True, help="name of an OpenCLIP model")
    parser.add_argument("--checkpoint", help="its weights, of any layout; by default untrained ones of seed 0")
    parser.add_argument("--batch_size", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        # In OpenCLIP's layout, which both read.
        weights = Path(directory) / "weights.pt"
        torch.manual_seed(0)
        state = (
            read_checkpoint(args.checkpoint).state
            if args.checkpoint
            else open_clip.create_model(args.model).state_dict()
        )
        torch.save(state, weights)
        same = compare(args.python, args.data, args.model, weights, args.batch_size)
    print("\nevery count is the same" if same else "\ncounts differ")
    return not same


if __name__ == "__main__":
    sys.exit(main())
