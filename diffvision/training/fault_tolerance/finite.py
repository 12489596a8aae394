"""Steps whose loss or gradient is not finite are skipped and reported; after too many in a row the run stops."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.fault_tolerance.checkpoints import open_for_writing

FILE = "skipped_steps.jsonl"
UNREAD = 1000  # steps after which they are read even where nothing is logged
LEAST_SCALE = 1.0  # below it a gradient scaler has no overflow left to avoid: the gradients themselves are infinite
REMEDIES = "lower optimizer.lr, set optimizer.clip_norm, train in bf16-mixed or 32-true, or look for damaged data"


@dataclass
class Step:
    """An optimizer step whose gradient was computed; its tensors are on the device until they are read.

    Attributes:
        number: of steps before it.
        epoch: of its batches.
        batches: their numbers in the epoch.
        norm: of the gradient.
        losses: one for each backward pass on this rank.
    """

    number: int
    epoch: int
    batches: list[int]
    norm: Tensor
    losses: list[Tensor]


class StepGuard(pl.Callback):
    """Clips the gradient before each step and logs its norm; a step whose loss or gradient is not finite is skipped.

    All ranks decide alike without a message between them: the gradients are those after the strategy's reduction, into
    which a rank whose loss is not finite has put NaN. A skipped step changes no weight, moment or running statistic.
    The trainer's step and the schedule advance; a line in `skipped_steps.jsonl` next to the logs names its batches and
    samples, and `train/skipped_steps` counts. Only the first process writes.

    The device decides, and an optimizer that takes `found_inf` (torch's fused ones) skips by itself. What it decided
    is read, counted and reported on logging steps, at each checkpoint and at the end, so no step between them waits
    for the device. On a CPU, where reading costs nothing, that is at every step. Another optimizer is waited for at
    every step.

    A gradient scaler (16-mixed) skips overflows by itself while it searches its scale: they count only where a loss
    was not finite, or the scale has fallen below 1.

    Attributes:
        skipped: steps that were skipped in this run, also before it was resumed.
        in_a_row: steps that were skipped since the last step that was made.
        of_module: whether a TrainingModule made it, for one fit.
    """

    of_module = False

    def __init__(self, clip_norm: float | None = None, max_skipped: int = 10) -> None:
        """Set the limits.

        Args:
            clip_norm: the gradient's norm is clipped to this; None: no clipping.
            max_skipped: limit on skipped steps in a row; one more stops the run. 0 stops it at the first.
        """
        self.clip_norm, self.max_skipped = clip_norm, max_skipped
        self.skipped = self.in_a_row = 0
        self._losses: list[Tensor] = []  # of the current step: one for each backward pass
        self._batches: list[int] = []
        self._unread: list[Step] = []
        self._trainer: pl.Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, of all steps so far: a checkpoint holds no step that is not reported."""
        self.read()
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = state_dict["skipped"], state_dict["in_a_row"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer, self._unread = trainer, []
        self._file = Path(trainer.log_dir or trainer.default_root_dir, FILE)  # all ranks ask together: a broadcast
        self._statistics = Statistics(pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the batch, to report it if its step is skipped."""
        self._batches.append(batch_idx)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Note the loss, and let one that is not finite spread to all ranks."""
        self._losses.append(loss.detach())
        spread_nan(loss)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Clip the gradient, or skip the step.

        Raises:
            FloatingPointError: on all ranks, where more than `max_skipped` steps in a row are not finite.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = gradient_norm(parameters)
        finite = norm.isfinite()
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
        self._statistics.keep_or_restore(finite)
        place = trainer.global_step, trainer.current_epoch, self._batches
        self._unread.append(Step(*place, norm.detach(), self._losses))
        self._losses, self._batches = [], []
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if skips := scaler is None and lightning_internals.takes_found_inf(optimizer):
            optimizer.found_inf = 1 - finite.float()  # type: ignore[attr-defined]  # as a gradient scaler does
        if not skips or lightning_internals.may_read(trainer, trainer.global_step + 1) or len(self._unread) >= UNREAD:
            skipped = self.skipped
            self.read()
            if not skips and self.skipped > skipped:
                for parameter in parameters:
                    parameter.grad = None  # the optimizer skips what has no gradient: no decay, no moments
                keep_settings(optimizer)
        pl_module.log("train/grad_norm", norm)
        pl_module.log("train/skipped_steps", torch.tensor(float(self.skipped)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.read()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Report the skipped steps that were not read yet, without the other ranks, which may be gone."""
        with suppress(FloatingPointError, RuntimeError):  # the device may be what failed
            self.read(alone=True)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave optimizers as they were."""
        for optimizer in trainer.optimizers:
            vars(optimizer).pop("found_inf", None)
        self._trainer, self._unread = None, []

    def read(self, alone: bool = False) -> None:
        """Read from the device which steps were finite, and report the others; all ranks call it together.

        Args:
            alone: whether only this rank does.

        Raises:
            FloatingPointError: on all ranks, where more than `max_skipped` steps in a row were not finite.
        """
        steps, self._unread = self._unread, []
        error: FloatingPointError | None = None
        if not steps or self._trainer is None:
            return
        for step, norm in zip(steps, torch.stack([step.norm for step in steps]).tolist(), strict=True):
            if not math.isfinite(norm):
                error = self._report(self._trainer, step, norm, alone) or error
            elif error is None:
                self.in_a_row = 0
        if error is not None:
            raise error

    def _report(self, trainer: pl.Trainer, step: Step, norm: float, alone: bool) -> FloatingPointError | None:
        """Count and report a skipped step; return an error where it is one too many."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        bad = not all(bool(loss.isfinite().all()) for loss in step.losses)
        if scaler is not None and scaler.get_scale() >= LEAST_SCALE and not any(gather(trainer, bad, alone)):
            return None
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        record = {"step": step.number, "epoch": step.epoch, "batches": step.batches, "norm": str(norm)}
        names = getattr(trainer.train_dataloader, "names", None)
        if trainer.is_global_zero and names is not None:
            record["samples"] = [name for batch in step.batches for name in names(step.epoch, batch)]
        self._append(trainer, record | {"in_a_row": self.in_a_row})
        where = f"step {step.number} (batch {step.batches[-1]} of epoch {step.epoch})"
        if self.in_a_row <= self.max_skipped:
            rank_zero_warn(
                f"the gradient's norm is {norm} at {where}: it is skipped ({self.in_a_row} in a row); {self._file} "
                "lists its samples"
            )
            return None
        return FloatingPointError(
            f"the gradient's norm is {norm} at {where}: steps {step.number + 1 - self.in_a_row} to {step.number} were "
            f"not finite, over optimizer.max_skipped={self.max_skipped}: see their batches in {self._file}; {REMEDIES}"
        )

    def _append(self, trainer: pl.Trainer, record: dict[str, Any]) -> None:
        """Append a line to the file of skipped steps; warn where it cannot be written."""
        if not trainer.is_global_zero or lightning_internals.is_dry_run(trainer):
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_for_writing(self._file, os.O_WRONLY | os.O_APPEND), "a") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:
            rank_zero_warn(
                f"{self._file} cannot be written ({error.strerror}); of a skipped step it would say {record}"
            )


class Statistics:
    """Batch norms' running statistics as of the last finite step: a forward pass changes them before the loss."""

    def __init__(self, module: nn.Module) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, _NormBase)]
        self.live = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self.kept = [buffer.clone() for buffer in self.live]

    def keep_or_restore(self, finite: Tensor) -> None:
        """Keep the current statistics after a finite step, or restore the last ones kept."""
        for kept, live in zip(self.kept, self.live, strict=True):
            kept.copy_(torch.where(finite, live, kept))
            live.copy_(kept)


def keep_settings(optimizer: torch.optim.Optimizer) -> None:
    """Restore the settings of the groups after the next step: timm's Adan and LAMB count steps there."""
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
    """Make all gradients of a loss that is not finite NaN, so that their reduction shows it to every rank.

    They could be finite otherwise. Gradients of a finite loss are multiplied by one, which changes no bit. The GPU
    is not waited for.
    """
    if loss.requires_grad:
        factor = torch.where(loss.detach().isfinite(), 1.0, math.nan).to(loss.dtype)
        loss.register_hook(lambda gradient: gradient * factor)


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients together, over all shards of those that are sharded."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # each rank holds a part of the norm


def gather(trainer: pl.Trainer, value: Any, alone: bool = False) -> list[Any]:
    """Return each rank's value, by rank; `alone`: this rank's only."""
    if alone or trainer.world_size == 1:
        return [value]
    values = [None] * trainer.world_size
    torch.distributed.all_gather_object(values, value)
    return values
