"""The runs of the demo: those of a study, each evaluated once, so that a demo that was stopped resumes where it was.

A dataset gets its folder when it is complete, and a run its record.json when it is evaluated.
"""

import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diffvision.analysis.curves import Curve, read_metrics
from diffvision.demo.run_tables import Run, last_checkpoint
from diffvision.evaluation.output_files import write_json
from diffvision.opening import Model, open_model
from diffvision.opening.run_folders import run_config, setting
from diffvision.study import Run as Planned
from diffvision.study import Study, read_json

RECORD = "record.json"
Measure = Callable[[Model], dict[str, float]]
"""Returns the metrics of a trained model."""


def study_of(config: str, directory: Path, arguments: Sequence[str]) -> Study:
    """Return a study that trains small models, one on each of up to four cores.

    Args:
        config: a file of configs/, for `diffvision fit`.
        directory: the demo's folder.
        arguments: further arguments of `diffvision fit`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Study([config], directory, list(arguments), jobs=min(cores, 4), every=1.0)


def prepare(folder: Path, make: Callable[[str], Any]) -> None:
    """Make a dataset, unless it exists. It is made under another name, so a folder of this name is complete.

    Args:
        folder: of the dataset.
        make: makes it in the folder that it is given.
    """
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        make(str(unfinished))
        unfinished.rename(folder)


def evaluated(study: Study, planned: Planned, measure: Measure) -> Run:
    """Return a trained run: as recorded, else evaluated."""
    root = study.folder(planned)
    file, curves = root / RECORD, read_metrics(root)
    speeds = curves["train/samples_per_second"]
    if not file.is_file():
        model = open_model(last_checkpoint(root))
        record = {
            "parameters": sum(p.numel() for p in model.module.parameters()),
            "seconds": _seconds(speeds, setting(run_config(root), "data.init_args.batch_size")),
            "metrics": measure(model),
        }
        write_json(file, record)
    record = read_json(file)
    speed = statistics.median(speeds.values)
    return Run(
        planned.model, planned.seed, record["parameters"], record["seconds"], speed, record["metrics"], curves, root
    )


def _seconds(speeds: Curve, batch_size: int) -> float:
    """Return the duration of the steps up to the last one logged, over all parts of a run that was stopped."""
    starts = [-1, *speeds.steps[:-1]]
    steps = zip(starts, speeds.steps, speeds.values, strict=True)
    return sum((end - start) * batch_size / speed for start, end, speed in steps)
