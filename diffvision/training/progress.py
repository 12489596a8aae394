"""The progress of a run: Lightning's bar in a terminal or notebook, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from diffvision.progress import in_notebook, track
from diffvision.training.fault_tolerance import watch_signals
from diffvision.training.fault_tolerance.lightning_internals import is_logging_step
from diffvision.training.schedule import total_steps

BAR_INTERVAL, LINE_INTERVAL = 0.25, 10.0  # seconds between updates of the bar, and between printed lines
MINOR = ("lr", "logit_scale", "lambda", "data_wait")  # on the bar where there is room, and not in printed lines
ON_DEVICE = ("train/loss", "train/logit_scale")  # shown although Lightning does not read them at every step


class ProgressLine(TQDMProgressBar):
    """Lightning's progress bar, with the metrics of the last logging step: reading others would wait for the GPU.

    Each epoch leaves a line with its metrics. In a file there is no bar, but a line every ten seconds on logging steps,
    and at the end of each epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._metrics: dict[str, str] = {}
        self._shown, self._is_printing = 0.0, False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._shown = time.monotonic()
        is_drawn = sys.stdout.isatty() or in_notebook()
        self._is_printing = (self.is_enabled or self._is_printing) and not is_drawn
        if self._is_printing:
            self.disable()

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.leave = False  # the epochs' lines stay
        return bar

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the metrics of the last logging step, evaluation or epoch."""
        return self._metrics

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description(describe_epoch(trainer))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        logs = is_logging_step(trainer, trainer.global_step)
        if logs:
            self._read(trainer)
        if time.monotonic() - self._shown < (LINE_INTERVAL if self._is_printing else BAR_INTERVAL):
            return
        if not self._is_printing:
            self._shown = time.monotonic()
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        elif logs:
            self._print_line(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._read(trainer)
        super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print a line for the epoch, except with `overfit_batches`, where an epoch is one step."""
        self._read(trainer)  # every rank: metrics of an epoch are computed in collectives
        super().on_train_epoch_end(trainer, pl_module)
        if (self.is_enabled or self._is_printing) and not getattr(trainer, "overfit_batches", 0):
            self._print_line(trainer)

    def _read(self, trainer: pl.Trainer) -> None:
        logged = trainer.callback_metrics
        shown = {name: logged[name] for name in ON_DEVICE if name in logged} | trainer.progress_bar_metrics
        if trainer.is_global_zero:
            order = sorted(shown, key=lambda name: (name != "train/loss", name.startswith(("train/", "lambda"))))
            self._metrics = {name.removeprefix("train/"): f"{float(shown[name]):.3g}" for name in order}

    def _print_line(self, trainer: pl.Trainer) -> None:
        self._shown = time.monotonic()
        total = total_steps(trainer)
        step = f"step {trainer.global_step}" + ("" if total is None else f"/{total}")
        text = ", ".join(f"{name} {value}" for name, value in self._metrics.items() if name not in MINOR)
        line = f"{describe_epoch(trainer)} {step}: {text}"
        if self._is_printing:
            print(line, flush=True)
        else:
            self.print(line)


def describe_epoch(trainer: pl.Trainer) -> str:
    """Return the current epoch, counted from 1, of how many: "epoch 2/6"."""
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else None
    return f"epoch {trainer.current_epoch + 1}" + ("" if epochs is None else f"/{epochs}")


def track_evaluation(trainer: pl.Trainer) -> Callable[[Any, str], Iterable[Any]]:
    """Return the function `(batches, description) -> batches` that an evaluation during a fit wraps its batches in.

    It lets the run act on signals between batches, and shows a progress bar in a terminal.
    """
    is_shown = isinstance(trainer.progress_bar_callback, ProgressLine) and trainer.is_global_zero

    def wrap(batches: Any, description: str) -> Iterable[Any]:
        watched = watch_signals(trainer, batches)
        return track(watched, f"evaluating {description}", len(batches)) if is_shown else watched

    return wrap
