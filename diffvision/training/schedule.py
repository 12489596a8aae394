"""The learning rate of each step: a linear warm-up, then a decay to the end of the run.

Its settings are `OptimizerSettings`, in `optim`.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim.lr_scheduler import LambdaLR

from diffvision.training.fault_tolerance.lightning_internals import find_callbacks, is_dry_run
from diffvision.training.optim import OptimizerSettings


class WarmupDecay(LambdaLR):
    """Linear warm-up to each group's learning rate, then cosine or linear decay to `end_lr`.

    The rate is a function of the step alone, which is the only state: a resumed run takes rates, decay, betas and eps
    from its configuration. `begin` sets the length once the trainer knows an epoch's number of batches;
    `estimated_stepping_batches` would create the loaders before their position is restored.

    Attributes:
        warmup: steps of the warm-up.
        total: steps of the run; None before `begin`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
        self.settings, self.warmup = settings, 0
        self.total: int | None = None
        self.configured = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        super().__init__(optimizer, self.factor)

    def begin(self, trainer: pl.Trainer) -> None:
        """Set the lengths of the run and of its warm-up; a trainer knows them from `on_train_start` on.

        Raises:
            ValueError: the run's length is not known.
        """
        self.total = total_steps(trainer)
        if self.total is None:
            raise ValueError(
                "trainer.max_steps must be set, or trainer.max_epochs for a loader with a length: the decay ends there"
            )
        self.warmup = 0 if is_dry_run(trainer) else warmup_steps(self.settings, epoch_steps(trainer), self.total)
        for group, configured, lr in zip(self.optimizer.param_groups, self.configured, self.get_lr(), strict=True):
            group.update(configured | {"lr": lr})
        self._last_lr = self.get_lr()

    def factor(self, step: int) -> float:
        """Return the learning rate at a step (counted from 0) as a fraction of the highest one."""
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

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each group at the current step."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]


def epoch_steps(trainer: pl.Trainer, epoch: int = 0) -> int | None:
    """Return the number of optimizer steps of an epoch; None if the loader has no length.

    It may differ between epochs, by GradientAccumulationScheduler.
    """
    every = trainer.accumulate_grad_batches
    for scheduler in find_callbacks(trainer, GradientAccumulationScheduler):
        every = scheduler.get_accumulate_grad_batches(epoch)
    batches = trainer.num_training_batches
    return math.ceil(batches / every) if math.isfinite(batches) else None


def total_steps(trainer: pl.Trainer) -> int | None:
    """Return the number of optimizer steps of a run; None if neither steps nor epochs limit it."""
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and epoch_steps(trainer) is not None:
        limits.append(sum(epoch_steps(trainer, number) or 0 for number in range(trainer.max_epochs)))
    return min(limits, default=None)


def warmup_steps(settings: OptimizerSettings, epoch: int | None, total: int) -> int:
    """Return the number of warm-up steps of a run: a tenth of `total` if the configured number is too large.

    A default is too large above half of the run, a configured number if it is not below `total`.

    Raises:
        ValueError: warmup_epochs is set, and the loader has no length.
    """
    if settings.warmup_steps is not None:
        steps = settings.warmup_steps
    elif settings.warmup_epochs is not None:
        if epoch is None and settings.warmup_epochs:
            raise ValueError("warmup_epochs needs a loader with a length: set warmup_steps")
        steps = round(settings.warmup_epochs * (epoch or 0))
    else:
        default = epoch if settings.default_warmup_steps is None else settings.default_warmup_steps
        return default if default is not None and 2 * default <= total else total // 10
    if steps >= total:
        rank_zero_info(f"warm-up shortened to {total // 10} steps, a tenth of the run: {steps} of {total} were set")
        return total // 10
    return steps
