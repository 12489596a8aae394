"""A small real run of classification: its shards, its command line, and commands called in this process."""

from __future__ import annotations

import io
import logging
import os
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from training_fits import noise

from diffvision import cli
from diffvision.data.shards.writer import write_shards

SHARDS, EACH = 8, 16
KEPT = Path("kept")  # where the run saves its checkpoints


def write_data(directory: str | Path = "shards", *, count: int = SHARDS) -> None:
    """Write shards of noisy images with captions and labels."""
    write_shards(directory, noise(count * EACH, txt=str, cls=lambda number: number % 10), per_shard=EACH)


OPTIONS = f"""
    --model=ClassificationModule --model.model=diff_vit_debug --model.num_classes=10 --model.optimizer.warmup_steps=0
    --data=ImageLabelData --data.batch_size=8 --data.num_workers=0 --trainer.accelerator=cpu --trainer.devices=1
    --trainer.enable_progress_bar=false --trainer.enable_model_summary=false --trainer.log_every_n_steps=1
    --trainer.limit_val_batches=0 --trainer.callbacks+=LastCheckpoint --trainer.callbacks.every_n_train_steps=1
    --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.every_n_train_steps=1 --trainer.callbacks.save_top_k=-1
    --trainer.callbacks.filename={{step}} --trainer.callbacks.dirpath={KEPT}
"""


def fit(*more: str, steps: int = 2, data: str | Path = "shards") -> list[str]:
    """Return the command line of a short run with a checkpoint a step; later flags override earlier ones."""
    return ["fit", *OPTIONS.split(), f"--data.train={data}", f"--trainer.max_steps={steps}", *more]


def run(*command: str) -> tuple[int, str]:
    """Run a `diffvision` command in this process; return its exit status and all that it printed."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    with redirect_stdout(output), redirect_stderr(output), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args, **kwargs: print(message, file=output)
        for logger in loggers:
            logger.addHandler(handler)
        try:
            status = cli.main(list(command))
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
    print(output.getvalue())
    return status, output.getvalue()


def succeeds(*command: str) -> str:
    """Return what a command printed that must end with status 0."""
    status, output = run(*command)
    assert status == 0, output[-600:]
    return output


class Shot(pl.Callback):
    """Sends a signal to this process in a hook, once `step` steps are made."""

    def __init__(self, step: int, number: int, hook: str = "on_train_batch_start") -> None:
        self.step, self.number = step, number
        setattr(self, hook, self.shoot)

    def shoot(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            os.kill(os.getpid(), self.number)


def shot(step: int, number: int, hook: str = "on_train_batch_start") -> list[str]:
    """Return the flags that add a `Shot` to a run."""
    callbacks = "--trainer.callbacks"
    words = ["--allow", "command_line", f"{callbacks}+=command_line.Shot", f"{callbacks}.step={step}"]
    return [*words, f"{callbacks}.number={int(number)}", f"{callbacks}.hook={hook}"]
