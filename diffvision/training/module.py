"""What our LightningModules share: hyperparameters, learning rate, batches by name, sums of an evaluation.

What they train is in `clip`, `classification`, `language` and `vision_language`. A step, in order:

    loss             `training_step` of each module
    backward         Lightning's; under `accum_freq` it computes each chunk of `encode_chunks` again
    clip, skip       `StepGuard.on_before_optimizer_step`: a step that is not finite changes nothing, on all ranks
    step             the optimizer of `optim.create_optimizer`
    schedule         `schedule.WarmupDecay`
    average          `ema.EMA`, after the step

Which callbacks act in between is in `fault_tolerance.protection`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from diffvision.data.batches import named
from diffvision.evaluation.suite import EVALUATIONS
from diffvision.training.compilation import COMPILING_NOTICE
from diffvision.training.fault_tolerance import StepGuard, lightning_internals
from diffvision.training.optim import ADAMW, OptimizerSettings, create_optimizer, param_groups
from diffvision.training.progress import ProgressLine
from diffvision.training.schedule import WarmupDecay

HEADLINE = "headline"
"""A callback's monitor that stands for the first metric of the first evaluation, such as zero_shot/digits/acc1."""


class TrainingModule(lightning_internals.BatchHook, pl.LightningModule):
    """A LightningModule around a model of timm, OpenCLIP, transformers or this package.

    Its arguments are its hyperparameters, as plain values, so that `load_from_checkpoint(path)` needs no others.
    Batches reach its steps and the callbacks as dictionaries, whatever the loader yields.

    Attributes:
        settings: the optimizer and its schedule.
        sources: files, folders or tags of the initial weights; empty if they are randomly initialised.
    """

    batch_keys: ClassVar[tuple[str, ...]]  # in the order of a tuple
    required_keys: ClassVar[tuple[str, ...]]  # those without which a batch is refused
    adamw: ClassVar[dict[str, Any]] = ADAMW  # AdamW's betas and eps where they are not set
    model: Any
    sources: Sequence[str] = ()
    _is_read_at_every_step = False  # the numbers of a step, by a progress bar of Lightning's or by a monitor

    def __init__(self, arguments: Mapping[str, Any], default: OptimizerSettings) -> None:
        """Save the arguments as hyperparameters.

        Args:
            arguments: those of the subclass, by name; `locals()` will do.
            default: the optimizer's settings that `arguments["optimizer"]` leaves out, if it is a dictionary.
        """
        super().__init__()
        optimizer = arguments["optimizer"]
        settings = optimizer if isinstance(optimizer, OptimizerSettings) else replace(default, **optimizer)
        if settings.name == "adamw":
            settings = replace(settings, **{k: v for k, v in self.adamw.items() if getattr(settings, k) is None})
        self.settings = settings
        hyperparameters = {key: value for key, value in arguments.items() if key not in ("self", "__class__")}
        self.save_hyperparameters(hyperparameters | {"optimizer": tuples_to_lists(asdict(self.settings))})

    @property
    def attached_trainer(self) -> pl.Trainer | None:
        """The module's Trainer, or None."""
        with suppress(RuntimeError):
            return self.trainer
        return None

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trained parameters in groups, each with its weight decay."""
        return param_groups(self.model, self.settings)

    def configure_optimizers(self) -> Any:
        optimizer = create_optimizer(self.parameter_groups(), self.settings, self.trainer)
        scheduler = WarmupDecay(optimizer, self.settings)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Begin the schedule, whose length the trainer knows by now; a subclass with this hook calls super()'s."""
        callbacks = lightning_internals.find_callbacks(self.trainer, pl.Callback)
        self._is_read_at_every_step = any(
            (isinstance(callback, ProgressBar) and not isinstance(callback, ProgressLine))
            or str(getattr(callback, "monitor", "")).startswith("train/")
            for callback in callbacks
        )
        for config in self.trainer.lr_scheduler_configs:  # a subclass may have none
            if isinstance(config.scheduler, WarmupDecay):
                config.scheduler.begin(self.trainer)
        if self.hparams.get("compile"):
            rank_zero_info(COMPILING_NOTICE)

    def configure_callbacks(self) -> list[pl.Callback]:
        """Return a StepGuard for each fit, which replaces an earlier one; no other stage has one.

        It is the first hook, so it silences Lightning's advice, too.

        Raises:
            ValueError: a callback monitors a metric that validation will not log.
        """
        lightning_internals.ignore_advice(self.is_fitting)
        data = getattr(self.trainer, "datamodule", None)
        if self.is_fitting:
            self.set_monitors(lightning_internals.find_callbacks(self.trainer, pl.Callback), data)
        return [StepGuard(self.settings.clip_norm, self.settings.max_skipped)] if self.is_fitting else []

    def validation_metrics(self, data: Any) -> list[str] | None:
        """Return the names of the metrics that validation logs, the headline first; None for an unknown DataModule."""
        return None

    def set_monitors(self, callbacks: Sequence[Any], data: Any) -> None:
        """Replace the monitor "headline" by its metric; refuse monitors that validation will not log.

        Lightning would raise after the first epoch. Where nothing is evaluated, a ModelCheckpoint is only warned of.
        """
        metrics = self.validation_metrics(data)
        stages = {*EVALUATIONS}
        if all(type(part).__module__.partition(".")[0] in ("diffvision", "lightning") for part in (self, *callbacks)):
            stages.add("val")  # which others may log to
        for callback in callbacks:
            parts = str(getattr(callback, "monitor", None) or "").split("/")
            if metrics == [] and isinstance(callback, ModelCheckpoint) and parts[0] in (HEADLINE, *stages):
                rank_zero_warn(f"ModelCheckpoint saves nothing: no evaluation gives {callback.monitor}")
            elif parts == [HEADLINE] and metrics:
                callback.monitor = metrics[0]
                mode = "min" if metrics[0].endswith("loss") else "max"
                if callback.mode != mode:
                    raise ValueError(
                        f"{type(callback).__name__}.mode must be {mode} for {metrics[0]}, got {callback.mode}"
                    )
            # Each kind of sample has metrics besides, such as composition/digits/acc/swapped.
            elif parts == [HEADLINE] or (
                metrics is not None and parts[0] in stages and "/".join(parts[:3]) not in metrics
            ):
                known = f"such as {metrics[0]}" if metrics else "that is logged, and the data has no evaluation"
                name = type(callback).__name__
                raise ValueError(f"{name}.monitor must be a metric {known}, got {'/'.join(parts)}")

    def prepare_batch(self, batch: Any) -> Any:
        """Return a loader's batch as a dictionary; raise ValueError if a required key is missing."""
        batch = named(batch, self.batch_keys)
        if missing := [key for key in self.required_keys if key not in batch]:
            raise ValueError(
                f"a batch must have {', '.join(missing)}, got only {', '.join(batch)}: give {type(self).__name__} a "
                f"dictionary with {', '.join(self.batch_keys)}, or a tuple of these"
            )
        return batch

    def begin_sums(self, size: int) -> None:
        """Set `size` sums to 0 for each loader of the evaluation."""
        self._sums = torch.zeros(len(self.trainer.num_val_batches), size, dtype=torch.float64, device=self.device)

    def add_sums(self, loader: int, *sums: Tensor | float) -> None:
        """Add the sums of a batch."""
        self._sums[loader] += torch.stack([torch.as_tensor(s, dtype=torch.float64, device=self.device) for s in sums])

    def reduce_sums(self) -> Iterator[tuple[str, list[float]]]:
        """Yield for each loader the suffix of its metrics' names, and its sums over all ranks.

        Means are taken after the reduction, because ranks may have different numbers of samples.
        """
        rows = self.trainer.strategy.reduce(self._sums, reduce_op="sum").tolist()
        for index, row in enumerate(rows):
            yield f"/dataloader_idx_{index}" if len(rows) > 1 else "", row

    def sum_if_logged(self, sums: Tensor) -> Tensor:
        """Sum values over ranks in place if they are logged on this step; otherwise return this rank's."""
        trainer = self.trainer
        if self._is_read_at_every_step or lightning_internals.is_synced_step(trainer, trainer.global_step + 1):
            self.sum_over_ranks(sums)
        return sums

    def mean_if_logged(self, value: Tensor) -> Tensor:
        """Return the mean of a value over ranks if it is logged on this step, otherwise this rank's value."""
        total, ranks = self.sum_if_logged(torch.stack([value, torch.ones_like(value)]))
        return total / ranks

    def sum_over_ranks(self, sums: Tensor) -> None:
        """Sum over ranks in place, without the barrier of a strategy's `reduce`, which synchronises the device."""
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(sums)

    def log_step(self, **values: Tensor) -> None:
        """Log the highest learning rate, and values that stay on the device, without synchronising.

        Lightning reads values logged with `prog_bar` at every step, so they are logged without it for `ProgressLine`,
        which takes them from the logs.
        """
        rate = max(group["lr"] for group in self.trainer.optimizers[0].param_groups)
        self.log("train/lr", torch.tensor(rate), prog_bar=True)
        read = not isinstance(self.trainer.progress_bar_callback, ProgressLine)
        for name, value in values.items():
            self.log(f"train/{name}", value, prog_bar=read)

    def log_means(self, values: dict[str, float], prog_bar: bool = True) -> None:
        """Log values that are equal on all ranks and whose names already include the loader."""
        self.log_dict(values, prog_bar=prog_bar, sync_dist=True, add_dataloader_idx=False)

    @property
    def is_fitting(self) -> bool:
        """Whether the trainer fits, rather than validates or tests."""
        return self.trainer.state.fn == TrainerFn.FITTING

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint is of another model. `fit` calls this before reading data."""
        raise NotImplementedError

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the architecture before the weights are loaded."""
        self.check_checkpoint(checkpoint)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what rebuilds the model, with hyperparameters that refer to no other file of weights."""
        if (trainer := self.attached_trainer) is not None:
            for guard in lightning_internals.find_callbacks(trainer, StepGuard):
                guard.report_skipped()  # also where only weights are saved, without the callbacks' states
        checkpoint["diffvision"] = self.describe()
        checkpoint["hyper_parameters"] = dict(self.hparams) | self.arguments_without_weights()

    def describe(self) -> dict[str, Any]:
        """Return plain values from which the model can be rebuilt."""
        raise NotImplementedError

    def arguments_without_weights(self) -> dict[str, Any]:
        """Return the arguments that a checkpoint stores instead of those that load initial weights."""
        raise NotImplementedError


def tuples_to_lists(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with lists in place of tuples, as checkpoints hold them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def mark_batch_dynamic(batch: Tensor) -> Tensor:
    """Mark a batch so that a compiled model makes one graph for all batch sizes, and return it.

    It is for validation, whose last batch is smaller. In training a graph of one size is faster.
    """
    torch._dynamo.maybe_mark_dynamic(batch, 0)
    return batch
