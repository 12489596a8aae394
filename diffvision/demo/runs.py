"""The runs of a demo: each is trained and evaluated once, so that a demo that was stopped resumes where it was.

A demo's folder has NAME.json, with the settings of the demo. A dataset gets its folder when it is complete, and a run
its record.json when it is trained and evaluated.
"""

import json
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

import diffvision
from diffvision.analysis.curves import Curve, read_metrics
from diffvision.demo.report import Run
from diffvision.evaluation.output import check_folder, write_json
from diffvision.training.fit import fit
from diffvision.training.recipes import recipe

RECORD = "record.json"
Measured = tuple[dict[str, float], Any]
"""The metrics of a model, and what else the report shows, as JSON holds it."""


def claim(directory: Path, name: str, config: str, contents: Sequence[str], **settings: Any) -> None:
    """Write a demo's settings to NAME.json in its folder; refuse a folder made with other ones.

    Args:
        directory: the demo's folder; it may hold demos of other names.
        name: of the demo.
        config: the recipe of its runs.
        contents: patterns of the names of its data and runs.
        settings: what else decides what its runs are, as JSON holds it.

    Raises:
        ValueError: the folder holds what was made with other settings, or cannot be written.
    """
    check_folder(directory)
    settings |= {"diffvision": diffvision.__version__, "recipe": yaml.safe_load(recipe(config).read_text())}
    file = directory / f"{name}.json"
    earlier: dict[str, Any] = {}
    if file.is_file():
        earlier = _content(file)
    elif not any(path for pattern in contents for path in directory.glob(pattern)):
        earlier = settings
        write_json(file, settings)
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


def finished_run(
    config: str, model: str, seed: int, directory: Path, *arguments: str, unit: str, measure: Callable[[Any], Measured]
) -> Run:
    """Return a model's run with one seed: as recorded, else resumed or begun, and evaluated.

    Args:
        config: a file of configs/, for `diffvision fit`.
        model: its name.
        seed: of the weights and the order of samples.
        directory: the demo's folder.
        arguments: further arguments of `diffvision fit`.
        unit: "samples" or "tokens", what the speed counts.
        measure: from the trained LightningModule to its metrics and what else the report shows.
    """
    root = directory / f"{model}-{seed}"
    file = root / RECORD
    if not file.is_file():
        cli = fit(_command(config, model, seed, root, arguments))
        metrics, shown = measure(cli.model)
        log: Any = cli.trainer.logger
        curves = read_metrics(log.log_dir)
        record = {
            "run": Path(log.log_dir).relative_to(root).as_posix(),
            "parameters": sum(p.numel() for p in cli.model.model.parameters()),
            "seconds": _seconds(curves["train/samples_per_second"], cli.datamodule.batch_size),
            "metrics": metrics,
            "shown": shown,
        }
        write_json(file, record)
    return _recorded(model, seed, root, unit)


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


def _recorded(model: str, seed: int, root: Path, unit: str) -> Run:
    record = _content(root / RECORD)
    curves = read_metrics(root / record["run"])
    speed = statistics.median(curves[f"train/{unit}_per_second"].values)
    return Run(model, seed, record["parameters"], record["seconds"], speed, record["metrics"], curves, record["shown"])


def _seconds(speeds: Curve, batch_size: int) -> float:
    """Return the duration of the steps up to the last one logged, over all parts of a run that was stopped."""
    starts = [-1, *speeds.steps[:-1]]
    steps = zip(starts, speeds.steps, speeds.values, strict=True)
    return sum((end - start) * batch_size / speed for start, end, speed in steps)
