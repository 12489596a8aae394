"""The checkpoint of a run's end, where no ModelCheckpoint has saved it.

Checkpoints are written in `checkpoints`; what a signal saves is in `preemption`.
"""

from __future__ import annotations

import os

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from diffvision.training.fault_tolerance import lightning_internals


class LastState(pl.Callback):
    """Saves the state that a run ends with, unless a ModelCheckpoint has saved this step already.

    ModelCheckpoint saves at validations, epochs' ends or certain steps. A run that ends between them, as one by
    max_steps may, would lose what it trained since.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let a dry run write nothing: at its end Lightning would save the last state of `save_last`."""
        if lightning_internals.is_dry_run(trainer):
            for saver in lightning_internals.find_callbacks(trainer, ModelCheckpoint):
                saver.save_last = False

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save by the first ModelCheckpoint that monitors nothing; else as last.ckpt next to those of the first one."""
        savers = lightning_internals.find_callbacks(trainer, ModelCheckpoint)
        savers = [saver for saver in savers if not saver.save_weights_only] or savers
        saved = any(lightning_internals.last_saved_step(saver) == trainer.global_step for saver in savers)
        if not savers or saved or lightning_internals.is_dry_run(trainer):
            return
        for saver in savers:
            if saver.monitor is None and saver.save_top_k != 0:
                lightning_internals.save_unmonitored(saver, trainer)
                return
        saver = savers[0]
        path = saver.last_model_path or os.path.join(saver.dirpath or "", "last.ckpt")
        saver.last_model_path = path  # before it is saved, because it is part of the state
        trainer.save_checkpoint(path, saver.save_weights_only)
        lightning_internals.set_last_save(saver, trainer.global_step, path)
