"""`protect`, which makes a fit fault-tolerant, and the order of hooks between two batches.

One batch of a recipe's fit, from top to bottom. Lightning calls each hook of the callbacks in the order of `protect`,
then the module's; hooks that are not listed are empty.

    the loader's next batch
    prepare_batch               TrainingModule    a dictionary, checked
    on_train_batch_start        Preemption        on a signal: save preempted.ckpt, end
                                StepGuard         note the batch
                                LastCheckpoint    save last.ckpt, where the step is one to save at
    training_step               TrainingModule    the loss; ContrastiveModule makes its step here
    on_before_backward          StepGuard         a loss that is not finite makes every gradient NaN, on all ranks
    on_after_backward           NextTokenModule   divide by the step's predictions
    on_before_optimizer_step    StepGuard         clip the gradient, or skip the step
    the optimizer's step, and the schedule's
    on_train_batch_end          ProgressLine      redraw the line
                                EMA               update the averages
                                Throughput        samples per second
                                LambdaMonitor     lambda of each layer
                                DataReport        count the batch
                                Preemption        the ranks agree on signals
                                ModelCheckpoint   save, on the steps that it was told
                                LastCheckpoint    note the position in the data, before a step to save at
    the loggers write the step's metrics

Where a validation is due it follows, and every save calls these:

    on_validation_start         ProgressLine      begin its bar
                                Preemption        count how often ranks ask for signals
    on_validation_epoch_start   EMA               the averages go into the module
                                TrainingModule    begin the sums
    on_validation_batch_start   ProgressLine      redraw the line
                                Preemption        the ranks agree on signals: end
    validation_step             TrainingModule    evaluate, or add to the sums
    on_validation_batch_end     ProgressLine      redraw the line
    on_validation_epoch_end     EMA               the training weights come back
                                TrainingModule    log the metrics
    on_validation_end           ProgressLine      show the metrics
                                Throughput        leave out the time
                                ModelCheckpoint   save the best

    on_save_checkpoint          EMA               both sets of weights
                                DataReport        what was counted of the epoch
                                LastCheckpoint    random generators, settings, the position in the data
                                TrainingModule    what rebuilds the model
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.fault_tolerance.checkpoints import DurableCheckpointIO
from diffvision.training.fault_tolerance.exact import LastCheckpoint
from diffvision.training.fault_tolerance.preemption import Preemption
from diffvision.training.fault_tolerance.ranks import SameShards, end_with_first_rank
from diffvision.training.fault_tolerance.resume import Ranks, Resume, prepare_run

_OURS = (SameShards, Preemption)


@contextmanager
def protect(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    *,
    resume: Resume = "never",
    ranks: Ranks = "same",
    ckpt_path: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[str | None]:
    """Protect a fit: whole checkpoints, exact resuming, signals, the same shards on every rank.

        with protect(trainer, module, resume="auto") as checkpoint:
            trainer.fit(module, data, ckpt_path=checkpoint)

    It adds callbacks and a checkpoint plugin to the trainer, unless it has such a plugin. Steps that are not finite are
    skipped by `StepGuard`, which the modules of `diffvision.training` add.

    Args:
        trainer: the trainer that fits the module inside the context.
        module: the module to train.
        resume: "auto": resume from the newest valid checkpoint in the run's directory, or start if there is none;
            "must": raise if there is none; "never": start, and raise if there is one.
        ranks: "same", or "any" to resume from a checkpoint of another number of processes.
        ckpt_path: a checkpoint to resume from; requires `resume="never"`.
        settings: the configuration, by dotted names; a resumed run warns of values that differ.

    Yields:
        The checkpoint to resume from, or None.

    Raises:
        ValueError: there is nothing to resume from, or something that must not be resumed from; the strategy would save
            sharded checkpoints.
        OSError: a directory cannot be written to, or another run holds it.
    """
    end_with_first_rank()
    lightning_internals.refuse_sharded_checkpoints(trainer.strategy)
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = DurableCheckpointIO()
    last = get_last_checkpoint(trainer)
    last.settings = settings or {}
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    others = [callback for callback in callbacks if not isinstance(callback, (*_OURS, Checkpoint))]
    savers = lightning_internals.find_callbacks(trainer, Checkpoint)
    # Signals are agreed on after the other callbacks have finished a step; Lightning calls Checkpoint callbacks last.
    callbacks[:] = [*others, SameShards(), Preemption(last), *[s for s in savers if s is not last], last]
    with prepare_run(trainer, module, last, how=resume, ranks=ranks, ckpt_path=ckpt_path) as path:
        yield path


def get_last_checkpoint(trainer: pl.Trainer) -> LastCheckpoint:
    """Return the trainer's LastCheckpoint, or a new one.

    Raises:
        ValueError: a ModelCheckpoint would write the same file.
    """
    for saver in lightning_internals.find_callbacks(trainer, ModelCheckpoint):
        if saver.filename == "last":
            raise ValueError(
                "ModelCheckpoint's filename must not be last, which LastCheckpoint writes: remove the first"
            )
        if saver.save_last:
            rank_zero_info("save_last of a ModelCheckpoint is ignored: LastCheckpoint writes last.ckpt")
            saver.save_last = None
    savers = lightning_internals.find_callbacks(trainer, Checkpoint)
    last = next((saver for saver in savers if isinstance(saver, LastCheckpoint)), LastCheckpoint())
    last.enabled = bool(savers) and not lightning_internals.is_dry_run(trainer)
    return last
