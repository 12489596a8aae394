"""AdamW, its parameter groups and the learning-rate schedule.

Clipping and skipped steps are in `fault_tolerance`, whose StepGuard reads the settings of this module.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from diffvision.training.fault_tolerance import lightning_internals

Decay = Literal["cosine", "linear"]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of AdamW with a linear warm-up and then a decay, both stepwise.

    Attributes:
        lr: the highest learning rate, reached at the end of the warm-up.
        weight_decay: for matrices only: see `param_groups`.
        betas: AdamW's.
        eps: AdamW's.
        warmup_epochs: length of the warm-up; fractions are allowed. One that is not shorter than the run is shortened
            to a tenth of the run.
        warmup_steps: the same in optimizer steps; it wins over warmup_epochs.
        default_warmup_steps: the warm-up if neither of the two is set; None: one epoch. If that is more than half of
            the run, the warm-up is a tenth of the run.
        start_lr: where the warm-up starts from.
        end_lr: where the decay ends.
        decay: "cosine", or "linear" as the DIFF Transformer's.
        clip_norm: the gradient's norm is clipped to this; None: no clipping.
        max_skipped: steps in a row that are skipped because their loss or gradient is not finite; the next one stops
            the run, 0 stops it at the first.
    """

    lr: float = 5e-4
    weight_decay: float = 0.2
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    warmup_epochs: float | None = None
    warmup_steps: int | None = None
    default_warmup_steps: int | None = None
    start_lr: float = 0.0
    end_lr: float = 0.0
    decay: Decay = "cosine"
    clip_norm: float | None = None
    max_skipped: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # a configuration or a checkpoint has a list
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr is {self.lr}; it must be above 0")
        for name in ("warmup_steps", "warmup_epochs", "default_warmup_steps"):
            if (warmup := getattr(self, name)) is not None and warmup < 0:
                raise ValueError(f"optimizer.{name} is {warmup}; it must be 0 or more, or null for the default")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"optimizer.clip_norm is {self.clip_norm}; it must be above 0, or null for no clipping")
        if self.max_skipped < 0:
            raise ValueError(f"optimizer.max_skipped is {self.max_skipped}; it counts steps: 0 or more")
        if self.decay not in get_args(Decay):
            raise ValueError(f"optimizer.decay is {self.decay!r}; it must be one of {', '.join(get_args(Decay))}")


def without_decay(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is excluded from weight decay.

    That is anything 1-D or scalar (norms, biases, logit scale, V1's lambda vectors) and V2's lambda projection.
    Embeddings decay, as in OpenCLIP and SLIP.
    """
    return parameter.ndim < 2 or "lambda" in name or name.endswith("bias")


def param_groups(model: nn.Module, weight_decay: float, undecayed: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups, without and with decay; `undecayed` names more without."""
    with_decay: list[Tensor] = []
    no_decay: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (no_decay if name in undecayed or without_decay(name, parameter) else with_decay).append(parameter)
    if not with_decay and not no_decay:
        raise ValueError("no parameter is trainable: every tower is locked")
    groups = [{"params": no_decay, "weight_decay": 0.0}, {"params": with_decay, "weight_decay": weight_decay}]
    return [group for group in groups if group["params"]]


class WarmupDecay(torch.optim.lr_scheduler.LRScheduler):
    """Linear warm-up to each group's rate, then a cosine or a line to `end_lr`: a pure function of the step.

    Its state is the step and the warm-up, which a longer or shorter resumed run keeps unless another one is set.
    Loading a checkpoint restores the rates, decay, betas and eps of the configuration, which the optimizer's state
    would silently replace by those of the earlier run.

    Args:
        optimizer: its groups' rates are the highest ones.
        settings: rates and decay.
        warmup: steps of the warm-up.
        total: steps of the run.
        configured_warmup: steps of the warm-up before it was shortened to fit the run; None: they are not known.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: OptimizerSettings,
        warmup: int,
        total: int,
        configured_warmup: int | None = None,
    ) -> None:
        self.settings, self.warmup, self.total = settings, warmup, total
        self.configured_warmup = configured_warmup
        self.configured = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        """Return the learning rate of a step (from 0) over the highest one."""
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
        """Restore the step, and the warm-up if the same one is configured; everything else stays as configured."""
        self.last_epoch = state_dict["last_epoch"]
        kept = state_dict.get("warmup", self.warmup)  # earlier versions did not save it
        if kept != self.warmup and state_dict["configured_warmup"] == self.configured_warmup:
            rank_zero_info(f"the warm-up stays at {kept} steps, with which this run began")
            self.warmup = kept
        for group, configured, lr in zip(self.optimizer.param_groups, self.configured, self.get_lr(), strict=True):
            group.update(configured, lr=lr)
        self._last_lr = self.get_lr()


def batches_per_epoch(trainer: pl.Trainer) -> int | None:
    """Return the batches that each rank takes from its loader in an epoch; None if the loader has no length.

    `trainer.estimated_stepping_batches` sets the loader up before its state is restored, so that Lightning drops the
    state on resume. Here the loader is made once more, and divided over ranks as Lightning will divide it.
    """
    loaders, mode = lightning_internals.training_loaders(trainer)
    lengths = [sized_len(loader) for loader in loaders]
    known = [length for length in lengths if length is not None]
    if not known or len(known) < len(lengths):
        return None
    batches, limit = min(known) if mode == "min_size" else max(known), trainer.limit_train_batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def steps_of(trainer: pl.Trainer, batches: int, epoch: int) -> int:
    """Return the optimizer steps of an epoch's batches; GradientAccumulationScheduler changes them by the epoch."""
    every = trainer.accumulate_grad_batches
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning does not declare it
        if isinstance(callback, GradientAccumulationScheduler):
            every = callback.get_accumulate_grad_batches(epoch)
    return math.ceil(batches / every)


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


def schedule(optimizer: torch.optim.Optimizer, settings: OptimizerSettings, trainer: pl.Trainer) -> WarmupDecay:
    """Return the schedule of a run as long as the trainer's max_steps or max_epochs and its loader's length say.

    In a `fast_dev_run` there is no warm-up, because such a run is shorter than any.
    """
    batches, epochs = batches_per_epoch(trainer), trainer.max_epochs
    epoch = None if batches is None else steps_of(trainer, batches, 0)
    lengths = [trainer.max_steps] if trainer.max_steps > 0 else []
    if epochs is not None and epochs > 0 and batches is not None:
        lengths.append(sum(steps_of(trainer, batches, number) for number in range(epochs)))
    if not lengths:
        raise ValueError(
            f"the decay needs the run's length: max_steps is {trainer.max_steps}, max_epochs {epochs} and "
            f"an epoch's steps are {epoch}; set trainer.max_steps, or trainer.max_epochs where the loader has a length"
        )
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning does not declare it
        return WarmupDecay(optimizer, settings, 0, min(lengths))
    total, configured = min(lengths), configured_warmup(settings, epoch)
    return WarmupDecay(optimizer, settings, fitting_warmup(settings, configured, total), total, configured)


def adamw(
    groups: list[dict[str, Any]], settings: OptimizerSettings, trainer: pl.Trainer | None = None
) -> torch.optim.AdamW:
    """Return AdamW over `groups`; a group's `lr_scale` (timm's layer decay) multiplies its learning rate.

    Parameters on a CPU are updated by torch's fused kernel, in one pass instead of one for each term of the formula.
    Elsewhere, and for sharded parameters, torch chooses. With a gradient scaler (16-mixed) it is not used: it would
    unscale the gradients itself, after their norm was clipped and logged.
    """
    for group in groups:
        group["lr"] = settings.lr * group.get("lr_scale", 1.0)
    parameters = [parameter for group in groups for parameter in group["params"]]
    scaled = trainer is not None and getattr(trainer.precision_plugin, "scaler", None) is not None
    fused = (not scaled and all(type(p) is nn.Parameter and p.device.type == "cpu" for p in parameters)) or None
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)
