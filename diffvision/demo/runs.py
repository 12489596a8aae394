"""The runs of a demo: each is trained and evaluated once, so that a demo that was stopped resumes where it was.

A demo's folder has images.json, with the settings of the demo. A dataset gets its folder when it is complete, and a run
its record.json when it is trained and evaluated.
"""

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

import diffvision
from diffvision.analysis.curves import Curve, read_metrics
from diffvision.demo.run_tables import Run
from diffvision.evaluation.output_files import check_folder, write_json
from diffvision.training.fit import fit
from diffvision.training.recipes import recipe

RECORD, SETTINGS = "record.json", "images.json"
LOG = "training.log"
Measure = Callable[[Any], dict[str, float]]
"""Returns the metrics of a trained module."""


def claim(directory: Path, config: str, **settings: Any) -> None:
    """Write a demo's settings to a file in its folder; refuse a folder made with other ones.

    Args:
        directory: the demo's folder.
        config: the recipe of its runs.
        settings: what else decides what its runs are, as JSON holds it.

    Raises:
        ValueError: the folder holds what was made with other settings, or cannot be written.
    """
    check_folder(directory)
    settings |= {"diffvision": diffvision.__version__, "recipe": yaml.safe_load(recipe(config).read_text())}
    file = directory / SETTINGS
    if not file.is_file():
        write_json(file, settings)
    earlier = _content(file)
    if other := [key for key in sorted(settings.keys() | earlier.keys()) if settings.get(key) != earlier.get(key)]:
        raise ValueError(
            f"{directory} holds a demo that was made with other settings ({', '.join(other)}): "
            "delete the folder, or name another one with --output"
        )


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError:  # not JSON, or not text
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: delete {file.parent}, or name another folder with --output")
    return content


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


def trained(
    config: str, planned: Sequence[tuple[str, int]], directory: Path, *arguments: str, measure: Measure
) -> list[Run]:
    """Return runs, of which those that are not finished yet are trained and evaluated in processes, several at once.

    A small model gains little from more than one thread, so two of them take little longer together than one alone. A
    run that fails there is resumed here, so that its error is reported.

    Args:
        config: a file of configs/, for `diffvision fit`.
        planned: models' names and seeds.
        directory: the demo's folder.
        arguments: further arguments of `diffvision fit`.
        measure: as in `finished_run`; a process must be able to import it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting = [run for run in planned if not (directory / f"{run[0]}-{run[1]}" / RECORD).is_file()]
    spawn = multiprocessing.get_context("spawn")
    training: dict[tuple[str, int], Any] = {}
    shown: dict[tuple[str, int], str] = {}
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        while waiting or any(process.is_alive() for process in training.values()):
            while waiting and sum(process.is_alive() for process in training.values()) < min(cores, 4):
                run = waiting.pop(0)
                finish = partial(finished_run, config, *run, directory, *arguments, measure=measure)
                log = directory / f"{run[0]}-{run[1]}" / LOG
                training[run] = spawn.Process(target=_run_logged, args=(finish, log), daemon=True)
                training[run].start()
            time.sleep(1)
            for run in training:
                latest = _latest(directory / f"{run[0]}-{run[1]}")
                if latest and latest != shown.get(run):
                    shown[run] = latest
                    print(f"{run[0]}, seed {run[1]}: {latest}", flush=True)
    finally:
        for process in training.values():
            process.terminate()
            process.join()
    return [finished_run(config, *run, directory, *arguments, measure=measure) for run in planned]


def _run_logged(function: Callable[[], Any], log: Path) -> None:
    """Call a function in this process, which writes its output to a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", buffering=1) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    function()


def _latest(root: Path) -> str:
    """Return the last logged step and loss of a run in words, or an empty string."""
    folders = sorted(file.parent for file in root.rglob("metrics.csv"))
    curve = read_metrics(folders[-1]).get("train/loss") if folders else None
    return f"step {curve.steps[-1] + 1:.0f}, loss {curve.values[-1]:.2f}" if curve else ""


def finished_run(config: str, model: str, seed: int, directory: Path, *arguments: str, measure: Measure) -> Run:
    """Return a model's run with one seed: as recorded, else resumed or begun, and evaluated.

    Args:
        config: a file of configs/, for `diffvision fit`.
        model: its name.
        seed: of the weights and the order of samples.
        directory: the demo's folder.
        arguments: further arguments of `diffvision fit`.
        measure: from the trained LightningModule to its metrics.
    """
    root = directory / f"{model}-{seed}"
    file = root / RECORD
    if not file.is_file():
        cli = fit(_command(config, model, seed, root, arguments))
        metrics = measure(cli.model)
        log: Any = cli.trainer.logger
        curves = read_metrics(log.log_dir)
        record = {
            "run": Path(log.log_dir).relative_to(root).as_posix(),
            "parameters": sum(p.numel() for p in cli.model.model.parameters()),
            "seconds": _seconds(curves["train/samples_per_second"], cli.datamodule.batch_size),
            "metrics": metrics,
        }
        write_json(file, record)
    record = _content(file)
    curves = read_metrics(root / record["run"])
    speed = statistics.median(curves["train/samples_per_second"].values)
    return Run(model, seed, record["parameters"], record["seconds"], speed, record["metrics"], curves, root)


def _command(config: str, model: str, seed: int, root: Path, arguments: Sequence[str]) -> list[str]:
    return [
        "fit",
        f"--config={recipe(config)}",
        "--resume=auto",
        f"--seed_everything={seed}",
        f"--model.init_args.model={model}",
        f"--data.init_args.seed={seed}",
        f"--trainer.default_root_dir={root}",
        f"--trainer.logger.init_args.save_dir={root}",
        *arguments,
    ]


def _seconds(speeds: Curve, batch_size: int) -> float:
    """Return the duration of the steps up to the last one logged, over all parts of a run that was stopped."""
    starts = [-1, *speeds.steps[:-1]]
    steps = zip(starts, speeds.steps, speeds.values, strict=True)
    return sum((end - start) * batch_size / speed for start, end, speed in steps)
