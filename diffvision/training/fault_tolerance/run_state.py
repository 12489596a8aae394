"""What every checkpoint keeps of a run besides its weights, and how a resumed run continues from it exactly.

Which checkpoint a run resumes from is decided in `resume`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from diffvision.data.shards.loader import ShardLoader
from diffvision.training.fault_tolerance import lightning_internals, loops
from diffvision.training.fault_tolerance.finite import gather
from diffvision.training.fault_tolerance.layout import RUN_KEY
from diffvision.training.fault_tolerance.lightning_internals import find_callbacks
from diffvision.training.fault_tolerance.random_state import capture, restore

LONG = 200  # characters of a setting's two values, from which on only their differing parts are named
# Settings of a configuration that make no difference to weights or samples.
HARMLESS = (
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
COMPARED = (  # of a trainer, where there is no configuration
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "max_steps",
    "max_epochs",
    "limit_train_batches",
)
SEED = "seed_everything"
NAMED = 8  # at most as many settings that differ are named


class RunState(pl.Callback):
    """Keeps in every checkpoint what Lightning's own keys leave out, and lets a resumed run continue exactly.

    That is: every process's random generators, the metrics that callbacks watch, what ModelCheckpoint saved last, and
    the moment between a step, its validation and the epoch's end. What cannot be the same is warned of, by the name of
    the setting.

    Attributes:
        path: the checkpoint that this process resumes from; None for a new run.
        saved: what that checkpoint says of the run that wrote it, and its optimizers' states.
        settings: the configuration, as nested dictionaries of plain values.
    """

    path: str | None = None
    saved: dict[str, Any]

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.settings = settings or {}
        self._run: dict[str, Any] | None = None  # of the checkpoint that was loaded
        self._loader_states: list[Any] = []
        self._before_validation: tuple[Any, Any] | None = None  # generators, and the batches validated before
        self._warned = False
        self._beginning = ExitStack()

    # --- saving ---

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Add the state of the run, under `RUN_KEY`; its keys are in files, so never rename them."""
        checkpoint[RUN_KEY] = {
            "world_size": trainer.world_size,
            "optimizers": names_of(trainer.optimizers),
            "schedulers": names_of([config.scheduler for config in trainer.lr_scheduler_configs]),
        }
        if trainer.state.fn != TrainerFn.FITTING:
            return
        unfinished = loops.describe_unfinished(trainer)
        at = loops.find_moment(trainer, validating=self._before_validation is not None)
        if loops.ends_within_epoch(trainer):
            at = "validated"
            loops.reopen_epoch(checkpoint["loops"]["fit_loop"])
        random = capture(trainer.strategy.root_device)
        if at == "validation" and self._before_validation is not None:
            random, checkpoint["loops"]["fit_loop"][loops.VALIDATED] = self._before_validation
        for logger in trainer.loggers:
            logger.save()  # a run resumed from here needs on disk what was logged before
        checkpoint[RUN_KEY] |= {
            "place": at,
            "unfinished": unfinished,
            "random": gather(trainer, random),
            "metrics": {k: v.detach().cpu() for k, v in trainer.callback_metrics.items()},
            "saves": {
                c.state_key: {k: getattr(c, k) for k in lightning_internals.SAVE_STATE}
                for c in find_callbacks(trainer, ModelCheckpoint)
            },
            "row": lightning_internals.metrics_to_log(trainer) if at == "step" else {},
            "settings": self._describe_settings(trainer),
        }
        if unfinished and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"a checkpoint is taken {unfinished}: no run will be resumed from it, because its gradients are in no "
                "checkpoint. Let checkpoints and validation (val_check_interval) be a multiple of "
                f"accumulate_grad_batches ({trainer.accumulate_grad_batches}) apart"
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the state before a validation, to which a checkpoint within it goes back."""
        self._beginning.close()
        if trainer.state.fn == TrainerFn.FITTING:
            progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress.state_dict()
            self._before_validation = capture(trainer.strategy.root_device), progress

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before_validation = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the extension of the run's limits."""
        self._beginning.close()

    # --- resuming ---

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that all processes resume from the same checkpoint.

        Each one looked for it before there was a group to ask.

        Raises:
            RuntimeError: they see different files.
        """
        if stage != "fit" or trainer.world_size == 1:
            return
        first = trainer.strategy.broadcast(self.path)
        if not trainer.strategy.reduce_boolean_decision(first == self.path):
            raise RuntimeError(
                f"process {trainer.global_rank} resumes from {self.path}, the first one from {first}: "
                "all nodes must see the same directory of checkpoints"
            )

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Check what a checkpoint is resumed with, before data is read.

        Raises:
            ValueError: it cannot be resumed.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._run = run = checkpoint.get(RUN_KEY, {})
        if "current_model_state" in checkpoint and not find_callbacks(trainer, WeightAveraging):
            raise ValueError(
                f"cannot resume from {trainer.ckpt_path}: its weights are averages: add the callback "
                "diffvision.training.ema.EMA"
            )
        if run.get("unfinished"):
            raise ValueError(f"cannot resume from {trainer.ckpt_path}: it was taken {run['unfinished']}")
        if "place" in run:
            state = checkpoint["loops"]["fit_loop"]
            self._loader_states = state["state_dict"].get("combined_loader", [])
            self._run = run = run | {"place": loops.read_moment(state, run["place"])}
            loops.complete_hook(state, run["place"])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that optimizers are of the kinds whose states will be loaded.

        Raises:
            ValueError: they are of others.
        """
        if self._run is not None and "place" in self._run:
            self._beginning.enter_context(loops.raise_limits(trainer))
        if self.path is None:
            return
        saved, current = self.saved.get("optimizers"), names_of(trainer.optimizers)
        saved_settings = {
            key for state in self.saved["optimizer_states"] for group in state["param_groups"] for key in group
        }
        settings = {key for optimizer in trainer.optimizers for group in optimizer.param_groups for key in group}
        # A checkpoint without our record names no classes, only settings; a new version of torch may add some.
        if saved == current or (not saved and (saved_settings <= settings or settings <= saved_settings)):
            return
        differing = (
            f"settings only in the checkpoint: {list_few(saved_settings - settings) or 'none'}; "
            f"only in this run: {list_few(settings - saved_settings) or 'none'}"
        )
        raise ValueError(
            f"cannot resume from {self.path}: its optimizer is {', '.join(saved or ['another'])} and here it is "
            f"{', '.join(current)} ({differing}): set the same optimizer, or start anew"
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the run, after all that draws random numbers at a start and before the first batch."""
        self._beginning.close()
        run, self._run = self._run, None
        if run is None:
            return
        _resume_callbacks(trainer)
        self._warn(trainer, run)
        loader = trainer.train_dataloader
        # By its state our loader checks its data, and Lightning loads none at an epoch's end.
        if not trainer.fit_loop.restarting and isinstance(loader, ShardLoader) and self._loader_states:
            loader.load_state_dict(self._loader_states[0])
        if "place" not in run:
            return
        states = run["random"]
        restore(states[trainer.global_rank % len(states)], trainer.strategy.root_device)
        trainer.callback_metrics.update(run["metrics"])
        _restore_saves(trainer, run["saves"])
        if run["row"]:  # the metrics of a step are logged after its checkpoint is taken
            lightning_internals.log_metrics(trainer, run["row"])
        loops.resume(trainer, run["place"])
        if run["place"] != "epoch" and loops.is_at_last_step(trainer):
            self._beginning.enter_context(loops.raise_limits(trainer))  # until what follows that step has begun

    def _warn(self, trainer: pl.Trainer, run: dict[str, Any]) -> None:
        """Warn once for each way in which the resumed run differs from the one that was interrupted."""
        origin = f"resumed from {trainer.ckpt_path}"
        if not hasattr(trainer.train_dataloader, "state_dict"):
            kind = type(trainer.train_dataloader).__name__
            rank_zero_warn(
                f"{origin}: {kind} does not save its position (state_dict), so its samples may be repeated or left out"
            )
        if "random" not in run:
            rank_zero_warn(f"{origin}: it has no states of random generators, so dropout and the like will differ")
        elif len(run["random"]) != trainer.world_size:
            rank_zero_warn(
                f"{origin}: {len(run['random'])} processes trained it and here are {trainer.world_size}: every sample "
                "comes as it would have, random numbers (dropout) do not"
            )
        if "settings" in run and (lines := list(describe_changes(run["settings"], self._describe_settings(trainer)))):
            rank_zero_warn(f"{origin}: it continues with other settings than before: {list_few(lines, limit=NAMED)}")

    def _describe_settings(self, trainer: pl.Trainer) -> dict[str, str]:
        """Return what a run's numbers depend on, by name."""
        device = trainer.strategy.root_device
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        settings = flatten(self.settings) or {name: str(getattr(trainer, name)) for name in COMPARED}
        return settings | {
            "torch": str(torch.__version__),
            "lightning": pl.__version__,
            "device": f"{device.type} ({kind})",
            "threads (OMP_NUM_THREADS)": str(torch.get_num_threads()) if device.type == "cpu" else "any",
        }


def flatten(settings: Any, name: str = "") -> dict[str, str]:
    """Return nested settings as {"model.init_args.lr": "0.1"}, without those that make no difference."""
    if name.startswith(HARMLESS):
        return {}
    if not isinstance(settings, dict):
        return {name: str(settings)}
    parts = [flatten(value, f"{name}.{key}" if name else str(key)) for key, value in settings.items()]
    return {key: value for part in parts for key, value in part.items()}


def describe_changes(saved: dict[str, str], current: dict[str, str]) -> Iterator[str]:
    """Describe each setting that is not the same as when the checkpoint was saved."""
    for name in sorted(saved.keys() | current.keys()):
        before, now = saved.get(name, "not set"), current.get(name, "not set")
        if name == SEED and name not in saved:  # earlier versions did not save it
            continue
        if {before, now} == {"not set", "None"}:  # another version has the setting, and its default is none
            continue
        if _comparable(before) != _comparable(now):
            if len(before) + len(now) > LONG:
                before, now = _difference(before, now), _difference(now, before)
            yield f"{name} {now} (was {before}{', whose random numbers go on' if name == SEED else ''})"


def _difference(value: str, other: str) -> str:
    """Return what is in a list of settings and not in another."""
    others = set(other.split(", "))
    return ", ".join(part for part in value.split(", ") if part not in others) or "without"


def _comparable(value: str) -> str:
    """Return a setting with our classes by their names alone, and a whole number without its decimals.

    The module before a class may be written in several ways, and whether jsonargparse reads 3 as an integer or as a
    float follows from what else was imported. 1.0 stays, for Lightning takes it as a share where 1 is a number.
    """
    value = re.sub(r"\bdiffvision(?:\.\w+)*\.(\w+)", r"\1", value)
    return value if value == "1.0" else re.sub(r"\A(\d+)\.0\Z", r"\1", value)


def _resume_callbacks(trainer: pl.Trainer) -> None:
    """Update Lightning's callbacks that rely on an epoch's start, which a run resumed within an epoch skips."""
    for scheduler in find_callbacks(trainer, GradientAccumulationScheduler):
        trainer.accumulate_grad_batches = scheduler.get_accumulate_grad_batches(trainer.current_epoch)
    if find_callbacks(trainer, StochasticWeightAveraging):
        rank_zero_warn(f"resumed from {trainer.ckpt_path}: StochasticWeightAveraging does not resume exactly; EMA does")


def _restore_saves(trainer: pl.Trainer, saves: dict[str, dict[str, Any]]) -> None:
    """Restore what ModelCheckpoint saved last; otherwise it saves a step twice, or between the batches of one."""
    for callback in find_callbacks(trainer, ModelCheckpoint):
        kept = saves.get(callback.state_key, {})
        for name in kept.keys() & set(lightning_internals.SAVE_STATE):
            setattr(callback, name, kept[name])
        path = str(trainer.ckpt_path)
        if path in (callback.best_model_path, callback.last_model_path, *callback.best_k_models):
            lightning_internals.set_last_save(callback, trainer.global_step, path)


def names_of(optimizers: list[Any]) -> list[str]:
    """Return the names of the classes of optimizers or schedulers."""
    return [type(optimizer).__name__ for optimizer in optimizers]


def list_few(items: Any, joint: str = ", ", limit: int = 3) -> str:
    """Return the first few of many items as text, with the number of the others."""
    items = sorted(items) if isinstance(items, set) else list(items)
    return joint.join(items[:limit]) + (f"{joint}and {len(items) - limit} more" if len(items) > limit else "")
