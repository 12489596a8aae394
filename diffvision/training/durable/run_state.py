"""What every checkpoint keeps of a run beside its weights, and how the run goes on from it exactly."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

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
from diffvision.training.durable import loops
from diffvision.training.durable.checkpoints import RUN_KEY
from diffvision.training.durable.finite import gathered
from diffvision.training.durable.random_state import captured, put_back

# Of a configuration, what makes no difference to weights or samples.
HARMLESS = (
    "config",
    "ckpt_path",
    "resume",
    "verbose",
    "weights_only",
    "seed_everything",  # generators go on from where they were
    "trainer.logger",
    "trainer.default_root_dir",
    "trainer.enable_",
    "trainer.log_every_n_steps",
    "trainer.profiler",
    "trainer.devices",  # their number is compared as that of processes
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
NAMED = 8  # of settings that differ, as many are named
KEPT = (  # of a ModelCheckpoint, what it does not load with its own state
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "current_score",
)


class RunState(pl.Callback):
    """Keeps in every checkpoint what its own keys do not tell, and has a run that goes on from one go on exactly:

    every process's random generators, the metrics that callbacks watch, what ModelCheckpoint saved last, and the place
    between a step, its validation and the epoch's end. What cannot be the same is told, by the name of the setting.

    Attributes:
        path: the checkpoint that this process resumes from; None for a new run.
        saved: what of it tells of the run that wrote it, and its optimizers' states.
        settings: the configuration, as nested dictionaries of plain values.
    """

    path: str | None = None
    saved: dict[str, Any]

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.settings = settings or {}
        self._run: dict[str, Any] | None = None  # of the checkpoint that was loaded
        self._before_validation: tuple[Any, Any] | None = None  # generators, and the batches validated before
        self._told = False
        self._beginning = ExitStack()

    # --- saving ---

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        checkpoint[RUN_KEY] = {
            "world_size": trainer.world_size,
            "optimizers": names_of(trainer.optimizers),
            "schedulers": names_of([config.scheduler for config in trainer.lr_scheduler_configs]),
        }
        if trainer.state.fn != TrainerFn.FITTING:
            return
        unfinished = loops.unfinished(trainer)
        at = loops.place(trainer, validating=self._before_validation is not None)
        random = captured(trainer.strategy.root_device)
        if at == "validation" and self._before_validation is not None:
            random, checkpoint["loops"]["fit_loop"][loops.VALIDATED] = self._before_validation
        for logger in trainer.loggers:
            logger.save()  # what was logged is on disk when the run may begin from here again
        checkpoint[RUN_KEY] |= {
            "place": at,
            "unfinished": unfinished,
            "random": gathered(trainer, random),
            "metrics": {k: v.detach().cpu() for k, v in trainer.callback_metrics.items()},
            "saves": {c.state_key: {k: getattr(c, k) for k in KEPT} for c in _model_checkpoints(trainer)},
            "row": _row(trainer) if at == "step" else {},
            "settings": self._described(trainer),
        }
        if unfinished and not self._told:
            self._told = True
            rank_zero_warn(
                f"a checkpoint is taken {unfinished}: no run will be resumed from it, for its gradients are in no "
                "checkpoint. Let checkpoints and validation (val_check_interval) be a multiple of "
                f"accumulate_grad_batches ({trainer.accumulate_grad_batches}) apart"
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._beginning.close()
        if trainer.state.fn == TrainerFn.FITTING:
            progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress.state_dict()
            self._before_validation = captured(trainer.strategy.root_device), progress

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before_validation = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._beginning.close()

    # --- going on ---

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Each process looked for itself, before there was a group to ask: one that sees other files must not go on."""
        if stage != "fit" or trainer.world_size == 1:
            return
        first = trainer.strategy.broadcast(self.path)
        if not trainer.strategy.reduce_boolean_decision(first == self.path):
            raise RuntimeError(
                f"process {trainer.global_rank} resumes from {self.path}, the first one from {first}: "
                "all nodes must see the same directory of checkpoints"
            )

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Raises ValueError where the checkpoint cannot be gone on from; before data is read."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._run = run = checkpoint.get(RUN_KEY, {})
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it unannounced
        averages = any(isinstance(callback, WeightAveraging) for callback in callbacks)
        if "current_model_state" in checkpoint and not averages:
            raise ValueError(
                f"cannot resume from {trainer.ckpt_path}: its weights are averages (EMA) and this run has none: add "
                "the callback that it was trained with (diffvision.training.ema.EMA)"
            )
        if run.get("unfinished"):
            raise ValueError(f"cannot resume from {trainer.ckpt_path}: it was taken {run['unfinished']}")
        if "place" in run:
            loops.settle(checkpoint["loops"]["fit_loop"], run["place"])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raises ValueError where the optimizers are of other kinds than those whose states are to be loaded."""
        if self._run is not None and "place" in self._run:
            self._beginning.enter_context(loops.one_more(trainer))
        if self.path is None:
            return
        theirs, ours = self.saved.get("optimizers"), names_of(trainer.optimizers)
        there = {key for state in self.saved["optimizer_states"] for group in state["param_groups"] for key in group}
        here = {key for optimizer in trainer.optimizers for group in optimizer.param_groups for key in group}
        # Of a checkpoint without our record only the settings tell; a new version of torch may add to them.
        if theirs == ours or (not theirs and (there <= here or here <= there)):
            return
        differing = f"settings only there: {few(there - here) or 'none'}; only here: {few(here - there) or 'none'}"
        raise ValueError(
            f"cannot resume from {self.path}: its optimizer is {', '.join(theirs or ['another'])} and here it is "
            f"{', '.join(ours)} ({differing}): set the same optimizer, or start anew"
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After all that draws random numbers at a start, and before the first batch."""
        self._beginning.close()
        run, self._run = self._run, None
        if run is None:
            return
        _callbacks_go_on(trainer)
        self._tell(trainer, run)
        _same_data(trainer)
        if "place" not in run:
            return
        states = run["random"]
        put_back(states[trainer.global_rank % len(states)], trainer.strategy.root_device)
        trainer.callback_metrics.update(run["metrics"])
        _restore_saves(trainer, run["saves"])
        if run["row"]:
            trainer._logger_connector.log_metrics(run["row"])
        loops.go_on(trainer, run["place"])
        if run["place"] != "epoch" and loops.at_last_step(trainer):
            self._beginning.enter_context(loops.one_more(trainer))  # until what follows that step has begun

    def _tell(self, trainer: pl.Trainer, run: dict[str, Any]) -> None:
        """One line for each thing that makes the resumed run another than the one that was interrupted."""
        origin = f"resumed from {trainer.ckpt_path}"
        if not hasattr(trainer.train_dataloader, "state_dict"):
            kind = type(trainer.train_dataloader).__name__
            rank_zero_warn(f"{origin}: {kind} keeps no place (state_dict), so its samples may be repeated or left out")
        if "random" not in run:
            rank_zero_warn(f"{origin}: it keeps no random generators, so dropout and the like go another way")
        elif len(run["random"]) != trainer.world_size:
            rank_zero_warn(
                f"{origin}: {len(run['random'])} processes trained it and here are {trainer.world_size}: every sample "
                "comes as it would have, random numbers (dropout) do not"
            )
        if "settings" in run and (lines := list(_changed(run["settings"], self._described(trainer)))):
            rank_zero_warn(f"{origin}: it goes on with other settings than before: {few(lines, limit=NAMED)}")

    def _described(self, trainer: pl.Trainer) -> dict[str, str]:
        """What a run's numbers follow from, by name."""
        device = trainer.strategy.root_device
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        own = flattened(self.settings) or {name: str(getattr(trainer, name)) for name in COMPARED}
        return own | {
            "torch": str(torch.__version__),
            "lightning": pl.__version__,
            "device": f"{device.type} ({kind})",
            "threads (OMP_NUM_THREADS)": str(torch.get_num_threads()) if device.type == "cpu" else "any",
        }


def flattened(settings: Any, name: str = "") -> dict[str, str]:
    """Nested settings as {"model.init_args.lr": "0.1"}, without those that make no difference."""
    if name.startswith(HARMLESS):
        return {}
    if not isinstance(settings, dict):
        return {name: str(settings)}
    parts = [flattened(value, f"{name}.{key}" if name else str(key)) for key, value in settings.items()]
    return {key: value for part in parts for key, value in part.items()}


def _changed(theirs: dict[str, str], ours: dict[str, str]) -> Iterator[str]:
    for name in sorted(theirs.keys() | ours.keys()):
        there, here = theirs.get(name, "not set"), ours.get(name, "not set")
        if _short(there) != _short(here):
            yield f"{name} {here} (was {there})"


def _short(value: str) -> str:
    """A setting with our classes by their names alone: a class may be written with the module that exports it, or with
    the one that holds it."""
    return re.sub(r"\bdiffvision(?:\.\w+)*\.(\w+)", r"\1", value)


def _callbacks_go_on(trainer: pl.Trainer) -> None:
    """Lightning's that count on the epoch's start, which a run resumed within an epoch does not come by."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it unannounced
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
        if isinstance(callback, StochasticWeightAveraging):
            rank_zero_warn(
                f"resumed from {trainer.ckpt_path}: StochasticWeightAveraging does not go on exactly; EMA does"
            )


def _same_data(trainer: pl.Trainer) -> None:
    """Lightning loads no loader's state at an epoch's end; ours says with it whether it is of the same data."""
    loader = trainer.train_dataloader
    states = trainer.fit_loop._combined_loader_states_to_load
    if isinstance(loader, ShardLoader) and states:
        loader.load_state_dict(cast(Any, states[0]))


def _row(trainer: pl.Trainer) -> dict[str, float]:
    """What is logged of a step, which happens after its checkpoint is taken: the run that goes on logs it."""
    connector = trainer._logger_connector
    if not connector.should_update_logs or not trainer.loggers:
        return {}
    return {name: float(value) for name, value in connector.metrics["log"].items()}


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


def _restore_saves(trainer: pl.Trainer, saves: dict[str, dict[str, Any]]) -> None:
    """Without, ModelCheckpoint saves a step twice, or between the batches of one."""
    for callback in _model_checkpoints(trainer):
        kept = saves.get(callback.state_key, {})
        for name in kept.keys() & set(KEPT):
            setattr(callback, name, kept[name])
        path = str(trainer.ckpt_path)
        if path in (callback.best_model_path, callback.last_model_path, *callback.best_k_models):
            callback._last_global_step_saved, callback._last_checkpoint_saved = trainer.global_step, path


def names_of(optimizers: list[Any]) -> list[str]:
    return [type(optimizer).__name__ for optimizer in optimizers]


def few(items: Any, joint: str = ", ", limit: int = 3) -> str:
    """The first few of many, in words."""
    items = sorted(items) if isinstance(items, set) else list(items)
    return joint.join(items[:limit]) + (f"{joint}and {len(items) - limit} more" if len(items) > limit else "")
