"""Steps whose loss or gradient is not finite are skipped and reported; after too many in a row the run stops."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diffvision.training.fault_tolerance import lightning_internals

MAX_UNREAD = 1000  # steps after which they are read even if nothing is logged
LEAST_SCALE = 1.0  # below this gradient scale an overflow means infinite gradients
MAX_SAMPLES = 8  # number of a skipped step's samples in a warning


class Step(NamedTuple):
    """An optimizer step whose gradient was computed; its tensors are on the device until they are read.

    Attributes:
        number: index of the step, from 0.
        epoch: index of its epoch.
        batches: indices of its batches in the epoch.
        norm: norm of the gradient.
        losses: loss of each backward pass on this rank.
    """

    number: int
    epoch: int
    batches: list[int]
    norm: Tensor
    losses: list[Tensor]


class StepGuard(pl.Callback):
    """Clips the gradient before each step and logs its norm; a step whose loss or gradient is not finite is skipped.

    A loss that is not finite makes its rank's gradients NaN, so after the strategy's reduction all ranks decide alike
    without communication. A skipped step changes neither weights nor moments. The trainer's step and the schedule
    advance, `train/skipped_steps` is incremented, and a warning gives the step's position in the data.

    The decision is made on the device; optimizers that take `found_inf` (torch's fused ones) then skip the step. The
    decisions are read, counted and reported on logging steps, at checkpoints and at the end, so other steps do not
    synchronise. On a CPU, and with other optimizers, they are read at every step.

    A gradient scaler (16-mixed) skips overflows while it searches its scale; these count only if a loss was not finite
    or the scale has fallen below 1.

    Attributes:
        skipped: number of skipped steps in this run, including before it was resumed.
        in_a_row: number of steps skipped since the last one that was not.
    """

    def __init__(self, clip_norm: float | None = None, max_skipped: int = 10) -> None:
        """Set the limits.

        Args:
            clip_norm: limit to which the gradient's norm is clipped; None: no clipping.
            max_skipped: limit on consecutive skipped steps; one more stops the run.
        """
        self.clip_norm, self.max_skipped = clip_norm, max_skipped
        self.skipped = self.in_a_row = 0
        self._losses: list[Tensor] = []  # of the current step: one for each backward pass
        self._batches: list[int] = []
        self._unread: list[Step] = []
        self._trainer: pl.Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, after reading and reporting all steps so far."""
        self.report_skipped()
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = state_dict["skipped"], state_dict["in_a_row"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer, self._unread = trainer, []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the batch, to report it if its step is skipped."""
        self._batches.append(batch_idx)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Record the loss; if it is not finite, make its gradients NaN, for all ranks to see."""
        self._losses.append(loss.detach())
        spread_nan(loss)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Clip the gradient, or skip the step.

        Raises:
            FloatingPointError: on all ranks, if more than `max_skipped` consecutive steps are not finite.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # each rank holds a part of it
        finite = norm.isfinite()
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
        place = trainer.global_step, trainer.current_epoch, self._batches
        self._unread.append(Step(*place, norm.detach(), self._losses))
        self._losses, self._batches = [], []
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if skips := scaler is None and lightning_internals.takes_found_inf(optimizer):
            optimizer.found_inf = 1 - finite.float()  # type: ignore[attr-defined]  # as a gradient scaler does
        may_wait = lightning_internals.may_wait_for_device(trainer, trainer.global_step + 1)
        if not skips or may_wait or len(self._unread) >= MAX_UNREAD:
            skipped = self.skipped
            self.report_skipped()
            if not skips and self.skipped > skipped:
                for parameter in parameters:
                    parameter.grad = None  # the optimizer skips what has no gradient: no decay, no moments
                restore_settings_after_step(optimizer)
        pl_module.log("train/grad_norm", norm)
        pl_module.log("train/skipped_steps", torch.tensor(float(self.skipped)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.report_skipped()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the optimizers' attributes."""
        for optimizer in trainer.optimizers:
            vars(optimizer).pop("found_inf", None)
        self._trainer, self._unread = None, []

    def report_skipped(self) -> None:
        """Read from the device which steps were finite, and report the others. All ranks must call it.

        Raises:
            FloatingPointError: on all ranks, if more than `max_skipped` consecutive steps were not finite.
        """
        steps, self._unread = self._unread, []
        if not steps or self._trainer is None:
            return
        for step, norm in zip(steps, torch.stack([step.norm for step in steps]).tolist(), strict=True):
            if math.isfinite(norm):
                self.in_a_row = 0
            elif not is_overflow(self._trainer, step):
                self._report(self._trainer, step, norm)

    def _report(self, trainer: pl.Trainer, step: Step, norm: float) -> None:
        """Count and report a skipped step; raise FloatingPointError if it exceeds `max_skipped`."""
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        place = f"step {step.number} (epoch {step.epoch}, batches {', '.join(map(str, step.batches))})"
        text = f"the gradient's norm is {norm} at {place}: it is skipped ({self.in_a_row} in a row)"
        names = getattr(trainer.train_dataloader, "names", None)
        if trainer.is_global_zero and names is not None:
            samples = [name for batch in step.batches for name in names(step.epoch, batch)]
            more = f" and {len(samples) - MAX_SAMPLES} more" if len(samples) > MAX_SAMPLES else ""
            text += f"; samples: {', '.join(samples[:MAX_SAMPLES])}{more}"
        rank_zero_warn(text)
        if self.in_a_row > self.max_skipped:
            raise FloatingPointError(
                f"steps {step.number + 1 - self.in_a_row} to {step.number} were not finite, over "
                f"optimizer.max_skipped={self.max_skipped}: lower optimizer.lr, set optimizer.clip_norm, train in "
                "bf16-mixed or 32-true, or look for damaged data"
            )


def is_overflow(trainer: pl.Trainer, step: Step) -> bool:
    """Return whether a gradient is infinite only because a gradient scaler (16-mixed) is searching its scale."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or scaler.get_scale() < LEAST_SCALE:
        return False
    return all(gather_from_ranks(trainer, all(bool(loss.isfinite().all()) for loss in step.losses)))


def restore_settings_after_step(optimizer: torch.optim.Optimizer) -> None:
    """Undo changes that the next (skipped) step makes to group settings: timm's Adan and LAMB count steps there."""
    settings = [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in optimizer.param_groups
    ]

    def restore(*args: Any) -> None:
        handle.remove()
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.clear()
            group.update(before)

    handle = optimizer.register_step_post_hook(restore)


def spread_nan(loss: Tensor) -> None:
    """Make all gradients of a loss NaN if it is not finite, so that every rank sees it after the reduction.

    Such gradients may be finite otherwise. Those of a finite loss are multiplied by one, which changes no bit. It does
    not synchronise.
    """
    if loss.requires_grad:
        factor = torch.where(loss.detach().isfinite(), 1.0, math.nan).to(loss.dtype)
        loss.register_hook(lambda gradient: gradient * factor)


def gather_from_ranks(trainer: pl.Trainer, value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of ranks."""
    if trainer.world_size == 1:
        return [value]
    values = [None] * trainer.world_size
    torch.distributed.all_gather_object(values, value)
    return values
