"""Everything of Lightning that is private and still used here, behind functions with names of ours."""

from __future__ import annotations

from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

Kind = TypeVar("Kind")

# --- what Lightning sets without a declaration, so that type checkers do not know it ---


def find_callbacks(trainer: pl.Trainer, kind: type[Kind]) -> list[Kind]:
    """Return the trainer's callbacks of a class, in their order."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def is_dry_run(trainer: pl.Trainer) -> bool:
    """Return whether the trainer makes a `fast_dev_run`."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def is_logging_step(trainer: pl.Trainer, step: int) -> bool:
    """Return whether the trainer logs after so many steps."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and step % every == 0


def may_wait_for_device(trainer: pl.Trainer, step: int) -> bool:
    """Return whether numbers are read from the device after so many steps.

    Each such number waits for all that the device has to do. On logging steps Lightning waits anyway, and a CPU is
    never waited for.
    """
    return trainer.strategy.root_device.type == "cpu" or is_logging_step(trainer, step)


def is_synced_step(trainer: pl.Trainer, step: int) -> bool:
    """Return whether the numbers logged after so many steps are of all ranks together.

    Ranks wait for each other to sum them, so that is on logging steps and at the ends of an epoch and of the run. On
    others the numbers are each rank's own.
    """
    if is_logging_step(trainer, step) or step == trainer.max_steps or trainer.world_size == 1:
        return True
    return trainer.fit_loop.batch_idx + 1 == trainer.num_training_batches


def takes_found_inf(optimizer: Any) -> bool:
    """Return whether an optimizer makes no step where its attribute `found_inf` is 1, as torch's fused ones do.

    Fused SGD is not one: if its first step is skipped, torch leaves its momentum uninitialised.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(optimizer, torch.optim.SGD)


# --- loops ---


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Return whether the last batch leaves gradients to which the next batch adds."""
    if is_last_batch(trainer) and not trainer.strategy.handles_gradient_accumulation:
        return False
    return (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches != 0


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Return whether no batch is left of the epoch."""
    loop = trainer.fit_loop
    return loop.epoch_loop.batch_progress.is_last_batch or loop.batch_idx + 1 == trainer.num_training_batches


def get_loop_counts(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what `set_loop_counts` takes: how many steps the loggers count, and what was validated."""
    loop = trainer.fit_loop.epoch_loop
    return {"logged": loop._batches_that_stepped, "validated": loop.val_loop.batch_progress.state_dict()}


def set_loop_counts(trainer: pl.Trainer, saved: dict[str, Any]) -> None:
    """Set what Lightning counts once more when a resumed epoch begins."""
    loop = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped = saved["logged"]
    loop.val_loop.batch_progress.load_state_dict(saved["validated"])


def forget_started_batch(trainer: pl.Trainer) -> None:
    """Let the batch that was about to be trained, when a checkpoint was taken, be counted when it comes again."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    total.ready = total.completed


# --- checkpoints ---


def refuse_sharded_checkpoints(strategy: Any) -> None:
    """Raise ValueError for a strategy that saves shards: they are not atomic, and are read back by unpickling."""
    name = type(strategy).__name__
    if getattr(strategy, "_save_distributed_checkpoint", False):
        raise ValueError(f"{name} must save one file: set save_distributed_checkpoint to false")
    if getattr(strategy, "_state_dict_type", "full") == "sharded":
        raise ValueError(f"{name} must save one file: set state_dict_type to full")


def would_misplace_moments(strategy: Any, states: list[dict[str, Any]]) -> bool:
    """Return whether a strategy would give the moments of a run without sharding to other parameters.

    FSDP2's numbers are the parameters' places in the module, and those of an optimizer are in the order of its groups.
    """
    numbers = [[n for group in state["param_groups"] for n in group["params"]] for state in states]
    by_group = any(len(state["param_groups"]) > 1 for state in states) and all(n == [*range(len(n))] for n in numbers)
    return by_group and isinstance(strategy, ModelParallelStrategy)


# --- logs ---


def has_open_version(logger: Any) -> bool:
    """Return whether a logger will choose the next free version by itself."""
    return logger is not None and getattr(logger, "_version", 0) is None


def set_version(logger: Any, number: int | None) -> None:
    """Set the version that a logger writes to; None leaves it open."""
    logger._version = number


# --- processes and signals ---


def cluster_environment(trainer: pl.Trainer) -> Any:
    """Return the ClusterEnvironment that a trainer runs in."""
    return trainer._accelerator_connector.cluster_environment


def disable_signal_handlers(trainer: pl.Trainer) -> None:
    """Keep Lightning from setting its signal handlers, and from the broadcast that it makes before each batch."""
    loop, signals = trainer.fit_loop.epoch_loop, trainer._signal_connector
    for owner, name in ((signals, "register_signal_handlers"), (loop, "_broadcast_sigterm_tensor")):
        getattr(owner, name)  # an AttributeError where Lightning does it otherwise
        vars(owner)[name] = lambda: None


def forget_started_ranks(launcher: Any) -> None:
    """Stop a launcher from watching the ranks that it has started: one that ends preempted would end all of them."""
    getattr(launcher, "procs", []).clear()


# --- modules ---


class BatchHook:
    """A base for LightningModules: `prepare_batch` changes each batch of a loader before any public hook sees it.

    The public hook on_before_batch_transfer would replace a data module's if a module overrode it.
    """

    def prepare_batch(self, batch: Any) -> Any:
        """Return a loader's batch as the steps read it."""
        return batch

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int | None = None) -> Any:
        # None: no loader's batch, but an input of `forward` in Lightning's summary and exports.
        batch = super()._on_before_batch_transfer(batch, dataloader_idx or 0)  # type: ignore[misc]
        return batch if dataloader_idx is None else self.prepare_batch(batch)
