"""Everything of Lightning that is private and still used here, behind functions with names of ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import disable_possible_user_warnings
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy

from diffvision.analysis.curves import keep_metrics

Kind = TypeVar("Kind")
ADVISERS = r"lightning\.pytorch\.(callbacks\.model_checkpoint|trainer\.call|utilities\.data)"
LOSSES = r"The dirpath has changed|Be aware that when using `ckpt_path`"  # of a resumed run

# --- what Lightning sets without a declaration, so that type checkers do not know it ---


def find_callbacks(trainer: pl.Trainer, kind: type[Kind]) -> list[Kind]:
    """Return the trainer's callbacks of a class, in their order."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def is_dry_run(trainer: pl.Trainer) -> bool:
    """Return whether the trainer makes a `fast_dev_run`."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def is_logging_step(trainer: pl.Trainer, step: int) -> bool:
    """Return whether the trainer logs after `step` steps."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and step % every == 0


def may_wait_for_device(trainer: pl.Trainer, step: int) -> bool:
    """Return whether values may be read from the device after `step` steps without an additional wait.

    Reading waits for all queued work. Lightning waits on logging steps anyway, and a CPU has no queue.
    """
    return trainer.strategy.root_device.type == "cpu" or is_logging_step(trainer, step)


def is_synced_step(trainer: pl.Trainer, step: int) -> bool:
    """Return whether values logged after `step` steps are reduced over all ranks.

    Reducing makes ranks wait for each other, so it is done on logging steps and at the ends of epochs and of the run.
    On other steps each rank logs its own values.
    """
    if is_logging_step(trainer, step) or step == trainer.max_steps or trainer.world_size == 1:
        return True
    return trainer.fit_loop.batch_idx + 1 == trainer.num_training_batches


def takes_found_inf(optimizer: Any) -> bool:
    """Return whether an optimizer skips a step if its attribute `found_inf` is 1, as torch's fused ones do.

    Fused SGD is not one: if its first step is skipped, torch leaves its momentum uninitialised.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(optimizer, torch.optim.SGD)


# --- loops ---


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Return whether the next batch adds to the gradients of the last one."""
    if is_last_batch(trainer) and not trainer.strategy.handles_gradient_accumulation:
        return False
    return (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches != 0


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Return whether the current batch is the last of the epoch."""
    loop = trainer.fit_loop
    return loop.epoch_loop.batch_progress.is_last_batch or loop.batch_idx + 1 == trainer.num_training_batches


def get_loop_counts(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the counters that `set_loop_counts` restores: logged steps and validated batches."""
    loop = trainer.fit_loop.epoch_loop
    return {"logged": loop._batches_that_stepped, "validated": loop.val_loop.batch_progress.state_dict()}


def set_loop_counts(trainer: pl.Trainer, saved: dict[str, Any]) -> None:
    """Restore the counters that Lightning increments again when a resumed epoch begins."""
    loop = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped = saved["logged"]
    loop.val_loop.batch_progress.load_state_dict(saved["validated"])


def forget_started_batch(trainer: pl.Trainer) -> None:
    """Undo the count of a batch that was started but not trained when the checkpoint was taken: it comes again."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    total.ready = total.completed


# --- checkpoints ---


def refuse_sharded_checkpoints(strategy: Any) -> None:
    """Raise ValueError for a strategy that saves shards, whose files are not atomic and are unpickled."""
    name = type(strategy).__name__
    if getattr(strategy, "_save_distributed_checkpoint", False):
        raise ValueError(f"{name} must save one file: set save_distributed_checkpoint to false")
    if getattr(strategy, "_state_dict_type", "full") == "sharded":
        raise ValueError(f"{name} must save one file: set state_dict_type to full")


def would_misplace_moments(strategy: Any, states: list[dict[str, Any]]) -> bool:
    """Return whether a strategy would load moments, saved without sharding, into the wrong parameters.

    FSDP2 numbers parameters in the order of the module, an optimizer without sharding in the order of its groups. These
    differ with several groups.
    """
    numbers = [[n for group in state["param_groups"] for n in group["params"]] for state in states]
    by_group = any(len(state["param_groups"]) > 1 for state in states) and all(n == [*range(len(n))] for n in numbers)
    return by_group and isinstance(strategy, ModelParallelStrategy)


# --- logs and warnings ---


def ignore_advice(is_fitting: bool = True) -> None:
    """Ignore Lightning's warnings about what is not the user's to change, until the context of warnings ends.

    They are its possible warnings, and those of checkpoints (directories with files, metrics that come later), of data
    without an evaluation, and of torch's new versions. In a fit the warnings stay of what a resumed run loses: the best
    scores so far, where its directory is another one, and the states of callbacks that it lacks.
    """
    disable_possible_user_warnings()
    warnings.filterwarnings("ignore", f"(?!{LOSSES})" if is_fitting else "", UserWarning, ADVISERS)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")


def keep_logged_metrics(trainer: pl.Trainer) -> None:
    """Rename the metrics that a CSVLogger would delete, and ignore its warning until the context of warnings ends."""
    warnings.filterwarnings("ignore", "", UserWarning, r"lightning\.fabric\.loggers")
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, CSVLogger):
            keep_metrics(Path(logger.log_dir))


def has_open_version(logger: Any) -> bool:
    """Return whether a logger will choose the next free version."""
    return logger is not None and getattr(logger, "_version", 0) is None


def set_version(logger: Any, number: int | None) -> None:
    """Set the version that a logger writes to; None lets it choose."""
    logger._version = number


# --- processes and signals ---


def disable_signal_handlers(trainer: pl.Trainer) -> Any:
    """Disable Lightning's signal handlers, and its broadcast before each batch; return its ClusterEnvironment."""
    loop, signals = trainer.fit_loop.epoch_loop, trainer._signal_connector
    for owner, name in ((signals, "register_signal_handlers"), (loop, "_broadcast_sigterm_tensor")):
        getattr(owner, name)  # an AttributeError where Lightning does it otherwise
        vars(owner)[name] = lambda: None
    return trainer._accelerator_connector.cluster_environment


def forget_started_ranks(launcher: Any) -> None:
    """Stop a launcher from watching the ranks it has started: it would kill all when the first is preempted."""
    getattr(launcher, "procs", []).clear()


# --- modules ---


class BatchHook:
    """Base of LightningModules: `prepare_batch` is applied to each batch before any public hook.

    Overriding the public hook on_before_batch_transfer would replace the data module's.
    """

    def prepare_batch(self, batch: Any) -> Any:
        """Return a loader's batch in the form that the steps take."""
        return batch

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int | None = None) -> Any:
        # None: no loader's batch, but an input of `forward` in Lightning's summary and exports.
        batch = super()._on_before_batch_transfer(batch, dataloader_idx or 0)  # type: ignore[misc]
        return batch if dataloader_idx is None else self.prepare_batch(batch)
