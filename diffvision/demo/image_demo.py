"""The image demo: a CLIP and a DiffCLIP are trained by one recipe on real digits, and compared.

It runs `diffvision data make digits`, then the runs of a study with configs/clip/debug.yaml, then `diffvision compare`.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

from diffvision.comparison import compare
from diffvision.data.datasets.digits import make_digits
from diffvision.study.runs import Run, Study

RECIPE = "clip/debug.yaml"
MODELS = ("CLIP-debug", "DiffCLIP-debug-0.2")


def images(directory: Path, seeds: int, *arguments: str) -> None:
    """Train `MODELS` with one recipe, compare them, print tables and write report.html.

    What an earlier call has finished in the directory is not computed again.

    Args:
        directory: for the shards, the runs and the report.
        seeds: runs of each model.
        arguments: further arguments of `diffvision fit`.
    """
    print(
        f"{' and '.join(MODELS)} are trained on handwritten digits and compared. At this size plain CLIP usually wins: "
        "the demo shows how to compare models, not which one is better.",
        flush=True,
    )
    start, data, report = time.perf_counter(), directory / "digits", directory / "report.html"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    study = Study([RECIPE], directory, arguments, jobs=min(cores, 4), every=1.0)
    with study.claim():
        prepare(data)
        folders = [f"--data.init_args.train={data / 'train'}", f"--data.init_args.evaluations=[{data / 'zero_shot'}]"]
        study = replace(study, settings=[*folders, *arguments])
        study.train([Run(model, seed) for seed in range(seeds) for model in MODELS])
    runs = [study.folder(Run(model, seed)) for model in MODELS for seed in range(seeds)]
    compare([str(run / "checkpoints/final.ckpt") for run in runs], data=str(data), output=str(report), num_workers=0)
    print(f"next: diffvision inspect {runs[-1]} --versus {runs[0]} --output {directory / 'inside'}")
    print(f"report: {report}   ({time.perf_counter() - start:.0f} s in all)")


def prepare(folder: Path) -> None:
    """Make the digits, unless they exist; they are made under another name, so a folder of this name is complete."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        make_digits(unfinished)
        unfinished.rename(folder)
