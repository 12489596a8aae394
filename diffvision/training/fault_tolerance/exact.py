"""Checkpoints from which a run resumes bit for bit, and how the resumed run continues.

They are written just before the first batch of an optimizer step, when the previous step, its validation, the end of
its epoch and its logging are finished. `resume` chooses the file to resume from.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler, ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.fault_tolerance.checkpoints import (
    EXACT,
    FINAL,
    LAST,
    RUN_KEY,
    find_checkpoints,
    is_remote,
    read_step,
    set_aside,
)
from diffvision.training.fault_tolerance.finite import StepGuard, gather_from_ranks
from diffvision.training.fault_tolerance.lightning_internals import find_callbacks
from diffvision.training.fault_tolerance.random_state import capture_random_state, restore_random_state

# Settings that affect neither weights nor samples.
IGNORED_SETTINGS = (
    "config",
    "ckpt_path",
    "resume",
    "verbose",
    "weights_only",
    "trainer.logger",
    "trainer.default_root_dir",
    "trainer.enable_",
    "trainer.log_every_n_steps",
    "trainer.profiler",
    "trainer.devices",  # the number of processes is compared instead
    "trainer.num_nodes",
    "trainer.fast_dev_run",
    "data.init_args.num_workers",
    "data.init_args.cache_bytes",
)


class LastCheckpoint(Checkpoint):
    """Writes `last.ckpt`, which a run resumes from exactly, and `final.ckpt`, the weights at the run's end.

    `last.ckpt` is written every `every_n_train_steps` steps, before a step that a validation follows, and before the
    run's last step, so that a finished run can be extended exactly. If validations are by time or there are none, it is
    also written before each epoch but the first. It is in the directory of the first ModelCheckpoint, and is not
    overwritten while steps are skipped because they are not finite.

    Attributes:
        last_model_path: path of `final.ckpt` once it is written, as in ModelCheckpoint.
        optimizers: class names of the optimizers in the resumed checkpoint; None if it does not record them.
        settings: the configuration, by dotted names such as model.init_args.lr.
        enabled: whether files are written; otherwise it only restores.
    """

    enabled = True
    monitor: str | None = None
    best_model_path = last_model_path = ""
    optimizers: list[str] | None = None

    def __init__(self, every_n_train_steps: int | None = None) -> None:
        """Set how often to save within an epoch.

        Args:
            every_n_train_steps: optimizer steps between saves; null: save only before validations (or epochs) and the
                last step.
        """
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps must be 1 or more, got {every_n_train_steps}")
        self.every_n_train_steps = every_n_train_steps
        self.settings: Mapping[str, Any] = {}
        self.directory: Path | None = None
        self._positions: list[Any] | None = None  # of the loaders, if a save is due before the next batch
        self._late = self._saving = self._ending = False
        self._run: dict[str, Any] | None = None  # of the checkpoint that was loaded

    # --- saving ---

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """After a step, decide whether to save before the next one."""
        if lightning_internals.is_accumulating(trainer):
            return
        ended = lightning_internals.is_last_batch(trainer)
        next_batch = 0 if ended else trainer.fit_loop.batch_idx + 1
        if self._late or self._is_due(trainer, trainer.current_epoch + ended, next_batch):
            self.record_position(trainer)

    def _is_due(self, trainer: pl.Trainer, epoch: int, first: int) -> bool:
        """Return whether to save before the step that begins with this batch of the epoch."""
        batches, step = trainer.num_training_batches, trainer.global_step
        if first == 0 and not validates_by_batches(trainer):
            return True
        stop = min(first + trainer.accumulate_grad_batches, batches)
        every = self.every_n_train_steps
        if (every is not None and step % every == 0) or step + 1 == trainer.max_steps:
            return True
        if stop == batches and epoch + 1 == trainer.max_epochs:
            return True
        return any(validates_after(trainer, epoch, batch) for batch in range(first, int(stop)))

    def record_position(self, trainer: pl.Trainer) -> None:
        """Record the loaders' positions between two steps; when the next batch starts they have moved on."""
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        self._positions = [loader.state_dict() for loader in loaders if hasattr(loader, "load_state_dict")]

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """In a resumed run, restore random states and counters that start-up hooks changed; then save if it is due."""
        if (run := self._run) is not None:
            self._run = None
            if run.get("exact"):
                restore_random_state(
                    run["random"][trainer.global_rank % len(run["random"])], trainer.strategy.root_device
                )
                lightning_internals.set_loop_counts(trainer, run["counts"])
        if self._positions is not None:
            self.save(trainer, LAST)

    def save(self, trainer: pl.Trainer, name: str) -> str | None:
        """Save the state before this batch as `name`; return the path, or None if nothing is saved."""
        guards = find_callbacks(trainer, StepGuard)
        for guard in guards:
            guard.report_skipped()
        self._late = name == LAST and any(guard.in_a_row for guard in guards)
        if self.directory is None or self._positions is None or self._late:
            self._positions = None
            return None
        self._saving, path = True, str(self.directory / name)
        try:
            trainer.save_checkpoint(path)  # has a barrier: when it returns, the file is complete
        finally:
            self._saving, self._positions = False, None
        return path

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Add the run's state under `RUN_KEY`. Its keys are part of the file format."""
        checkpoint[RUN_KEY] = {
            "exact": self._saving,
            "world_size": trainer.world_size,
            "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
        }
        if self._ending:
            for name in ("optimizer_states", "lr_schedulers", "current_model_state"):
                checkpoint.pop(name, None)
        if not self._saving:
            return
        for logger in trainer.loggers:
            logger.save()  # a run resumed from here needs on disk what was logged before
        loop = checkpoint["loops"]["fit_loop"]
        loop["epoch_loop.batch_progress"]["is_last_batch"] = False
        if "combined_loader" in loop["state_dict"]:
            loop["state_dict"]["combined_loader"] = self._positions
        checkpoint[RUN_KEY] |= {
            "random": gather_from_ranks(trainer, capture_random_state(trainer.strategy.root_device)),
            "counts": lightning_internals.get_loop_counts(trainer),
            "metrics": {k: v.detach().cpu() for k, v in trainer.callback_metrics.items()},
            "settings": self._describe_settings(trainer),
        }

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write `final.ckpt`; with EMA it has the averages, which are in the module at this point."""
        if self.directory is not None:
            self._ending, self.last_model_path = True, str(self.directory / FINAL)
            try:
                trainer.save_checkpoint(self.last_model_path)
            finally:
                self._ending = False

    # --- resuming ---

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the directory, and check that all processes found the same checkpoint."""
        if stage != "fit":
            return
        self._positions, self._late, self.last_model_path = None, False, ""
        directories = run_directories(trainer) if self.enabled else []
        self.directory = trainer.strategy.broadcast(next(iter(directories), None))
        first = trainer.strategy.broadcast(trainer.ckpt_path)
        if not trainer.strategy.reduce_boolean_decision(first == trainer.ckpt_path):
            raise RuntimeError(
                f"process {trainer.global_rank} resumes from {trainer.ckpt_path}, the first one from {first}: "
                "all nodes must see the same directory of checkpoints"
            )

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Read the run's state from a checkpoint; refuse EMA weights if the run has no EMA callback."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._run = checkpoint.get(RUN_KEY, {})
        for saver in find_callbacks(trainer, ModelCheckpoint):  # which saves its last score, and does not load it
            saver.current_score = checkpoint.get("callbacks", {}).get(saver.state_key, {}).get("current_score")
        if "current_model_state" in checkpoint and not find_callbacks(trainer, WeightAveraging):
            raise ValueError(
                f"cannot resume from {trainer.ckpt_path}: its weights are averages: add the callback "
                "diffvision.training.ema.EMA"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the optimizers have the classes whose states will be loaded."""
        current = [type(optimizer).__name__ for optimizer in trainer.optimizers]
        if self.optimizers not in (None, current):
            raise ValueError(
                f"cannot resume from {trainer.ckpt_path}: its optimizer is {', '.join(self.optimizers)} and here it is "
                f"{', '.join(current)}: set the same optimizer, or begin a new run"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the metrics that callbacks monitor, and warn of each way in which the resumed run differs."""
        if (run := self._run) is None:
            return
        for scheduler in find_callbacks(trainer, GradientAccumulationScheduler):  # it acts when an epoch begins
            trainer.accumulate_grad_batches = scheduler.get_accumulate_grad_batches(trainer.current_epoch)
        origin = f"resumed from {trainer.ckpt_path}"
        if not run.get("exact"):
            rank_zero_warn(f"{origin} as Lightning resumes, not exactly: only last.ckpt and preempted.ckpt are exact")
            return
        lightning_internals.forget_started_batch(trainer)
        if trainer.is_global_zero:
            self._set_aside(trainer)
        trainer.callback_metrics.update(run["metrics"])
        if not hasattr(trainer.train_dataloader, "state_dict"):
            kind = type(trainer.train_dataloader).__name__
            rank_zero_warn(
                f"{origin}: {kind} does not save its position (state_dict), so its samples may be repeated or left out"
            )
        if len(run["random"]) != trainer.world_size:
            rank_zero_warn(
                f"{origin}: {len(run['random'])} processes trained it and here are {trainer.world_size}: every sample "
                "comes as it would have, random numbers (dropout) do not"
            )
        if lines := list(describe_changes(run["settings"], self._describe_settings(trainer))):
            rank_zero_warn(f"{origin}: these settings have changed: {list_few(lines, limit=8)}")

    def _set_aside(self, trainer: pl.Trainer) -> None:
        """Rename checkpoints of steps that will be trained again."""
        savers = find_callbacks(trainer, ModelCheckpoint)
        known = {str(path) for s in savers for path in (s.best_model_path, s.last_model_path, *s.best_k_models)}
        for directory in run_directories(trainer):
            for path in find_checkpoints(directory):
                if path.name not in EXACT and str(path) not in known and read_step(path) > trainer.global_step:
                    set_aside(path)

    def _describe_settings(self, trainer: pl.Trainer) -> dict[str, str]:
        """Return the settings, versions and devices that a run's numbers depend on, by name."""
        device = trainer.strategy.root_device
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        settings = {k: str(value) for k, value in self.settings.items() if not k.startswith(IGNORED_SETTINGS)}
        return settings | {
            "torch": str(torch.__version__),
            "lightning": pl.__version__,
            "device": f"{device.type} ({kind})",
            "threads (OMP_NUM_THREADS)": str(torch.get_num_threads()) if device.type == "cpu" else "any",
        }


def validates_by_batches(trainer: pl.Trainer) -> bool:
    """Return whether validations follow known batches, rather than a time interval."""
    return trainer.enable_validation and trainer.val_check_batch not in (None, float("inf"))


def validates_after(trainer: pl.Trainer, epoch: int, batch: int) -> bool:
    """Return whether a validation follows a batch of an epoch, by Lightning's rule."""
    every, interval = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if interval is None or not validates_by_batches(trainer) or (every and (epoch + 1) % every):
        return False
    # Epochs that were cut short may have had fewer batches, which the loop alone has counted.
    ahead = batch - trainer.fit_loop.batch_idx if epoch == trainer.current_epoch else batch + 1
    number = batch if every else trainer.fit_loop.total_batch_idx + ahead
    return (number + 1) % interval == 0


def run_directories(trainer: pl.Trainer) -> list[Path]:
    """Return the local directories that the trainer's ModelCheckpoint callbacks write to, by Lightning's rule.

    The logger's version directory comes first if no ModelCheckpoint has a `dirpath`.
    """
    root = trainer.default_root_dir
    if trainer.loggers:
        logger: Any = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        root = os.path.join(logger.save_dir or root, str(logger.name), version)
    default = os.path.join(root, "checkpoints")
    found = [str(saver.dirpath or default) for saver in find_callbacks(trainer, ModelCheckpoint)] or [default]
    return [Path(directory) for directory in dict.fromkeys(found) if not is_remote(directory)]


# --- settings ---


def describe_changes(saved: dict[str, str], current: dict[str, str]) -> Iterator[str]:
    """Describe each setting that has changed since the checkpoint was saved."""
    for name in sorted(saved.keys() | current.keys()):
        before, now = saved.get(name, "not set"), current.get(name, "not set")
        if {before, now} != {"not set", "None"} and _normalise_number(before) != _normalise_number(now):
            yield f"{name} {now:.100} (was {before:.100})"


def _normalise_number(value: str) -> str:
    """Return "3" for "3.0": whether jsonargparse reads 3 as 3.0 depends on which modules are imported.

    "1.0" stays, because Lightning takes 1.0 as a fraction and 1 as a count.
    """
    return value if value == "1.0" else re.sub(r"\A(\d+)\.0\Z", r"\1", value)


def list_few(items: Any, joint: str = ", ", limit: int = 3) -> str:
    """Return the first `limit` items as text, and the number of the others."""
    items = list(items)
    return joint.join(items[:limit]) + (f"{joint}and {len(items) - limit} more" if len(items) > limit else "")
