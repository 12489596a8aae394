"""What a run prints: the model at its start, and metrics, checkpoints and the next command at its end."""

from __future__ import annotations

import os
import shlex
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from rich import box
from rich.console import Console
from rich.table import Table
from torch.nn.parameter import is_lazy

from diffvision.training.clip import ContrastiveModule
from diffvision.training.fault_tolerance import LastCheckpoint
from diffvision.training.fault_tolerance.lightning_internals import find_callbacks

TRAINING_PREFIXES = ("train/", "data/", "lambda")  # of metrics that no evaluation logs


class RunSummary(pl.Callback):
    """Prints the model before training, and afterwards metrics, checkpoints and the command to evaluate the best."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the model, and the prompts that it will be evaluated with."""
        self._first_step = trainer.global_step
        resumed = f"; from step {trainer.global_step:,} on, {trainer.ckpt_path}" if trainer.ckpt_path else ""
        prompts = pl_module.prompts if isinstance(pl_module, ContrastiveModule) else []
        pl_module.print("\n".join([describe_run(trainer, pl_module) + resumed, *prompts]))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the metrics, the checkpoints and the next command."""
        # Lightning may compute both with all ranks, so every rank asks for them.
        logged, paths = trainer.callback_metrics, list_checkpoints(trainer, pl_module)
        if not trainer.is_global_zero:
            return
        step, seconds = trainer.global_step, round(time.monotonic() - self._start)
        resumed = f" from step {self._first_step:,}" if self._first_step else ""
        trained = f"trained{resumed} to step {step:,} in {timedelta(seconds=seconds)}"
        if step == self._first_step:
            trained = f"already at step {step:,}: nothing was trained"
        metrics = {name: float(value) for name, value in logged.items() if not name.startswith(TRAINING_PREFIXES)}
        averaged = ", averaged weights (EMA)" if find_callbacks(trainer, WeightAveraging) else ""
        table = [make_table(metrics, f"last evaluation{averaged}")] if metrics else []
        Console(highlight=False).print(trained, *table, *paths, sep="\n", soft_wrap=True)


def describe_run(trainer: pl.Trainer, module: pl.LightningModule) -> str:
    """Describe a model in one line, such as "DiffCLIP-debug: 3.5 M parameters, on cpu in 32-true".

    Unless the run resumes, the line names the initial weights, if they are not randomly initialised.
    """
    sizes = {p: p.numel() for p in module.parameters() if not is_lazy(p)}
    count, trained = sum(sizes.values()), sum(size for p, size in sizes.items() if p.requires_grad)
    of_them = "" if trained == count else f", of which {get_human_readable_count(trained)} are trained"
    ranks = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    device = trainer.strategy.root_device.type if ranks else trainer.strategy.root_device
    name = getattr(module, "name", type(module).__name__)
    text = f"{name}: {get_human_readable_count(count)} parameters{of_them}, on {ranks}{device} in {trainer.precision}"
    sources = getattr(module, "sources", ())
    return text if not sources or trainer.ckpt_path else f"{text}; from the weights of {' and '.join(sources)}"


def make_table(metrics: dict[str, float], title: str) -> Table:
    """Return a table of metrics by the full names that `monitor` takes."""
    rows = Table("metric", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    rows.add_column("value", justify="right")
    for name, value in metrics.items():
        counts = value.is_integer() and abs(value) > 1
        rows.add_row(name, f"{value:,.0f}" if counts else f"{value:.4f}")
    return rows


def list_checkpoints(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Return lines with the best and last checkpoint and the command to evaluate the best; every rank must call it."""
    savers = find_callbacks(trainer, ModelCheckpoint)
    best = [saver for saver in savers if saver.monitor and saver.best_model_path]
    last = [saver.last_model_path for saver in find_callbacks(trainer, LastCheckpoint)]
    last += [saver.last_model_path or ("" if saver.monitor else saver.best_model_path) for saver in savers]
    lines, paths = [], [saver.best_model_path for saver in best]
    for saver in best:
        score = float(saver.best_model_score or 0)
        lines.append(f"best {saver.monitor} {score:.4f}: {_relative(saver.best_model_path)}")
    for path in list(dict.fromkeys(filter(None, last)))[:1]:
        lines.append(f"final weights: {_relative(path)}")
        paths.append(path)
    if paths:
        lines.append(f"evaluate it: {shlex.join(evaluation_command(trainer, module, _relative(paths[0])))}")
    return lines


def evaluation_command(trainer: pl.Trainer, module: pl.LightningModule, checkpoint: str) -> list[str]:
    """Return the command to evaluate a checkpoint on the run's validation data; every rank must call it."""
    directory = trainer.log_dir  # a collective
    data: Any = getattr(trainer, "datamodule", None)
    if isinstance(module, ContrastiveModule):
        return ["diffvision", "evaluate", checkpoint, "--data", ",".join(getattr(data, "evaluations", ())) or "FOLDER"]
    config = _relative(str(Path(directory or ".", "config.yaml")))
    packages = {type(part).__module__.partition(".")[0] for part in (module, data) if part is not None}
    allowed = [word for package in sorted(packages - {"diffvision"}) for word in ("--allow", package)]
    return ["diffvision", "validate", "--config", config, "--ckpt_path", checkpoint, *allowed]


def _relative(path: str) -> str:
    """Return a path relative to the working directory, if it is below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
