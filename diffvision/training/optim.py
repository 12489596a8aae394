"""AdamW, its settings and its parameter groups.

The learning rate's schedule is in `schedule`; clipping and skipped steps are in `fault_tolerance`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from diffvision.moved import get_renamed

FUSED = ("cpu", "cuda")
"""Devices for which AdamW is one fused kernel."""
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
            raise ValueError(f"optimizer.max_skipped is {self.max_skipped}: give the number of steps, 0 or more")
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
        raise ValueError("no parameter is trainable, as every tower is locked: unlock one")
    groups = [{"params": no_decay, "weight_decay": 0.0}, {"params": with_decay, "weight_decay": weight_decay}]
    return [group for group in groups if group["params"]]


def adamw(
    groups: list[dict[str, Any]], settings: OptimizerSettings, trainer: pl.Trainer | None = None
) -> torch.optim.AdamW:
    """Return AdamW over `groups`; a group's `lr_scale` (timm's layer decay) multiplies its learning rate.

    It is torch's fused kernel, in one pass instead of one for each term of the formula, which also skips a step that
    is not finite without a wait for the device. With a gradient scaler (16-mixed) or Trainer's gradient_clip_val it is
    not used: it would unscale the gradients itself, after their norm was clipped and logged.
    """
    for group in groups:
        group["lr"] = settings.lr * group.get("lr_scale", 1.0)
    parameters = [parameter for group in groups for parameter in group["params"]]
    unscaled = trainer is None or not (getattr(trainer.precision_plugin, "scaler", None) or trainer.gradient_clip_val)
    fused = (unscaled and all(p.device.type in FUSED for p in parameters)) or None
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


if not TYPE_CHECKING:
    __getattr__ = get_renamed(__name__)
