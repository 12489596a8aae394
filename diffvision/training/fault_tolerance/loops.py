"""Where in Lightning's loops a checkpoint was taken, and how the loops continue from there.

Lightning 2.6 takes a checkpoint of a step's end for one of what comes after it too: the validation that was due then,
and the end of an epoch with its hooks, are skipped by the run that is resumed; and a run by max_steps, resumed from an
epoch's end, ends that epoch twice. So the loops' counters are set to where the callbacks were, before they are loaded
(`complete_hook`), and what was left to do is done (`resume`). Lightning's private names are in `lightning_internals`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from diffvision.training.fault_tolerance import lightning_internals

INSIDE, ACCUMULATING = "in the middle of a batch", "between the batches of one optimizer step"
VALIDATED = "epoch_loop.val_loop.batch_progress"  # key in the state of a fit's loops: the batches that were validated
Moment = Literal["step", "validation", "validated", "epoch"]  # values in checkpoints: never rename them


def describe_unfinished(trainer: pl.Trainer) -> str:
    """Say why a checkpoint of this moment could not be resumed exactly; return "" where it can be.

    The gradients of a step that is not yet made are in no checkpoint, and its samples count as consumed.
    """
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if batch.ready != batch.processed:
        return INSIDE
    return ACCUMULATING if batch.ready and lightning_internals.is_accumulating(trainer) else ""


def find_moment(trainer: pl.Trainer, *, validating: bool) -> Moment:
    """Return between which hooks a fit is: after a step, in its validation, after that, or at an epoch's end.

    A validation that has not ended is repeated as a whole.

    Args:
        validating: between on_validation_start and on_validation_end.
    """
    loop = trainer.fit_loop
    batch: Any = loop.epoch_loop.batch_progress.current
    epoch: Any = loop.epoch_progress.current
    ended = epoch.ready == epoch.processed and loop.epoch_loop.batch_progress.is_last_batch
    if epoch.processed != epoch.completed or ended:
        return "epoch"
    if batch.completed != batch.processed:
        return "step"
    return "validation" if validating else "validated"


def ends_within_epoch(trainer: pl.Trainer) -> bool:
    """Return whether a run by steps, or one that a callback stops, has ended within an epoch, as at its end.

    Lightning then calls the hooks of the epoch's end, and counts it.
    """
    epoch: Any = trainer.fit_loop.epoch_progress.current
    stopped = trainer.should_stop or is_at_last_step(trainer)
    return stopped and epoch.ready == epoch.processed and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def reopen_epoch(loops: dict[str, Any]) -> None:
    """Change the state of a fit's loops so that the epoch, which a run's end has cut short, continues."""
    for counts in (loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]):
        counts["processed"] -= 1
        counts["completed"] = counts["processed"]


def read_moment(loops: dict[str, Any], at: Moment) -> Moment:
    """Return the moment that a checkpoint was taken at, from the state of a fit's loops and its record.

    Earlier versions recorded the end of a run, where no part of the last epoch is left to do, as "validated".
    """
    epoch, batch = loops["epoch_progress"]["current"], loops["epoch_loop.batch_progress"]
    return "epoch" if epoch["ready"] == epoch["processed"] and batch["is_last_batch"] else at


def complete_hook(loops: dict[str, Any], at: Moment) -> None:
    """Change the state of a fit's loops, from a checkpoint, so that the hook which saved it counts as completed."""
    progress = loops["epoch_progress"] if at == "epoch" else loops["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]


@contextmanager
def raise_limits(trainer: pl.Trainer) -> Iterator[None]:
    """Raise the limits of epochs and steps by one in a block, so that a run at its end does what is left to do."""
    fit = trainer.fit_loop
    limits = fit.max_epochs, fit.epoch_loop.max_steps
    fit.max_epochs = limits[0] + 1 if isinstance(limits[0], int) and limits[0] > 0 else limits[0]
    fit.epoch_loop.max_steps = limits[1] + 1 if limits[1] > 0 else limits[1]
    try:
        yield
    finally:
        fit.max_epochs, fit.epoch_loop.max_steps = limits


def is_at_last_step(trainer: pl.Trainer) -> bool:
    """Return whether all steps of a run by max_steps are made."""
    return 0 < trainer.max_steps <= trainer.global_step


def resume(trainer: pl.Trainer, at: Moment) -> None:
    """Let the loops do what was left to do at a checkpoint; called in on_train_start.

    First come the checkpoint callbacks that were still to be called when another one saved.
    """
    if at == "epoch":
        trainer.fit_loop.epoch_loop.restarting = False  # the next epoch begins as one that was not interrupted
        return
    if at == "step":
        _call_checkpoint_callbacks(trainer)
    if is_at_last_step(trainer) or lightning_internals.is_last_batch(trainer):
        lightning_internals.end_epoch(trainer)
    if at in ("step", "validation") and lightning_internals.is_validation_due(trainer):
        lightning_internals.restart_validation(trainer)
    elif at == "step":
        lightning_internals.count_step(trainer)


def _call_checkpoint_callbacks(trainer: pl.Trainer) -> None:
    """Call the checkpoint callbacks again with the counters as they were at the end of the batch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.total, progress.current):
        counts.completed -= 1  # its value when Lightning calls this hook
    for saver in lightning_internals.find_callbacks(trainer, ModelCheckpoint):
        saver.on_train_batch_end(trainer, trainer.lightning_module, None, None, progress.current.ready - 1)
    for counts in (progress.total, progress.current):
        counts.completed += 1
