"""Where in Lightning's loops a checkpoint was taken, and how they go on from there.

Lightning 2.6 takes a checkpoint of a step's end for one of what comes after it too: the validation that was due then,
and the end of an epoch with its hooks, are skipped by the run that is resumed; and a run by max_steps, resumed from an
epoch's end, ends that epoch twice. So the loops' counters are put to where the callbacks were, before they are loaded
(`settle`), and what was still to be done is done (`go_on`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.evaluation_loop import RestartStage

INSIDE, ACCUMULATING = "in the middle of a batch", "between the batches of one optimizer step"
VALIDATED = "epoch_loop.val_loop.batch_progress"  # of a fit's loops, the batches that were validated
Place = Literal["step", "validation", "validated", "epoch"]


def unfinished(trainer: pl.Trainer) -> str:
    """Why a checkpoint of this moment could not be resumed exactly, in words; empty where it can be.

    The gradients of a step that is not yet made are in no checkpoint, and its samples count as consumed.
    """
    loop = trainer.fit_loop.epoch_loop
    batch: Any = loop.batch_progress.current
    if batch.ready != batch.processed:
        return INSIDE
    return ACCUMULATING if batch.ready and loop._should_accumulate() else ""


def place(trainer: pl.Trainer, *, validating: bool) -> Place:
    """Between which hooks a fit is: after a step, in its validation, after that, or at an epoch's end.

    Of a validation that has not ended all is done again.

    Args:
        validating: between on_validation_start and on_validation_end.
    """
    loop = trainer.fit_loop
    batch: Any = loop.epoch_loop.batch_progress.current
    epoch: Any = loop.epoch_progress.current
    if epoch.processed != epoch.completed:
        return "epoch"
    if batch.completed != batch.processed:
        return "step"
    return "validation" if validating else "validated"


def settle(loops: dict[str, Any], at: Place) -> None:
    """Have the state of a fit's loops, from a checkpoint, say that the hook which saved it has been left."""
    progress = loops["epoch_progress"] if at == "epoch" else loops["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]


@contextmanager
def one_more(trainer: pl.Trainer) -> Iterator[None]:
    """Let a run that is at its end begin once more: what follows the last step may still be to be done."""
    fit = trainer.fit_loop
    limits = fit.max_epochs, fit.epoch_loop.max_steps
    fit.max_epochs = limits[0] + 1 if isinstance(limits[0], int) and limits[0] > 0 else limits[0]
    fit.epoch_loop.max_steps = limits[1] + 1 if limits[1] > 0 else limits[1]
    try:
        yield
    finally:
        fit.max_epochs, fit.epoch_loop.max_steps = limits


def at_last_step(trainer: pl.Trainer) -> bool:
    return 0 < trainer.max_steps <= trainer.global_step


def go_on(trainer: pl.Trainer, at: Place) -> None:
    """Have the loops do what was still to be done at a checkpoint; to be called in on_train_start.

    First the checkpoint callbacks that had not had their turn yet when another saved have it now.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    validation, fetcher = loop.val_loop, fit._data_fetcher
    assert fetcher is not None
    if at == "epoch":
        loop._restarting = False  # the next epoch is none that was begun
        return
    if at == "step":
        _callbacks_have_their_turn(trainer)
    if loop._is_training_done:
        fetcher.done = True  # no batch is left of this epoch, or of the run: what comes is its end
    if at in ("step", "validation") and loop._should_check_val_fx(fetcher):
        validation._restarting, validation._restart_stage = False, RestartStage.RESTARTED_MID_EVALUATION
        return
    if at == "step":
        loop._batches_that_stepped += 1  # as the end of the step would have


def _callbacks_have_their_turn(trainer: pl.Trainer) -> None:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.total, progress.current):
        counts.completed -= 1  # as it is in that hook
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback.on_train_batch_end(trainer, trainer.lightning_module, None, None, progress.current.ready - 1)
    for counts in (progress.total, progress.current):
        counts.completed += 1
