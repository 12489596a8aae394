"""The learning rate of each step: a linear warm-up, then a decay to the end of the run.

Its settings are `OptimizerSettings`, in `optim`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from diffvision.training.fault_tolerance.lightning_internals import find_callbacks, is_dry_run
from diffvision.training.optim import OptimizerSettings


class WarmupDecay(torch.optim.lr_scheduler.LRScheduler):
    """Linear warm-up to each group's rate, then a cosine or a line to `end_lr`: a pure function of the step.

    `begin` sets its length once the trainer knows how many batches an epoch has. Its state is the step and the warm-up,
    which a longer or shorter resumed run keeps unless another one is set. `begin` also restores the rates, decay, betas
    and eps of the configuration, which a loaded optimizer's state replaces by those of the earlier run.

    Args:
        optimizer: its groups' rates are the highest ones.
        settings: rates and decay.
        max_steps: the trainer's; -1 for no limit.
        max_epochs: the trainer's; None or -1 for no limit.

    Attributes:
        warmup: steps of the warm-up.
        total: steps of the run; None before `begin`.
        configured_warmup: steps of the warm-up before it was shortened to fit the run; None: they are not known.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, max_steps: int, max_epochs: int | None
    ) -> None:
        self.settings, self.warmup = settings, 0
        self._limits = max_steps, max_epochs
        self.total: int | None = None
        self.configured_warmup: int | None = None
        self._loaded: dict[str, Any] = {}
        self.configured = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        super().__init__(optimizer)

    def begin(self, trainer: pl.Trainer) -> None:
        """Set the lengths of the run and of its warm-up; a trainer knows them from `on_train_start` on.

        In a `fast_dev_run` there is no warm-up, because such a run is shorter than any.

        Raises:
            ValueError: the run's length is not known.
        """
        epoch, self.total = epoch_steps(trainer, 0), run_steps(trainer, *self._limits)
        if self.total is None:
            raise ValueError(
                "the decay needs the run's length: set trainer.max_steps, or trainer.max_epochs where the loader has a "
                "length"
            )
        if is_dry_run(trainer):
            self.warmup, self.configured_warmup = 0, None
        else:
            self.configured_warmup = configured_warmup(self.settings, epoch)
            self.warmup = fitting_warmup(self.settings, self.configured_warmup, self.total)
        saved = self._loaded.get("warmup", self.warmup)  # earlier versions did not save it
        if saved != self.warmup and self._loaded["configured_warmup"] == self.configured_warmup:
            rank_zero_info(f"the warm-up stays at {saved} steps, with which this run began")
            self.warmup = saved
        for group, configured, lr in zip(self.optimizer.param_groups, self.configured, self.get_lr(), strict=True):
            group.update(configured, lr=lr)
        self._last_lr = self.get_lr()

    def factor(self, step: int) -> float:
        """Return the learning rate of a step (from 0) over the highest one."""
        if self.total is None:
            if step == 0:
                return 1.0
            raise RuntimeError("the schedule has no length: call super().on_train_start() in your module's")
        start, end = self.settings.start_lr / self.settings.lr, self.settings.end_lr / self.settings.lr
        if step < self.warmup:
            return start + (1 - start) * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        left = 1 - done if self.settings.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return end + (1 - end) * left

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group at the current step."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def set_lr(self, lr: float) -> None:
        """Make `lr` the highest learning rate from the next step on; a group keeps its share of it."""
        scale, self.settings = lr / self.settings.lr, replace(self.settings, lr=lr)
        self.base_lrs = [base * scale for base in self.base_lrs]
        for group in self.configured:
            group["lr"] *= scale

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the warm-up; the keys are in files, so never rename them."""
        return {"last_epoch": self.last_epoch, "warmup": self.warmup, "configured_warmup": self.configured_warmup}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step, and let `begin` restore the warm-up if the same one is configured."""
        self.last_epoch, self._loaded = state_dict["last_epoch"], state_dict
        self.warmup = state_dict.get("warmup", self.warmup)
        self.configured_warmup = state_dict.get("configured_warmup")


def epoch_steps(trainer: pl.Trainer, epoch: int) -> int | None:
    """Return the optimizer steps of an epoch; None where the loader does not know its length.

    GradientAccumulationScheduler changes them from epoch to epoch.
    """
    every = trainer.accumulate_grad_batches
    for scheduler in find_callbacks(trainer, GradientAccumulationScheduler):
        every = scheduler.get_accumulate_grad_batches(epoch)
    batches = trainer.num_training_batches
    return math.ceil(batches / every) if math.isfinite(batches) else None


def run_steps(trainer: pl.Trainer, max_steps: int, max_epochs: int | None) -> int | None:
    """Return the optimizer steps of a run, in all its processes; None where neither steps nor epochs limit them."""
    limits = [max_steps] if max_steps >= 0 else []
    if max_epochs is not None and max_epochs > 0 and epoch_steps(trainer, 0) is not None:
        limits.append(sum(epoch_steps(trainer, number) or 0 for number in range(max_epochs)))
    return min(limits, default=None)


def configured_warmup(settings: OptimizerSettings, epoch: int | None) -> int | None:
    """Return the steps of the warm-up that the settings ask for; None for a default of an epoch of unknown length.

    Args:
        settings: the optimizer's.
        epoch: steps of an epoch; None if they are not known.

    Raises:
        ValueError: warmup_epochs is set, and an epoch's steps are not known.
    """
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    if settings.warmup_epochs is None:
        return epoch if settings.default_warmup_steps is None else settings.default_warmup_steps
    if epoch is None and settings.warmup_epochs:
        raise ValueError("warmup_epochs needs a loader with a length to know an epoch's steps; set warmup_steps")
    return round(settings.warmup_epochs * (epoch or 0))


def fitting_warmup(settings: OptimizerSettings, configured: int | None, total: int) -> int:
    """Return the steps of the warm-up in a run of `total` steps: a tenth of them where the configured one is too long.

    The default is too long if it is more than half of the run; one that was set, if it is not shorter than the run.
    """
    is_set = settings.warmup_steps is not None or settings.warmup_epochs is not None
    if configured is not None and (configured < total if is_set else 2 * configured <= total):
        return configured
    if is_set:
        name = "warmup_epochs" if settings.warmup_steps is None else "warmup_steps"
        rank_zero_info(
            f"warm-up shortened to {total // 10} steps, a tenth of the run: {configured} of {total} steps were set "
            f"(model.optimizer.{name})"
        )
    return total // 10
